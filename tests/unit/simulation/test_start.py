"""A start that is changed while it runs, on the virtual cluster: scaled, with losses, without room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specactor_ray.actors.specs import Phase
from specactor_ray.controller import fleet
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.core.errors import ClusterError, ModelLoadError, SpecActorError, UserError
from specactor_ray.simulation.cluster import SimulatedHost, VirtualRun
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.world import World
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
    """A run of one verifier and one n-gram draft actor on one node; what `at` is given happens while it starts."""

    def __init__(self, cpus: float = 8.0) -> None:
        config = make_config(FaultScenario(0, verifiers=1, drafters=1))
        self.run = VirtualRun(config, World(HashedText({"ngram": 0.5})), [Node("node", cpus=cpus)], seed=1)
        self._calls: list[tuple[float, Callable[[], Any]]] = []

    def at(self, seconds: float, act: Callable[[], Any]) -> None:
        self._calls.append((seconds, act))

    def scale(self, **drafters: int) -> None:
        self.run.calls.ask(self.run.controller, "scale", drafters, deadline_s=5.0)

    def status(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.run.calls.ask(self.run.controller, "status", deadline_s=5.0)
        return rows

    def kill(self, kind: str) -> list[str]:
        killed = [one for one in self.run.network.actors if one.name.startswith(kind) and not one.process.dead]
        for actor in killed:
            self.run.network.kill(actor)
        return [actor.name for actor in killed]

    def play(self, then: Callable[[], Any] = lambda: None) -> SpecActorError | None:
        """Start the run, then do what is to be done; returns why the start failed."""
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
        for seconds, call in self._calls:
            kernel.spawn(lambda seconds=seconds, call=call: act(seconds, call), "act", driver)
        kernel.run(until=1000.0, done=lambda: bool(over or kernel.crashes))
        crashes = list(kernel.crashes)
        kernel.close()
        assert not crashes, crashes
        return over[0]


def phases(rows: list[dict[str, Any]], kind: str = "drafter") -> list[str]:
    return sorted(row["phase"] for row in rows if row["kind"] == kind)


def test_scaling_takes_effect_once_the_run_has_started() -> None:
    start, seen = Start(), list[list[str]]()
    start.at(2.0, lambda: start.scale(ngram=3))
    start.at(5.0, lambda: seen.append(phases(start.status())))

    def then() -> None:
        start.run.clock.sleep(2.0 * LOADING_S)
        seen.append(phases(start.status()))

    assert start.play(then) is None and seen == [["starting"], ["ready"] * 3]


def test_what_is_scaled_up_beyond_the_room_stays_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    start, rows, warnings = Start(cpus=3.0), list[dict[str, Any]](), list[str]()
    monkeypatch.setattr(fleet.logger, "warning", lambda text, *values: warnings.append(text % values))

    def then() -> None:
        start.scale(ngram=40)
        start.run.clock.sleep(10.0)
        rows.extend(start.status())

    assert start.play(then) is None
    waiting = [row for row in rows if row["phase"] == "pending"]
    assert len(waiting) == 38 and all("waits for room" in row["note"] for row in waiting)
    (shown,) = [text for text in warnings if "not placed on the cluster yet" in text]
    assert "and 37 more" in shown and shown.count("\n") < 12, "one table for all of them"


def test_what_is_configured_must_find_room_in_time() -> None:
    error = Start(cpus=1.0).play()
    assert isinstance(error, ClusterError)
    assert "2 of 2 actors found no room within 60 s: ngram-0, verifier-0" in str(error) and "Supply" in str(error)
    assert "Missing: 1 CPU, 0 GPU" in str(error)


@pytest.mark.parametrize("kind", ["verifier", "ngram"])
def test_an_actor_that_is_killed_while_it_starts_is_replaced(kind: str) -> None:
    start, killed, rows = Start(), list[str](), list[dict[str, Any]]()
    for seconds in (4.0, 9.0):
        start.at(seconds, lambda: killed.extend(start.kill(kind)))
    assert start.play(lambda: rows.extend(start.status())) is None
    assert len(killed) == 2
    assert {row["phase"] for row in rows} == {"ready"} and not {row["id"] for row in rows} & set(killed)


@pytest.mark.parametrize("kind", ["verifier", "ngram"])
def test_actors_that_are_killed_again_and_again_end_the_start_which_is_not_the_users_fault(kind: str) -> None:
    start, killed = Start(), list[str]()
    for seconds in range(2, 40, 2):
        start.at(seconds, lambda: killed.extend(start.kill(kind)))
    error = start.play()
    assert error is not None and not isinstance(error, UserError)
    assert f"{killed[-1]} did not" in str(error) and "failure 4 in a row" in str(error)
    assert len(killed) == ReplacementLimits().max_start_failures


def test_an_actor_whose_model_cannot_be_loaded_ends_the_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(self: SimulatedHost, *_arguments: Any) -> Any:
        tried.append("once")
        raise ModelLoadError("no such weights")

    monkeypatch.setattr(SimulatedHost, "build_engine", refuse)
    error = Start().play()
    assert type(error) is ModelLoadError and str(error) == "no such weights"
    assert len(tried) == 1


def test_actors_that_start_are_shown() -> None:
    start, seen = Start(), list[list[dict[str, Any]]]()
    for seconds in (0.4, 5.0):
        start.at(seconds, lambda: seen.append(start.status()))
    assert start.play() is None
    for rows in seen:
        assert [row["kind"] for row in rows] == ["verifier", "drafter"]
        assert {row["phase"] for row in rows} == {Phase.STARTING}
    assert {row["note"] for row in seen[1]} == {"it loads"}


def test_a_run_that_is_shut_down_while_it_starts_leaves_nothing() -> None:
    start, gone = Start(), list[bool]()
    start.at(4.0, lambda: gone.append(start.run.calls.ask(start.run.controller, "shutdown", deadline_s=60.0)))
    error = start.play()
    assert "was shut down while it started" in str(error)
    assert gone == [True] and not start.run.machines.groups
