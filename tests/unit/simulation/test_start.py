"""Starts on the virtual cluster: with losses, and without room for all actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from specactor_ray.controller import fleet
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.core.errors import SpecActorError, UserError, WeightsError
from specactor_ray.simulation.cluster import SimulatedHost, VirtualRun
from specactor_ray.simulation.models import SimulatedEngine
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.world import World
from specactor_ray.transport.messages import WeightSet
from tests.faults.run import FaultScenario, make_config
from tests.number_text import HashedText

LOADING_S = 10.0
"""Models take this long to load here; the start is over somewhat later."""


@pytest.fixture(autouse=True)
def slow_models(monkeypatch: pytest.MonkeyPatch) -> None:
    build_engine, build_proposer = SimulatedHost.build_engine, SimulatedHost.build_proposer

    def engine(self: SimulatedHost, *arguments: Any) -> Any:
        self.clock.sleep(LOADING_S)
        return build_engine(self, *arguments)

    def proposer(self: SimulatedHost, *arguments: Any) -> Any:
        self.clock.sleep(LOADING_S)
        return build_proposer(self, *arguments)

    monkeypatch.setattr(SimulatedHost, "build_engine", engine)
    monkeypatch.setattr(SimulatedHost, "build_proposer", proposer)


class Start:
    """A run of one verifier and one n-gram draft actor on one node."""

    def __init__(self, cpus: float = 8.0) -> None:
        config = make_config(FaultScenario(0, verifiers=1, drafters=1))
        self.run = VirtualRun(config, World(HashedText({"ngram": 0.5})), [Node("node", cpus=cpus)], seed=1)
        self.killed: list[str] = []

    def scale(self, **drafters: int) -> None:
        self.run.ask("scale", drafters)

    def status(self, kind: str = "") -> list[dict[str, Any]]:
        return [row for row in self.run.ask("status") if kind in ("", row["kind"])]

    def kill(self, kind: str) -> None:
        for actor in self.run.network.actors:
            if actor.name.startswith(kind) and not actor.process.dead:
                self.run.network.kill(actor)
                self.killed.append(actor.name)

    def play(
        self, calls: Sequence[tuple[float, Callable[[], Any]]] = (), then: Callable[[], Any] = lambda: None
    ) -> SpecActorError | None:
        """Start the run, with these calls at these seconds of it, and then `then`. Returns the error of the start."""
        over: list[SpecActorError | None] = []
        kernel, clock, driver = self.run.kernel, self.run.clock, self.run.driver.process

        def drive() -> None:
            try:
                self.run.start_run()
            except SpecActorError as error:
                over.append(error)
            else:
                then()
                over.append(None)

        def act(seconds: float, call: Callable[[], Any]) -> None:
            clock.sleep(seconds)
            call()

        kernel.spawn(drive, "drive", driver)
        for one in calls:
            kernel.spawn(partial(act, *one), "act", driver)
        kernel.run(until=1000.0, done=lambda: bool(over or kernel.crashes))
        crashes = list(kernel.crashes)
        kernel.close()
        assert not crashes, crashes
        return over[0]


def test_what_is_scaled_up_beyond_the_room_stays_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    start, warnings = Start(cpus=3.0), list[str]()
    monkeypatch.setattr(fleet.logger, "warning", lambda text, *values: warnings.append(text % values))

    def then() -> None:
        start.scale(ngram=40)
        start.run.clock.sleep(10.0)
        waiting = [row for row in start.status() if row["phase"] == "pending"]
        assert len(waiting) == 38 and all("waits for room" in row["note"] for row in waiting)

    assert start.play(then=then) is None
    (shown,) = [text for text in warnings if "not placed on the cluster yet" in text]
    assert "and 37 more" in shown and shown.count("\n") < 12, "one table for all of them"


@pytest.mark.parametrize("kind", ["verifier", "ngram"])
def test_an_actor_that_is_killed_while_it_starts_is_replaced_a_few_times(kind: str) -> None:
    """Then the start ends, which is not the fault of the user."""
    start, ids = Start(), set[str]()
    twice = [(seconds, lambda: start.kill(kind)) for seconds in (4.0, 9.0)]
    assert start.play(twice, lambda: ids.update(row["id"] for row in start.status() if row["phase"] == "ready")) is None
    assert len(start.killed) == len(ids) == 2 and not ids & set(start.killed)
    start = Start()
    error = start.play([(float(seconds), lambda: start.kill(kind)) for seconds in range(2, 40, 2)])
    assert error is not None and not isinstance(error, UserError) and start.killed[-1] in str(error)
    assert len(start.killed) == ReplacementLimits().max_start_failures


def test_no_actor_starts_while_verifiers_sleep_and_their_memory_is_others() -> None:
    start, asleep = Start(), list[str]()
    sleep = SimulatedEngine.sleep

    def then() -> None:
        queue, clock = start.run.queue, start.run.clock
        start.kill("verifier")
        clock.sleep(8.0)  # its replacement loads
        queue.call_verifiers("sleep", False)
        (ready,) = start.status("verifier")
        assert ready["phase"] == "ready" and len(asleep) == 1, "one that was in its start sleeps, too"
        start.kill("verifier")
        clock.sleep(60.0)
        assert [row["phase"] for row in start.status("verifier")] == ["pending"]
        queue.update_weights(WeightSet(1, (start.run.calls.transport.put(b"weights"),)))
        queue.call_verifiers("wake")
        (ready,) = start.status("verifier")
        assert ready["phase"] == "ready" and len(start.killed) == 2

    def noted(engine: SimulatedEngine, keep_weights: bool = True) -> None:
        asleep.append("sleep")
        sleep(engine, keep_weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedEngine, "sleep", noted)
        assert start.play(then=then) is None


def test_verifiers_that_wait_for_other_weights_hold_up_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start()

    def refuse(engine: SimulatedEngine, version: int, state_dict: object) -> None:
        raise WeightsError("another model's")

    def then() -> None:
        queue, weights = start.run.queue, WeightSet(1, (start.run.calls.transport.put(b"weights"),))
        with pytest.raises(WeightsError, match="another model's"):
            queue.update_weights(weights)
        before = start.run.clock.now()
        queue.call_verifiers("sleep", False)
        assert start.run.clock.now() < before + 10.0

    monkeypatch.setattr(SimulatedEngine, "load_weights", refuse)
    assert start.play(then=then) is None
