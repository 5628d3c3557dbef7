"""The steps of training, written as the algorithm.

This module starts nothing and imports neither Ray nor torch: the same code runs with the real parts and with fakes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specactor_ray.config.schema import Config
from specactor_ray.core.errors import SpecActorError, WeightsError, counted_by_kind
from specactor_ray.core.signals import signals_deferred
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState, mean_reward
from specactor_ray.runs.folder import RunOutcome

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.trainer.experience import AheadMaker, Experience, ExperienceMaker
    from specactor_ray.trainer.record import StepRecorder
    from specactor_ray.trainer.trainer_ranks import TrainerRanks

logger = logging.getLogger(__name__)

KEEP = "keep"
"""Policy of `Rollout.update_weights`: requests of later steps continue with the new weights."""


class Saver:
    """Writes checkpoints of the trainer's weights: `write` fills a folder; `saved`: `state` needs no saving."""

    def __init__(self, store: CheckpointStore, write: Callable[[Path], None], state: TrainState, saved: bool) -> None:
        self.state = state
        """State after the last complete update."""
        self.failures = 0
        """Number of checkpoints that could not be written."""
        self.problem = ""
        """Reason why the last wanted checkpoint is missing; empty if it exists."""
        self._store, self._write = store, write
        self._saved_step = state.step if saved else -1
        self._updating = False

    @property
    def is_saved(self) -> bool:
        """Whether the state needs no saving."""
        return self.state.step == self._saved_step

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the weights are between two steps, and cannot be saved; the state is set before the end."""
        self._updating = True
        yield
        self._updating = False

    def save(self) -> bool:
        """Save the state unless it is saved. Returns whether it is; `problem` has the reason if not. Raises
        SpecActorError if the trainer failed."""
        if self.is_saved:
            return True
        if self._updating:
            self.problem = f"the update after step {self.state.step} was broken off, and the weights are between steps"
            return False
        try:
            self._store.save(self.state, self._write)
        except OSError as error:
            self.failures += 1
            self.problem = str(error)
            logger.error("the checkpoint of step %d was not written: %s", self.state.step, error)
            return False
        self._saved_step, self.problem = self.state.step, ""
        return True


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Parts that the steps use."""

    config: Config
    rollout: Rollout
    trainer: TrainerRanks
    maker: ExperienceMaker | AheadMaker
    record: StepRecorder
    saver: Saver
    """Holds the initial state of the training, and later the present one."""
    teaches: bool
    """Whether the trainer trains a drafter."""
    say: Callable[[str], None]
    """Shows a line to the user."""
    watch: Watch = lambda parts: None
    """Called before the first step and after every step, when the verifiers have its weights; may change
    `config.trainer.steps`."""


Watch = Callable[[TrainingParts], None]


def run_steps(parts: TrainingParts) -> RunOutcome:
    """Train until `trainer.steps` or an interruption. At any end a checkpoint is tried and a summary is written. Raises
    SpecActorError if a part was lost or the loss stayed non-finite; the summary has status `failed` then."""
    saver = parts.saver
    try:
        if saver.state.step:  # the weight version is the number of steps done
            parts.rollout.update_weights(parts.trainer.export_weights(saver.state.step))
        saver.save()  # the first own checkpoint of a run that begins with another run's
        parts.watch(parts)
        while saver.state.step < parts.config.trainer.steps:
            experience = _step(parts)
            if parts.record.problem:
                raise WeightsError(parts.record.problem)
            _refuse_to_learn_nothing(parts, experience)
            parts.watch(parts)
    except KeyboardInterrupt:
        parts.say(f"interrupted after step {saver.state.step}{'' if saver.is_saved else '; saving a checkpoint'}")
        return _end(parts, "interrupted")
    except Exception as error:
        if not isinstance(error, SpecActorError):
            logger.exception("training ends after step %d", saver.state.step)
        _end(parts, "failed", str(error) if isinstance(error, SpecActorError) else f"{type(error).__name__}: {error}")
        raise
    return _end(parts, "complete")


def _step(parts: TrainingParts) -> Experience:
    state, record, saver = parts.saver.state, parts.record, parts.saver
    record.begin(state.step)
    sampling = parts.config.sampling
    with record.timed("rollout"):
        experience = parts.maker.collect(parts.rollout, sampling, state.step)
    with signals_deferred():
        if parts.config.trainer.offload:
            parts.rollout.sleep()
            parts.trainer.reload()
        with record.timed("update"), saver.updating():
            update = parts.trainer.update(experience.samples, state.step, sampling.seed + state.step)
            saver.state = _next(state, update, experience)
        num_bytes = 0
        try:
            num_bytes = _hand_over(parts, experience)
        finally:  # the step counts even if the verifiers did not get the weights
            record.end(saver.state.step, experience, update, num_bytes)
        due = saver.state.step % parts.config.checkpoint.every == 0 or saver.state.step == parts.config.trainer.steps
        if due or saver.problem:
            with record.timed("checkpoint"):
                saver.save()
    return experience


def _hand_over(parts: TrainingParts, experience: Experience) -> int:
    """Send new weights to the verifiers, and those of a trained drafter to its actors. Returns the former's bytes."""
    rollout, trainer, record, done = parts.rollout, parts.trainer, parts.record, parts.saver.state.step
    drafter_weights = None
    if parts.teaches:
        with record.timed("update"):
            drafter_weights = trainer.train_drafter(experience.samples, done - 1)
    with record.timed("sync"):
        weights = trainer.export_weights(done)
        if parts.config.trainer.offload:
            trainer.offload()
            rollout.wake()
        rollout.update_weights(weights, KEEP if parts.config.trainer.max_staleness else None)
        if drafter_weights is not None:
            rollout.update_drafter(drafter_weights)
    return weights.num_bytes


def _end(parts: TrainingParts, status: str, reason: str = "") -> RunOutcome:
    """Save the unsaved state and write the summary. A run without its last checkpoint has failed."""
    saver = parts.saver
    with signals_deferred():
        try:
            with parts.record.timed("checkpoint"):
                problem = "" if saver.save() else saver.problem
        except SpecActorError as error:  # the trainer itself may be lost
            problem = str(error)
        if problem:
            status = "failed"
            lost = f"the checkpoint of step {saver.state.step} could not be written: {problem}"
            reason = f"{reason}; {lost}" if reason else lost
            parts.say(lost)
        return parts.record.finish(status, saver.failures, reason)


def _next(state: TrainState, update: Mapping[str, float], experience: Experience) -> TrainState:
    rewards = experience.rewards
    bad = experience.is_unusable or (update["skipped"] > 0 and update["grad_norm"] == 0.0)
    reward = sum(rewards) / len(rewards) if rewards else None
    return replace(
        state,
        step=state.step + 1,
        position=experience.position[0],
        skipped_tasks=experience.position[1],
        bad_steps=state.bad_steps + 1 if bad else 0,
        reward=mean_reward(state.reward, reward, state.step + 1),
    )


def _refuse_to_learn_nothing(parts: TrainingParts, experience: Experience) -> None:
    """Raises SpecActorError after `trainer.max_bad_steps` bad steps in a row, or if all steps of the run are bad."""
    state, trainer = parts.saver.state, parts.config.trainer
    if state.bad_steps < min(trainer.max_bad_steps, trainer.steps):
        return
    reason, fix = "the loss or the gradient was not finite", "a lower trainer.learning_rate"
    if experience.is_unusable:
        failed = experience.failures
        reason = f"no sample can be used: {counted_by_kind(failed['reward'] + failed['rollout']) or 'all are empty'}"
        fix = "reward.functions" if failed["reward"] else "the cause of these failures"
    bad = f"the last {state.bad_steps} steps" if state.bad_steps > 1 else "the last step"
    raise SpecActorError(
        f"nothing was learnt in {bad}: {reason}. The run stops with a checkpoint of step {state.step}. Fix: {fix}"
    )
