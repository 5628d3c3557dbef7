"""RL post-training from end to end; what `specactor train` and `jobs/train.py` run. Reads as the algorithm."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.config.online import taught_by_trainer
from specactor_ray.errors import SpecActorError
from specactor_ray.learner.recipe import make_recipe
from specactor_ray.observability.console import say
from specactor_ray.rollout.output import discard_run_folder
from specactor_ray.training.checkpoint import TrainState
from specactor_ray.training.data import TaskStream
from specactor_ray.training.experience import Experience, ExperienceMaker
from specactor_ray.training.record import StepRecorder
from specactor_ray.training.reward_runner import RewardRunner
from specactor_ray.training.run_folder import TrainingRun, open_run
from specactor_ray.training.setup import announce, checked_memory, checked_tasks, prepare
from specactor_ray.training.stop_signal import StopSignal

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """How a training run ended."""

    status: str
    """`complete` or `interrupted`."""
    folder: Path
    summary: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "complete" else EXIT_INTERRUPTED


def train(config: Config, console: Console) -> TrainOutcome:
    """Train until `trainer.steps`, or until interrupted (Ctrl-C, SIGTERM: with a checkpoint).

    Args:
        config: The resolved configuration; `run.name` is filled in if it is not set.
        console: Where progress is shown.

    Raises:
        UserError: Something in the configuration, the data or the cluster is wrong; found before anything is started.
        SpecActorError: The trainer or all verifiers were lost, or the loss stayed non-finite; checkpoints stand.
    """
    prepare(config)
    stream = checked_tasks(config)
    memory = checked_memory(config)
    with StopSignal() as stop:
        run = open_run(config)
        stream.order.position, stream.skipped = run.state.position, run.state.skipped_tasks
        announce(config, run, memory, console)
        try:
            return _train(config, run, stream, stop, console)
        except BaseException as error:
            if run.checkpoint is None and not run.metrics_file.exists():
                discard_run_folder(run.folder)
                if isinstance(error, KeyboardInterrupt):
                    say(console, "interrupted before the first step; nothing was kept")
            raise


def _train(config: Config, run: TrainingRun, stream: TaskStream, stop: StopSignal, console: Console) -> TrainOutcome:
    with stop.shielded():
        from specactor_ray.rollout.prompts import sampling_from_config
        from specactor_ray.rollout.rollout import Rollout
        from specactor_ray.training.trainer_group import TrainerGroup

    with (
        Rollout(config) as rollout,
        TrainerGroup(config, rollout.run_name, run.checkpoint) as trainer,
        StepRecorder(config, run, rollout, console) as record,
    ):
        recipe, sampling = make_recipe(config), sampling_from_config(config)
        maker = ExperienceMaker(config, recipe, stream, RewardRunner(config.reward), record.timed)
        state, offload, pupil = run.state, config.trainer.offload, taught_by_trainer(config)
        saver = _Saver(run, trainer)
        if state.step:  # the version of the weights is the number of steps they have had
            rollout.update_weights(trainer.export_weights(state.step))
        try:
            while state.step < config.trainer.steps:
                record.begin(state.step)
                experience = maker.collect(rollout, sampling, state.step)
                with stop.shielded():
                    if offload:
                        rollout.sleep()
                        trainer.reload()
                    with record.timed("update"):
                        update = trainer.update(experience.samples, state.step, sampling.seed + state.step)
                        taught = trainer.teach_drafter(experience.samples, state.step) if pupil is not None else None
                    with record.timed("sync"):
                        weights = trainer.export_weights(state.step + 1)
                        if offload:
                            trainer.offload()
                            rollout.wake()
                        rollout.update_weights(weights)
                        if pupil is not None and taught is not None:
                            rollout.update_drafter(pupil.method, taught)
                    state = _next(state, stream.order.position, stream.skipped, update, experience)
                    record.end(state.step, experience, update, weights.num_bytes)
                    saver.state = state
                    if _is_due(config, state):
                        with record.timed("checkpoint"):
                            saver.save()
                if state.bad_steps >= config.trainer.max_bad_steps:
                    raise SpecActorError(
                        f"{state.bad_steps} steps in a row taught nothing: the loss or the gradient was not finite, or "
                        f"every reward failed (the warnings say which). The run stops with a checkpoint of step "
                        f"{state.step}. Fix: a lower trainer.learning_rate, or the reward function"
                    )
        except KeyboardInterrupt:  # a StopRequested that comes while Ray waits arrives as its base class
            say(console, f"interrupted after step {state.step}; saving a checkpoint")
            with stop.shielded():
                saver.save()
            return record.finish("interrupted", saver.failures)
        except SpecActorError as error:
            with contextlib.suppress(SpecActorError):  # it may be the trainer that was lost
                saver.save()
            record.finish("failed", saver.failures, str(error))
            raise
        saver.save()
        return record.finish("complete", saver.failures)


def _next(
    state: TrainState, position: int, skipped: int, update: dict[str, float], experience: Experience
) -> TrainState:
    rewards = experience.rewards
    unscored = bool(rewards) and experience.reward_failures.total() == len(rewards)
    bad = unscored or (update["skipped"] > 0 and update["grad_norm"] == 0.0)
    reward = sum(rewards) / len(rewards) if rewards else None
    return replace(
        state,
        step=state.step + 1,
        position=position,
        skipped_tasks=skipped,
        bad_steps=state.bad_steps + 1 if bad else 0,
        reward=reward,
    )


def _is_due(config: Config, state: TrainState) -> bool:
    return state.step % config.checkpoint.every == 0 or state.step == config.trainer.steps


class _Saver:
    """Saves the newest state once; a checkpoint that cannot be written is counted and the run goes on."""

    def __init__(self, run: TrainingRun, trainer: Any) -> None:
        self.state = run.state
        self.failures = 0
        self._run, self._trainer = run, trainer
        self._saved_step = run.state.step if run.checkpoint is not None else -1

    def save(self) -> None:
        if self.state.step == self._saved_step:
            return
        try:
            self._run.store.save(self.state, self._trainer.save)
            self._saved_step = self.state.step
        except OSError as error:
            self.failures += 1
            logger.error("the checkpoint of step %d was not written: %s", self.state.step, error)
