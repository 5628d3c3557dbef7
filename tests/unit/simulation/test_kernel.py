"""The kernel: synchronous code on virtual time, the same run for the same seed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from specactor_ray.simulation import kernel
from specactor_ray.simulation.kernel import Kernel, Process, SimulationError, VirtualClock
from tests.faults.run import FaultScenario, simulate


class World:
    def __init__(self, seed: int = 0) -> None:
        self.kernel, self.log = Kernel(seed), []  # type: ignore[var-annotated]

    def clock(self, name: str = "p", offset_s: float = 0.0) -> VirtualClock:
        return VirtualClock(self.kernel, Process(name, offset_s))

    def note(self, what: Any) -> None:
        self.log.append((round(self.kernel.now, 6), what))


def after(clock: VirtualClock, seconds: float, do: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        clock.sleep(seconds)
        do()

    return run


def test_events_conditions_threads_and_futures_wait_as_those_of_the_system_do() -> None:
    world = World()
    clock = world.clock()
    event, condition, future, items = clock.event(), clock.condition(), Future[str](), list[int]()

    def waiter() -> None:
        world.note(("event", event.wait(1.0)))
        world.note(("event", event.wait(10.0)))
        with condition:
            world.note(("items", condition.wait_for(lambda: len(items) == 2, 0.5)))
            world.note(("items", condition.wait_for(lambda: len(items) == 2, 50.0)))
        world.note(clock.result(future, 50.0))
        with pytest.raises(TimeoutError):
            clock.result(Future[str](), 1.0)

    def setter() -> None:
        clock.sleep(2.0)
        event.set()
        for _ in range(2):
            clock.sleep(2.0)
            with condition:
                items.append(1)
                condition.notify_all()
        clock.sleep(1.0)
        future.set_result("result")

    thread = clock.spawn(waiter, "waiter")
    other = clock.spawn(setter, "setter")

    def joiner() -> None:
        thread.join()
        world.note(("joined", other.is_alive()))

    clock.spawn(joiner, "joiner")
    world.kernel.run()
    assert world.log == [
        (1.0, ("event", False)),
        (2.0, ("event", True)),
        (2.5, ("items", False)),
        (6.0, ("items", True)),
        (7.0, "result"),
        (8.0, ("joined", False)),
    ]
    assert not world.kernel.crashes
    assert not (thread.is_alive() or other.is_alive())


def test_a_frozen_process_does_nothing_until_it_is_thawed_and_a_dead_one_never_again() -> None:
    """Clocks have offsets, and an error of a task is reported while the others run on."""
    world = World()
    clock, doomed, broken = world.clock(), world.clock("doomed", 1000.0), world.clock("broken")

    def tick(mine: VirtualClock) -> None:
        try:
            for _ in range(5):
                mine.sleep(1.0)
                world.note((mine.process.name, mine.now() - world.kernel.now))
        finally:
            if mine.process is doomed.process:
                world.note("a finally of a dead process")

    clock.spawn(lambda: tick(clock), "tick")
    doomed.spawn(lambda: tick(doomed), "tick")
    broken.spawn(after(broken, 1.0, lambda: 1 // 0), "fails")
    world.kernel.at(1.5, lambda: world.kernel.freeze(clock.process))
    world.kernel.at(7.5, lambda: world.kernel.thaw(clock.process))
    world.kernel.at(2.5, lambda: world.kernel.kill(doomed.process))
    world.kernel.run()
    assert [time for time, what in world.log if what == ("p", 0.0)] == [1.0, 7.5, 8.5, 9.5, 10.5]
    assert [entry for entry in world.log if entry[1] != ("p", 0.0)] == [(t, ("doomed", 1000.0)) for t in (1.0, 2.0)]
    ((name, error),) = world.kernel.crashes
    assert name == "broken/fails" and isinstance(error, ZeroDivisionError)


def test_the_seed_chooses_among_what_is_ready() -> None:
    def order(seed: int) -> tuple[list[Any], int]:
        world = World(seed)
        clock = world.clock()
        for name in "abcdefgh":
            clock.spawn(after(clock, 1.0, functools.partial(world.note, name)), name)
        world.kernel.run()
        return [what for _, what in world.log], world.kernel.digest

    assert order(1) == order(1)
    assert len({"".join(order(seed)[0]) for seed in range(10)}) > 5
    assert len({order(seed)[1] for seed in range(10)}) > 5


def test_code_that_spins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MAX_READS_AT_ONCE", 1000)
    monkeypatch.setattr(kernel, "_MAX_EVENTS_AT_ONCE", 1000)

    def spin_on_the_clock(clock: VirtualClock) -> None:
        while clock.now() < 10.0:
            pass

    def spin_on_events(clock: VirtualClock) -> None:
        while True:
            clock.sleep(0.0)

    world = World()
    clock = world.clock()
    clock.spawn(lambda: spin_on_the_clock(clock), "spins")
    world.kernel.run()
    assert isinstance(world.kernel.crashes[0][1], SimulationError)
    clock.spawn(lambda: spin_on_events(clock), "spins")
    with pytest.raises(SimulationError, match="spins"):
        world.kernel.run()


RUN = """
import logging
logging.disable(logging.CRITICAL)
from tests.faults.run import FaultScenario, simulate
report = simulate(FaultScenario.draw(401, 20, requests=8))
print(report.digest, report.events, sorted(report.faults.items()))
"""


def test_the_same_seed_is_the_same_run_in_every_process_whatever_its_hash_seed() -> None:
    report = simulate(FaultScenario.draw(401, 20, requests=8))
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{report.digest} {report.events} {sorted(report.faults.items())}\n"
    assert report.faults and not report.violations
