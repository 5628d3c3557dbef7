"""The steps of training, written as the algorithm.

This module starts nothing and imports neither Ray nor torch: the same code runs with the real parts and with fakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from specactor_ray.config.methods import online_drafter
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import SpecActorError, WeightsError, counted_by_kind
from specactor_ray.core.signals import signals_deferred
from specactor_ray.runs.checkpoint import TrainState, mean_reward
from specactor_ray.runs.folder import RunOutcome
from specactor_ray.trainer.turns import DeviceTurns

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.runs.training import TrainingRun
    from specactor_ray.trainer.experience import AheadMaker, Experience, ExperienceMaker
    from specactor_ray.trainer.record import StepRecorder
    from specactor_ray.trainer.trainer_ranks import TrainerRanks

logger = logging.getLogger(__name__)

KEEP = "keep"
"""Policy of `Rollout.update_weights`: requests of later steps continue with the new weights."""


class Training:
    """The parts of a run, and its state after the last complete update. `run`: its folder and the state to begin with.

    `watch` is called before the first step and after every step, when the verifiers have its weights; it may change
    `config.trainer.steps`. `say` shows a line to the user.

    `evaluate` rolls out the held-out tasks: when the verifiers have the weights of the step, and before its checkpoint,
    which so has the result. Only this thread changes weights, so rollouts ahead of the trainer may run meanwhile.
    """

    def __init__(
        self,
        config: Config,
        run: TrainingRun,
        rollout: Rollout,
        trainer: TrainerRanks,
        maker: ExperienceMaker | AheadMaker,
        record: StepRecorder,
        say: Callable[[str], None],
        watch: Watch = lambda training: None,
        evaluate: Callable[[Rollout], Experience] | None = None,
    ) -> None:
        self.config, self.rollout, self.state = config, rollout, run.state
        self._trainer, self._maker, self._record = trainer, maker, record
        self._say, self._watch, self._store, self._roll_out_held_out = say, watch, run.store, evaluate
        self._turns = DeviceTurns(rollout, trainer) if config.trainer.offload else None
        self._teaches = online_drafter(config) is not None
        self._saved_step = run.state.step if run.is_saved else -1
        self._save_failures, self._save_problem = 0, ""
        """Number of checkpoints that could not be written, and why the last wanted one is missing."""
        self._is_between_steps = False
        """Whether an update has begun and not ended: its weights cannot be saved as those of any step."""

    def run(self) -> RunOutcome:
        """Train until `trainer.steps` or an interruption. At any end a checkpoint is tried and a summary is written.
        Raises SpecActorError if a part was lost or the loss stayed non-finite; the summary has status `failed` then."""
        try:
            if self.state.step:  # the weight version is the number of steps done
                self.rollout.update_weights(self._trainer.export_weights(self.state.step))
            self._save()  # the first own checkpoint of a run that begins with another run's
            self._evaluate()
            self._watch(self)
            while self.state.step < self.config.trainer.steps:
                experience = self._step()
                if self._record.problem:
                    raise WeightsError(self._record.problem)
                _refuse_to_learn_nothing(self.state, self.config, experience)
                self._evaluate()
                self._save_if_due()
                self._watch(self)
            self._evaluate()  # `watch` may have ended the run
        except KeyboardInterrupt:
            saving = "" if self._saved_step == self.state.step else "; saving a checkpoint"
            self._say(f"interrupted after step {self.state.step}{saving}")
            return self._end("interrupted")
        except Exception as error:
            if not isinstance(error, SpecActorError):
                logger.exception("training ends after step %d", self.state.step)
            self._end("failed", str(error) if isinstance(error, SpecActorError) else f"{type(error).__name__}: {error}")
            raise
        return self._end("complete")

    def _step(self) -> Experience:
        record, sampling, step = self._record, self.config.sampling, self.state.step
        record.begin(step)
        with record.timed("rollout"):
            experience = self._maker.collect(self.rollout, sampling, step)
        with signals_deferred():
            if self._turns is not None:
                self._turns.to_trainer()
            with record.timed("update"):
                self._is_between_steps = True
                update = self._trainer.update(experience.samples, step, sampling.seed + step)
                self.state, self._is_between_steps = _next(self.state, update, experience), False
            num_bytes = 0
            try:
                num_bytes = self._hand_over(experience)
            finally:  # the step counts even if the verifiers did not get the weights
                record.end(self.state.step, experience, update, num_bytes)
        return experience

    def _evaluate(self) -> None:
        """Evaluate the weights of this step if that is due. If they are the best, a checkpoint is saved at once; none
        of step 0, whose weights are `target.model`."""
        roll_out, record, step = self._roll_out_held_out, self._record, self.state.step
        is_first, is_last = self.state.evaluated < 0, step == self.config.trainer.steps
        is_due = is_first or is_last or step % self.config.evaluation.every == 0
        if roll_out is None or not is_due or self.state.evaluated == step:
            return
        with record.timed("evaluation"):
            experience = roll_out(self.rollout)
        with signals_deferred():
            self.state = replace(self.state, evaluated=step, evaluation=record.evaluated(step, experience))
            if step and self._store.is_best(self.state.evaluation):
                self._saved_step = -1  # a checkpoint of this step lacks its evaluation
                with record.timed("checkpoint"):
                    self._save()

    def _save_if_due(self) -> None:
        is_due = self.state.step % self.config.checkpoint.every == 0 or self.state.step == self.config.trainer.steps
        if is_due or self._save_problem:
            with signals_deferred(), self._record.timed("checkpoint"):
                self._save()

    def _hand_over(self, experience: Experience) -> int:
        """Send new weights to the verifiers, and those of a trained drafter to its actors. Returns the former's
        bytes."""
        rollout, trainer, record, done = self.rollout, self._trainer, self._record, self.state.step
        drafter_weights = None
        if self._teaches:
            with record.timed("drafter"):
                drafter_weights = trainer.train_drafter(experience.samples, done - 1)
        with record.timed("sync"):
            weights = trainer.export_weights(done)
            if self._turns is not None:
                self._turns.to_rollout(weights)
            else:
                rollout.update_weights(weights, KEEP if self.config.trainer.max_staleness else None)
            if drafter_weights is not None:
                rollout.update_drafter(drafter_weights)
        return weights.num_bytes

    def _save(self) -> None:
        """Save the state unless it is saved; if that fails, the reason is kept. Raises SpecActorError if the trainer
        failed."""
        step = self.state.step
        if self._is_between_steps and self._saved_step != step:
            self._save_problem = f"the update after step {step} was broken off, and the weights are between steps"
        elif self._saved_step != step:
            try:
                self._store.save(self.state, self._trainer.save)
                self._saved_step, self._save_problem = step, ""
            except OSError as error:
                self._save_failures += 1
                self._save_problem = str(error)
                logger.error("the checkpoint of step %d was not written: %s", step, error)

    def _end(self, status: str, reason: str = "") -> RunOutcome:
        """Save the unsaved state and write the summary. A run without its last checkpoint has failed."""
        with signals_deferred():
            try:
                with self._record.timed("checkpoint"):
                    self._save()
                problem = self._save_problem
            except SpecActorError as error:  # the trainer itself may be lost
                problem = str(error)
            if problem:
                status = "failed"
                lost = f"the checkpoint of step {self.state.step} could not be written: {problem}"
                reason = f"{reason}; {lost}" if reason else lost
                self._say(lost)
            return self._record.finish(status, self._save_failures, reason)


Watch = Callable[[Training], None]


def _next(state: TrainState, update: Mapping[str, float], experience: Experience) -> TrainState:
    rewards = experience.rewards
    bad = experience.is_unusable or (update["skipped"] > 0 and update["grad_norm"] == 0.0)
    reward = sum(rewards) / len(rewards) if rewards else None
    return replace(
        state,
        step=state.step + 1,
        evaluation=None,
        position=experience.position[0],
        skipped_tasks=experience.position[1],
        bad_steps=state.bad_steps + 1 if bad else 0,
        reward=mean_reward(state.reward, reward, state.step + 1),
    )


def _refuse_to_learn_nothing(state: TrainState, config: Config, experience: Experience) -> None:
    """Raises SpecActorError after `trainer.max_bad_steps` bad steps in a row, or if all steps of the run are bad."""
    if state.bad_steps < min(config.trainer.max_bad_steps, config.trainer.steps):
        return
    reason, fix = "the loss or the gradient was not finite", "a lower trainer.learning_rate"
    if experience.is_unusable:
        failed = experience.failures
        why = counted_by_kind(failed["reward"] + failed["rollout"]) or "all are empty, or cut off and masked"
        reason = f"no sample can be used: {why}"
        fix = "reward.functions" if failed["reward"] else "the cause of these failures"
    bad = f"the last {state.bad_steps} steps" if state.bad_steps > 1 else "the last step"
    raise SpecActorError(
        f"nothing was learnt in {bad}: {reason}. The run stops with a checkpoint of step {state.step}. Fix: {fix}"
    )
