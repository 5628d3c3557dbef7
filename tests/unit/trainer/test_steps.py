"""The steps around stand-ins: however a run ends, nothing that was learnt is lost and the summary says how it was."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.config.training_schema import OnlineConfig, OnlineWhere
from specactor_ray.core.errors import ActorLostError, SpecActorError, WeightsError
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState, best_of, read_state
from specactor_ray.runs.folder import RunOutcome
from specactor_ray.trainer.experience import Experience
from specactor_ray.trainer.steps import Training, Watch
from specactor_ray.trainer.turns import DeviceTurns
from specactor_ray.transport.messages import WeightSet


class Device:
    """A device with a limit of memory, and what is on it."""

    AWAKE = {"weights": 10, "cache": 60, "hosted drafters": 10}
    TRAINER = {"states": 70}

    def __init__(self) -> None:
        self.held, self.limit = dict(self.AWAKE), 100

    def take(self, **parts: int) -> None:
        self.held |= parts
        assert sum(self.held.values()) <= self.limit, self.held


class World:
    """All parts of a run in one: only remembers, and fails where it is told to: the third call of `update` raises
    `fail["update", 3]`."""

    def __init__(self, folder: Path, **trainer: Any) -> None:
        self.fail: dict[tuple[str, int], BaseException] = {}
        self.calls: Counter[str] = Counter()
        self.weights = 0
        """Updates that the weights have had; a half for one that was broken off."""
        self.recorded: list[int] = []
        self.problem = ""
        self.finished: list[tuple[str, int, str]] = []
        self.said: list[str] = []
        head = DrafterConfig(method="eagle", model="head", online=OnlineConfig(where=OnlineWhere.trainer))
        self.config = Config(mode=ModeName.coupled, drafters=[head])
        self.watch: Watch = lambda training: None
        self.before_update: Callable[[], None] = lambda: None
        self.config.checkpoint.every = 2
        self.config.trainer.steps = 6
        for name, value in trainer.items():
            setattr(self.config.trainer, name, value)
        self.store = CheckpointStore(folder, 99, False)
        self.resumed, self.is_saved = TrainState(), True
        self.device = Device()
        self.scores: dict[int, float] = {}
        """Step → result of its evaluation, 0 if it has none."""
        self.measured: list[int] = []
        self.evaluate_held_out: Callable[[Any], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """Counts the calls of a method, with what else it does: `_update` for `update`."""
        more = getattr(type(self), f"_{name}", lambda *arguments: contextlib.nullcontext())

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if name == "update":
                self.weights += 0.5
                self.before_update()
            if (error := self.fail.get((name, self.calls[name]))) is not None:
                raise error
            return more(self, *arguments, **options)

        return call

    def _sleep(self, keep_weights: bool) -> None:
        assert not keep_weights and self.device.held == Device.AWAKE
        self.device.held = {}

    def _reload(self) -> None:
        self.device.take(**Device.TRAINER)

    def _offload(self) -> None:
        assert self.device.held == Device.TRAINER
        self.device.held = {}

    def _wake(self) -> None:
        assert "weights" in self.device.held, "new ones, as the old ones are lost"
        self.device.take(**Device.AWAKE)

    def _update_weights(self, weights: WeightSet, policy: str | None = None) -> None:
        assert weights.version == self.weights
        self.device.take(weights=10)

    def _update(self, samples: Any, step: int, seed: int) -> dict[str, float]:
        assert step + 0.5 == self.weights
        if self.config.trainer.offload:
            assert self.device.held == Device.TRAINER
            self.device.take(gradients=20)
            del self.device.held["gradients"]
        self.weights += 0.5
        return {"skipped": 0.0, "grad_norm": 1.0}

    def _train_drafter(self, samples: Any, step: int) -> WeightSet:
        return WeightSet(step, (), 0)

    def _export_weights(self, version: int) -> WeightSet:
        return WeightSet(version, (), 10)

    def _save(self, folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "model").write_text(str(self.weights))

    def _collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Any:
        assert self.device.held == Device.AWAKE
        return SimpleNamespace(samples=["s"], rewards=[1.0], is_unusable=False, position=(3 * step, 0))

    def _end(self, step: int, experience: Any, update: Any, sync_bytes: int) -> None:
        self.recorded.append(step)

    def _finish(self, status: str, checkpoint_failures: int, error: str = "") -> RunOutcome:
        self.finished.append((status, checkpoint_failures, error))
        return RunOutcome(Path(), {"status": status})

    def run(self) -> RunOutcome:
        run: Any = SimpleNamespace(store=self.store, state=self.resumed, is_saved=self.is_saved)
        world: Any = self
        training = Training(
            self.config, run, world, world, world, world, self.said.append, self.watch, self.evaluate_held_out
        )
        return training.run()

    def evaluates(self, every: int, scores: dict[int, float]) -> None:
        self.config.evaluation.every, self.scores = every, scores
        self.store = CheckpointStore(self.store.folder, 99, True)
        self.evaluate_held_out = self.evaluate

    def _evaluate(self, rollout: Any) -> Any:
        self.measured.append(int(self.weights))

    def _evaluated(self, step: int, experience: Any) -> float:
        assert step == self.weights == self.measured[-1], "the verifiers have the weights of the step"
        return self.scores.get(step, 0.0)

    @property
    def saved(self) -> dict[str, str]:
        """Checkpoint → updates that its weights have had."""
        return {path.name: (path / "weights" / "model").read_text() for path in self.store.all()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names(steps: Iterable[int]) -> list[str]:
    return [f"step-{step:06d}" for step in steps]


def test_a_run_ends_after_its_last_step_or_earlier(world: World) -> None:
    world.config.trainer.steps = 5
    outcome = world.run()
    assert (outcome.status, outcome.exit_code, world.finished) == ("complete", 0, [("complete", 0, "")])
    assert world.saved == {"step-000002": "2.0", "step-000004": "4.0", "step-000005": "5.0"}
    assert world.recorded == [1, 2, 3, 4, 5] and world.calls["update_drafter"] == 5
    early = World(world.store.folder / "early")
    watched = list[tuple[int, int]]()

    def watch(training: Training) -> None:
        watched.append((training.state.step, early.calls["update_weights"]))
        training.config.trainer.steps = 3

    early.watch = watch
    assert early.run().status == "complete" and early.recorded == [1, 2, 3] and list(early.saved) == names([2, 3])
    assert watched == [(0, 0), (1, 1), (2, 2), (3, 3)], "the verifiers have the weights of the step"


@pytest.mark.parametrize("offload", [False, True])
def test_a_signal_during_an_update_ends_the_run_after_the_step(offload: bool, world: World) -> None:
    world.config.trainer.offload = offload
    world.before_update = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with sigterm_interrupts():
        assert world.run().status == "interrupted"
    assert world.recorded == [1] and world.saved == {"step-000001": "1.0"} and world.device.held == Device.AWAKE


def test_a_run_from_another_runs_checkpoint_has_one_of_its_own_at_once(world: World) -> None:
    """And gives its weights to the verifiers first."""
    world.resumed, world.weights, world.is_saved = TrainState(step=3, position=12), 3, False
    world.fail["collect", 1] = SystemExit()  # which nothing handles, as a kill
    with pytest.raises(SystemExit):
        world.run()
    assert world.saved == {"step-000003": "3"} and world.calls["update_weights"] == 1


FULL = "disk full"
LOST = "the checkpoint of step {} could not be written: disk full"


@pytest.mark.parametrize(
    ("interrupted", "failing_saves", "saved", "finished", "exit_code"),
    [
        (None, [1, 2], [4, 6], ("complete", 2, ""), 0),
        (None, [1], [3, 4, 6], ("complete", 1, ""), 0),  # it is tried again at the next step
        (None, range(3, 9), [2, 4], ("failed", 2, LOST.format(6)), 1),
        (1, [], [], ("interrupted", 0, ""), 130),
        (3, [], [2], ("interrupted", 0, ""), 130),
        (4, [], [2, 3], ("interrupted", 0, ""), 130),
        (4, [2], [2], ("failed", 1, LOST.format(3)), 1),
    ],
)
def test_checkpoints_of_interrupted_runs_and_on_a_full_disk(
    world: World,
    interrupted: int | None,
    failing_saves: Iterable[int],
    saved: list[int],
    finished: tuple[str, int, str],
    exit_code: int,
) -> None:
    """An interruption in this call of `collect`; a run whose last checkpoint is missing has failed."""
    world.fail = {("save", number): OSError(FULL) for number in failing_saves}
    if interrupted is not None:
        world.fail["collect", interrupted] = KeyboardInterrupt()
    outcome = world.run()
    assert (outcome.status, outcome.exit_code, world.finished) == (finished[0], exit_code, [finished])
    assert world.saved == {name: f"{step}.0" for name, step in zip(names(saved), saved, strict=True)}
    saving = "; saving a checkpoint" if interrupted and interrupted % 2 == 0 else ""  # every second one is saved
    first = [] if interrupted is None else [f"interrupted after step {interrupted - 1}{saving}"]
    assert world.said == [*first, *([finished[2]] if finished[2] else [])]


BEFORE = ("begin", "collect", "sleep", "reload")
"""What happens in a step before its update, and after it."""
AFTER = ("train_drafter", "export_weights", "offload", "update_weights", "wake", "update_drafter", "end")


@pytest.mark.parametrize(
    ("where", "error"),
    [*((where, ActorLostError("gone")) for where in (*BEFORE, *AFTER)), ("end", RuntimeError("gone"))],
)
def test_wherever_a_part_fails_what_was_learnt_is_saved(where: str, error: Exception, tmp_path: Path) -> None:
    world, saved = World(tmp_path, offload=True), 3 if where in BEFORE else 4
    world.fail[where, 4] = error
    with pytest.raises(type(error), match="gone"):
        world.run()
    assert world.saved[f"step-{saved:06d}"] == f"{saved}.0"
    status, failures, reason = world.finished[0]
    assert (status, failures, len(world.finished)) == ("failed", 0, 1) and "gone" in reason
    if where != "end":
        assert world.recorded[-1] == saved, "no checkpoint is ahead of the records"
    order = (*BEFORE, *AFTER)
    later = [one for one in order[order.index(where) + 1 :] if one != "end"]
    assert {world.calls[one] for one in later} <= {3}, "nothing follows that needs what failed"


def test_no_turn_of_the_device_is_left_out(world: World) -> None:
    rollout: Any = world
    turns = DeviceTurns(rollout, rollout)
    with pytest.raises(SpecActorError, match="rollout, and offloaded follows training only"):
        turns.to_rollout(WeightSet(0, ()))
    turns.to_trainer()
    world.fail["offload", 1] = ActorLostError("gone")
    with pytest.raises(ActorLostError):
        turns.to_rollout(WeightSet(0, ()))
    assert turns.state == "unknown" and not world.calls["update_weights"]
    with pytest.raises(SpecActorError, match="device is unknown"):
        turns.to_trainer()


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        # Weights between two steps are not saved as either, and a lost trainer cannot save.
        ({("update", 4): "no memory"}, "no memory; the checkpoint of step 3 could not be written: the update"),
        ({("export_weights", 3): "gone", ("save", 2): "still gone"}, "step 3 could not be written: still gone"),
    ],
)
def test_what_cannot_be_saved_is_in_the_summary(world: World, fail: dict[tuple[str, int], str], reason: str) -> None:
    world.fail = {call: ActorLostError(text) for call, text in fail.items()}
    with pytest.raises(ActorLostError, match=rf"^{next(iter(fail.values()))}$"):
        world.run()
    assert list(world.saved) == names([2])
    assert world.finished[0][0] == "failed" and reason in world.finished[0][2]


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("fails", ["loss", "rewards"])
def test_a_run_that_learns_nothing_stops_with_a_checkpoint(steps: int, fails: str, tmp_path: Path) -> None:
    """At its end, or after three such steps."""
    world, at, reason = World(tmp_path, steps=steps), min(steps, 3), "not finite"
    failures = {"reward": Counter({"ValueError: a": 3, "ValueError: b": 2, "timed out": 9}), "rollout": Counter[str]()}
    if fails == "loss":
        world.update = lambda samples, step, seed: {"skipped": 1.0, "grad_norm": 0.0}
        world.export_weights = lambda version: WeightSet(0, (), 0)
    else:
        world.collect, reason = lambda *_: Experience(failures=failures), "9 x timed out, 5 x .*reward.functions"
    with pytest.raises(SpecActorError, match=reason):
        world.run()
    assert world.finished[0][0] == "failed" and f"step-{at:06d}" in world.saved


def test_a_run_whose_weights_do_not_arrive_fails_even_in_its_last_step(world: World) -> None:
    def end(step: int, *_: Any) -> None:
        world.problem = "step 6: the rollout does not run the trained weights" if step == 6 else ""

    world.end = end
    with pytest.raises(WeightsError, match="step 6"):
        world.run()
    assert world.finished == [("failed", 0, "step 6: the rollout does not run the trained weights")]


def states(world: World) -> dict[int, tuple[int, float | None]]:
    """Step of each checkpoint → step and result of the evaluation that it has."""
    found = (read_state(path) for path in world.store.all())
    return {state.step: (state.evaluated, state.evaluation) for state in found}


def test_evaluations_come_before_checkpoints_and_the_best_one_is_saved(world: World) -> None:
    """At the start, every so many steps, and after the last one, also where `watch` ends the run. A step that is not
    the best so far is saved when its time comes; the first weights are never saved."""
    world.evaluates(3, {0: 0.9, 3: 0.5, 6: 0.4, 7: 0.7})
    world.config.trainer.steps, world.config.checkpoint.every = 9, 2

    def watch(training: Training) -> None:
        if training.state.step == 7:
            training.config.trainer.steps = 7

    world.watch = watch
    assert world.run().status == "complete" and world.measured == [0, 3, 6, 7]
    assert states(world) == {2: (0, None), 3: (3, 0.5), 4: (3, None), 6: (6, 0.4), 7: (7, 0.7)}
    assert best_of(world.store.sound()) == world.store.all()[-1]


@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_an_interrupted_evaluation_is_made_again(world: World, interrupted: int) -> None:
    """At the start, at a step without a checkpoint, and at one with a checkpoint. A resumed run repeats none."""
    world.evaluates(3, {3: 0.5, 6: 0.9})
    world.fail["evaluate", interrupted] = KeyboardInterrupt()
    assert world.run().status == "interrupted"
    step = 3 * (interrupted - 1)
    saved = states(world)
    assert world.recorded[-1:] == [step] * (step > 0) and list(saved)[-1:] == [step] * (step > 0)
    world.fail.clear()
    world.resumed = read_state(world.store.all()[-1]) if step else TrainState()
    assert world.resumed.evaluation is None and world.run().status == "complete"
    assert world.measured == [0, 3, 6] and states(world)[6] == (6, 0.9)
    assert states(world)[3] == (3, 0.5), "the best one of its time is saved with its result"


def test_a_run_from_another_runs_checkpoint_is_evaluated_at_its_start(world: World) -> None:
    world.evaluates(5, {4: 0.5})
    world.resumed, world.weights, world.is_saved = TrainState(step=4), 4, False
    assert world.run().status == "complete" and world.measured == [4, 5, 6]
    assert states(world) == {4: (4, 0.5), 6: (6, 0.0)}
