"""Parts that run in virtual time take it from a `Clock`: none of them reads `time` or makes something that waits."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from specactor_ray.core.clock import SYSTEM, Clock

PACKAGE = Path(__file__).parents[3] / "specactor_ray"
CLOCKED = (
    "actors/",
    "cluster/calls.py",
    "controller/",
    "draft/",
    "transport/",
    "rollout/",
    "verify/",
)
"""Folders and files that are held to it."""
OTHER_SOURCES = re.compile(
    r"^\s*(import time\b|from (time|threading) import)"
    r"|\bthreading\.(Barrier|BoundedSemaphore|Condition|Event|Semaphore|Thread|Timer)\b",
    re.MULTILINE,
)
"""Of `threading`, plain locks are allowed: nothing waits while it holds one."""


def test_time_comes_from_the_clock() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    clocked = {name: source for name, source in sources.items() if name.startswith(CLOCKED)}
    assert len(clocked) > 40
    found = [name for name, source in clocked.items() if OTHER_SOURCES.search(source)]
    assert not found, "take time, events and threads from a Clock (core/clock.py)"


def wait_for_condition(clock: Clock) -> None:
    with (condition := clock.condition()):
        condition.wait_for(lambda: False)


@pytest.mark.parametrize(
    "wait",
    [
        lambda clock: clock.event().wait(),
        lambda clock: clock.event().wait(60.0),
        wait_for_condition,
        lambda clock: clock.result(Future[None](), float("inf")),
    ],
)
def test_a_signal_that_another_thread_receives_interrupts_a_wait(wait: Callable[[Clock], object]) -> None:
    """As one that arrives between the look for signals and the wait."""

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def interrupted_wait() -> None:
        timer.start()
        wait(Clock())

    timer = threading.Timer(0.1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted_wait()
    timer.join()


def test_waits_end_in_time() -> None:
    event, future = SYSTEM.event(), Future[int]()
    assert not event.wait(0.0) and not event.wait(0.01) and not event.wait(-1.0)
    with pytest.raises(TimeoutError):
        SYSTEM.result(future, 0.01)
    with (condition := SYSTEM.condition()):
        assert not condition.wait_for(lambda: False, 0.01) and condition.wait_for(lambda: True, 0.0)
    future.set_result(1)
    event.set()
    assert event.wait(0.0) and SYSTEM.result(future, 0.0) == 1
