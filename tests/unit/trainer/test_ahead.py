"""Rollouts ahead of the trainer: in order, no further than allowed, and what they raise arrives."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.rules import validate_training
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.recipe import make_recipe
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.trainer.ahead import AheadMaker
from specactor_ray.trainer.experience import Experience
from specactor_ray.trainer.record import _staleness

PATIENCE_S = 60.0


class Maker:
    """Makes a step when it is allowed to, and remembers which version of the weights each began with."""

    def __init__(self) -> None:
        self.version, self.begun = 0, dict[int, int]()
        self.allowed: dict[int, threading.Event] = {step: threading.Event() for step in range(20)}
        self.has_begun: dict[int, threading.Event] = {step: threading.Event() for step in range(20)}
        self.fails: dict[int, BaseException] = {}

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Any:
        self.begun[step] = self.version
        self.has_begun[step].set()
        assert self.allowed[step].wait(PATIENCE_S)
        if step in self.fails:
            raise self.fails[step]
        return f"experience {step} of {rollout}"


@pytest.mark.parametrize(("staleness", "first"), [(1, 0), (2, 5)])
def test_rollouts_run_ahead_as_far_as_they_may(staleness: int, first: int) -> None:
    maker, last = Maker(), first + 6
    ahead = AheadMaker(maker, staleness, last)
    maker.version = first
    for step in range(first, last):
        maker.allowed[step].set()
        assert ahead.collect("rollout", SamplingParams(), step) == f"experience {step} of rollout"
        if step + 1 < last:  # it begins while the trainer updates
            assert maker.has_begun[step + 1].wait(PATIENCE_S)
        assert max(maker.begun) <= step + staleness
        maker.version = step + 1
    assert sorted(maker.begun) == list(range(first, last)), "and none beyond the last"
    assert all(step - version <= staleness for step, version in maker.begun.items())
    assert any(step > version for step, version in maker.begun.items())


def test_nothing_begins_after_the_end() -> None:
    maker = Maker()
    for event in maker.allowed.values():
        event.set()
    ahead = AheadMaker(maker, 1, 10)
    ahead.collect("rollout", SamplingParams(), 0)
    ahead.close()
    assert ahead._thread is not None
    ahead._thread.join(PATIENCE_S)
    assert not ahead._thread.is_alive() and max(maker.begun) <= 1


def test_what_a_rollout_raises_arrives_at_its_step() -> None:
    maker = Maker()
    maker.fails[1] = RuntimeError("lost")
    ahead = AheadMaker(maker, 2, 10)
    for event in maker.allowed.values():
        event.set()
    assert ahead.collect("rollout", SamplingParams(), 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            ahead.collect("rollout", SamplingParams(), 1)
    assert 2 not in maker.begun


def test_an_interruption_ends_the_wait_for_a_rollout() -> None:
    maker = Maker()

    def interrupt() -> None:
        assert maker.has_begun[0].wait(PATIENCE_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # wakes no wait of the main thread

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        AheadMaker(maker, 1, 10).collect("rollout", SamplingParams(), 0)
    thread.join()
    for event in maker.allowed.values():
        event.set()


def trajectory(tokens: int, version: int, versions: tuple[tuple[int, int], ...], mask: str = "") -> Trajectory:
    own = tuple(one == "1" for one in mask)
    ids = tuple(range(tokens))
    return Trajectory(
        "r",
        0,
        0,
        (1,),
        ids,
        (0.0,) * tokens,
        "",
        "stop",
        SamplingParams(),
        weight_version=version,
        versions=versions,
        loss_mask=own,
    )


def test_staleness_is_counted_in_own_tokens() -> None:
    plain, mixed = trajectory(4, 5, ()), trajectory(6, 5, ((3, 1), (4, 5)), mask="110011")
    assert plain.own_tokens_by_version() == {5: 4}
    assert mixed.own_tokens_by_version() == {3: 1, 4: 2, 5: 1}
    experience = Experience([], [plain, mixed], [])
    assert _staleness(experience, 5) == {"staleness_mean": (2 + 2 * 1) / 8, "staleness_max": 2}
    assert _staleness(Experience([], [], []), 5) == {"staleness_mean": 0.0, "staleness_max": 0}


def test_older_weights_are_corrected_for() -> None:
    def cap(**trainer: Any) -> float | None:
        algorithm = trainer.pop("algorithm", {})
        return make_recipe(from_mapping({"mode": "plain", "trainer": trainer, "algorithm": algorithm})).importance_cap

    assert cap() is None
    assert cap(max_staleness=1) == 2.0
    assert cap(max_staleness=1, algorithm={"importance_cap": 5.0}) == 5.0


def test_verifiers_cannot_sleep_while_they_run_ahead() -> None:
    settings = {"mode": "plain", "data": {"n": 2}, "trainer": {"max_staleness": 1, "offload": True}}
    with pytest.raises(ConfigError, match=r"trainer\.offload"):
        validate_training(from_mapping(settings))
