"""The steps around stand-ins: however a run ends, nothing that was learnt is lost and the summary says how it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ActorLostError, SpecActorError
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.trainer.steps import Saver, TrainingParts, TrainOutcome, run_steps
from specactor_ray.transport.messages import WeightSet


class World:
    """All parts of a run in one: only remembers, and fails where it is told to: the third call of `update` raises
    `fail["update", 3]`."""

    def __init__(self, folder: Path, **trainer: Any) -> None:
        self.fail: dict[tuple[str, int], BaseException] = {}
        self.calls: Counter[str] = Counter()
        self.weights = 0
        """Updates that the weights have had; a half for one that was broken off."""
        self.recorded: list[int] = []
        self.finished: list[tuple[str, int, str]] = []
        self.said: list[str] = []
        self.config = Config()
        self.enough: Callable[[], bool] = lambda: False
        self.config.checkpoint.every = 2
        self.config.trainer.steps = 6
        for name, value in trainer.items():
            setattr(self.config.trainer, name, value)
        self.store = CheckpointStore(folder, 99, False)
        self.resumed, self.is_saved = TrainState(), True

    def happens(self, name: str) -> None:
        self.calls[name] += 1
        if (name, self.calls[name]) in self.fail:
            raise self.fail[name, self.calls[name]]

    def __getattr__(self, name: str) -> Any:
        """Methods that do nothing else: `sleep` and `wake`, `offload` and `reload`, `begin`."""
        return lambda *arguments: self.happens(name)

    def update_weights(self, weights: WeightSet, policy: str | None = None) -> None:
        self.happens("update_weights")
        assert weights.version == self.weights

    def update(self, samples: Any, step: int, seed: int) -> dict[str, float]:
        assert step == self.weights
        self.weights += 0.5
        self.happens("update")
        self.weights += 0.5
        return {"skipped": 0.0, "grad_norm": 1.0}

    def teach_drafter(self, samples: Any, step: int) -> WeightSet:
        self.happens("teach_drafter")
        return WeightSet(step, (), 0)

    def export_weights(self, version: int) -> WeightSet:
        self.happens("export_weights")
        return WeightSet(version, (), 10)

    def save(self, folder: Path) -> None:
        self.happens("save")
        (folder / "weights").mkdir()
        (folder / "weights" / "model").write_text(str(self.weights))

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Any:
        self.happens("collect")
        position = (3 * self.calls["collect"], 0)
        return SimpleNamespace(samples=["s"], rewards=[1.0], unscored=False, position=position)

    def timed(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end(self, step: int, experience: Any, update: Any, sync_bytes: int) -> None:
        self.happens("end")
        self.recorded.append(step)

    def finish(self, status: str, checkpoint_failures: int, error: str = "") -> TrainOutcome:
        self.finished.append((status, checkpoint_failures, error))
        return TrainOutcome(status, Path(), {})

    def run(self) -> TrainOutcome:
        saver = Saver(self.store, self.save, self.resumed, self.is_saved)
        world: Any = self
        return run_steps(
            TrainingParts(self.config, world, world, world, world, saver, "eagle", self.said.append, self.enough)
        )

    @property
    def saved(self) -> dict[str, str]:
        """Checkpoint → updates that its weights have had."""
        return {path.name: (path / "weights" / "model").read_text() for path in self.store.all()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_saves_when_due_and_at_the_end(world: World) -> None:
    world.config.trainer.steps = 5
    outcome = world.run()
    assert (outcome.status, outcome.exit_code, world.finished) == ("complete", 0, [("complete", 0, "")])
    assert world.saved == {"step-000002": "2.0", "step-000004": "4.0", "step-000005": "5.0"}
    assert world.recorded == [1, 2, 3, 4, 5] and world.calls["update_drafter"] == 5


def test_a_run_that_has_enough_ends_whole_before_its_last_step(world: World) -> None:
    world.config.trainer.steps = 5
    world.enough = lambda: len(world.recorded) == 3
    assert world.run().status == "complete" and world.recorded == [1, 2, 3]
    assert list(world.saved)[-1] == "step-000003"


def test_a_resumed_run_gives_its_weights_to_the_verifiers_first(world: World) -> None:
    world.resumed, world.weights = TrainState(step=4, position=12), 4
    world.run()
    assert world.recorded == [5, 6] and world.calls["update_weights"] == 3
    assert list(world.saved) == ["step-000006"]


def test_a_run_from_another_runs_checkpoint_has_one_of_its_own_at_once(world: World) -> None:
    world.resumed, world.weights, world.is_saved = TrainState(step=3, position=12), 3, False
    world.fail["collect", 1] = SystemExit()  # which nobody handles, as a kill
    with pytest.raises(SystemExit):
        world.run()
    assert world.saved == {"step-000003": "3"}


def test_a_signal_during_an_update_ends_the_run_after_the_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    update = world.update

    def interrupted(*arguments: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*arguments)

    monkeypatch.setattr(world, "update", interrupted)
    with sigterm_interrupts():
        assert world.run().status == "interrupted"
    assert world.recorded == [1] and world.saved == {"step-000001": "1.0"}


def test_a_checkpoint_that_failed_is_tried_again_at_the_next_step(world: World) -> None:
    world.fail["save", 1] = world.fail["save", 2] = OSError("disk full")
    outcome = world.run()
    assert world.saved == {"step-000004": "4.0", "step-000006": "6.0"}
    assert outcome.status == "complete" and world.finished == [("complete", 2, "")]

    again = World(world.store.folder / "second")
    again.fail["save", 1] = OSError("disk full")
    again.run()
    assert list(again.saved) == ["step-000003", "step-000004", "step-000006"], "not only when the next one is due"


@pytest.mark.parametrize(
    ("fail", "saved", "finished", "exit_code"),
    [
        ({("collect", 1): KeyboardInterrupt()}, [], ("interrupted", 0, ""), 130),
        ({("collect", 4): KeyboardInterrupt()}, [2, 3], ("interrupted", 0, ""), 130),
        (
            {("collect", 4): KeyboardInterrupt(), ("save", 2): OSError("disk full")},
            [2],
            ("failed", 1, "the checkpoint of step 3 could not be written: disk full"),
            1,
        ),
    ],
)
def test_an_interruption_saves(
    world: World, fail: Any, saved: list[int], finished: tuple[str, int, str], exit_code: int
) -> None:
    world.fail = fail
    assert world.run().exit_code == exit_code
    assert list(world.saved) == [f"step-{step:06d}" for step in saved] and world.finished == [finished]


def test_without_its_last_checkpoint_a_run_is_not_complete(world: World) -> None:
    world.fail |= {("save", number): OSError("disk full") for number in range(3, 9)}
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    reason = "the checkpoint of step 6 could not be written: disk full"
    assert world.finished == [("failed", 2, reason)] and world.said == [reason]
    assert list(world.saved) == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("where", "saved"),
    [
        ("begin", 3),
        ("collect", 3),
        ("sleep", 3),
        ("reload", 3),
        ("teach_drafter", 4),
        ("export_weights", 4),
        ("offload", 4),
        ("wake", 4),
        ("update_weights", 4),
        ("update_drafter", 4),
        ("end", 4),
    ],
)
@pytest.mark.parametrize("error", [ActorLostError("gone"), RuntimeError("gone")])
def test_wherever_a_part_fails_what_was_learnt_is_saved(
    where: str, saved: int, error: Exception, tmp_path: Path
) -> None:
    world = World(tmp_path, offload=True)
    world.fail[where, 4] = error
    with pytest.raises(type(error), match="gone"):
        world.run()
    assert world.saved[f"step-{saved:06d}"] == f"{saved}.0"
    status, failures, reason = world.finished[0]
    assert (status, failures, len(world.finished)) == ("failed", 0, 1) and "gone" in reason
    if where != "end":
        assert world.recorded[-1] == saved, "no checkpoint is ahead of the records"


def test_weights_between_two_steps_are_not_saved_as_either(world: World) -> None:
    world.fail["update", 4] = ActorLostError("out of memory")
    with pytest.raises(ActorLostError):
        world.run()
    assert world.saved == {"step-000002": "2.0"}
    assert (
        "out of memory; the checkpoint of step 3 could not be written: the update after step 3"
        in (world.finished[0][2])
    )


def test_a_lost_trainer_cannot_save_and_the_summary_is_written(world: World) -> None:
    world.fail = {("export_weights", 3): ActorLostError("gone"), ("save", 2): ActorLostError("still gone")}
    with pytest.raises(ActorLostError, match=r"^gone$"):
        world.run()
    assert world.finished[0][0] == "failed" and "still gone" in world.finished[0][2]


def test_a_run_that_learns_nothing_stops_with_a_checkpoint(world: World) -> None:
    world.update = lambda samples, step, seed: {"skipped": 1.0, "grad_norm": 0.0}  # type: ignore[method-assign]
    world.export_weights = lambda version: WeightSet(0, (), 0)  # type: ignore[method-assign]
    with pytest.raises(SpecActorError, match="3 steps in a row taught nothing"):
        world.run()
    assert "step-000003" in world.saved


def test_the_steps_need_neither_ray_nor_torch() -> None:
    code = "import sys, specactor_ray.trainer.steps as s; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
