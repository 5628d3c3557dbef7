"""Parts that run in virtual time take it from a `Clock`: none of them reads `time` or makes something that waits."""

from __future__ import annotations

import ast
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from specactor_ray.core.clock import SYSTEM, SystemClock

PACKAGE = Path(__file__).parents[3] / "specactor_ray"
CLOCKED = (
    "actors/",
    "cluster/calls.py",
    "cluster/supervised.py",
    "controller/",
    "draft/",
    "transport/",
    "rollout/",
    "verify/",
)
"""Folders and files that are held to it."""
FOR_PEOPLE = ("runs/rollout.py",)
"""Tells people how long things took; runs in no simulation."""
WAITING = frozenset({"Barrier", "BoundedSemaphore", "Condition", "Event", "Semaphore", "Thread", "Timer"})
"""What `threading` has that waits; plain locks are fine where nothing waits while it holds one."""


def clocked_sources() -> list[Path]:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return [path for name, path in sorted(paths.items()) if name.startswith(CLOCKED) and name not in FOR_PEOPLE]


def violations(source: str, name: str) -> Iterator[str]:
    """`file:line: what` for every use of `time` and of what waits in `threading`, under whatever name."""
    tree = ast.parse(source, name)
    modules: dict[str, str] = {}
    """Local name → module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.module == "time" or (node.module == "threading" and alias.name in {*WAITING, "*"}):
                    yield f"{name}:{node.lineno}: {node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module == "time" or (module == "threading" and node.attr in WAITING):
                yield f"{name}:{node.lineno}: {module}.{node.attr}"


def test_time_comes_from_the_clock() -> None:
    paths = clocked_sources()
    assert len(paths) > 40
    found = [
        text
        for path in paths
        for text in violations(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())
    ]
    assert not found, "take these from a Clock (clock.py):\n" + "\n".join(found)


def test_the_check_sees_every_way_to_get_at_time() -> None:
    source = """
import time
import threading as t
from time import sleep
from threading import Event, Lock
from queue import SimpleQueue
def wait(clock):
    "time.sleep(1); threading.Event()"
    clock.sleep(time.monotonic())
    t.Condition(), t.Lock(), clock.event(), clock.time.sleep()
    run(begin=time.perf_counter)
"""
    assert list(violations(source, "x.py")) == [
        "x.py:4: time.sleep",
        "x.py:5: threading.Event",
        "x.py:9: time.monotonic",
        "x.py:10: threading.Condition",
        "x.py:11: time.perf_counter",
    ]


def wait_for_condition(clock: SystemClock) -> None:
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
def test_a_signal_that_another_thread_receives_interrupts_a_wait(wait: Callable[[SystemClock], object]) -> None:
    """As one that arrives between the look for signals and the wait."""

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    timer = threading.Timer(0.1, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        wait(SystemClock())
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
