"""Time, and waiting for it.

Loops, queues, the controller and remote calls never read `time` or make a `threading.Event` themselves: they take a
`Clock`. In production it is `SYSTEM`; the simulator passes a virtual one, on which the same code runs deterministically
in a single thread (`simulation/kernel.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, TypeVar

T = TypeVar("T")


class Event(Protocol):
    """A flag that threads wait for; the interface of `threading.Event`."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most `timeout` seconds. Returns whether it is set."""


class Condition(Protocol):
    """A lock with a wait; the part of `threading.Condition` that is used here. Nothing may wait for anything else
    while it holds the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Release the lock and wait until the predicate holds, at most `timeout` seconds. Returns the predicate."""


class Thread(Protocol):
    """A thread that was started; the part of `threading.Thread` that is used here."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Monotonic seconds; only differences have a meaning."""

    def sleep(self, seconds: float) -> None: ...

    def event(self) -> Event: ...

    def condition(self) -> Condition: ...

    def spawn(self, target: Callable[[], None], name: str) -> Thread:
        """Start a daemon thread."""

    def result(self, future: Future[T], timeout_s: float) -> T:
        """Wait for a future and return its result.

        Raises:
            TimeoutError: It was not done within `timeout_s` seconds.
            Exception: What the future was given.
        """


class SystemClock:
    """The time and the threads of this machine."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def event(self) -> Event:
        return threading.Event()

    def condition(self) -> Condition:
        return threading.Condition()

    def spawn(self, target: Callable[[], None], name: str) -> Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def result(self, future: Future[T], timeout_s: float) -> T:
        return future.result(None if timeout_s == float("inf") else timeout_s)


SYSTEM: Clock = SystemClock()
