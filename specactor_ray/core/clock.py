"""Time, waiting for it, and the base of loops.

Loops, queues, the controller and remote calls never read `time` or create a `threading.Event`: they use a `Clock`. In
production it is `SYSTEM`; the simulator passes a virtual one, on which the same code runs deterministically
in a single thread (`simulation/kernel.py`).
"""

from __future__ import annotations

import abc
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Event(Protocol):
    """A flag that threads wait for; the interface of `threading.Event`."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most `timeout` seconds. Returns whether it is set."""


class Condition(Protocol):
    """A lock with a wait; the part of `threading.Condition` that is used here. A holder of the lock must not wait for
    anything else."""

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
    """Source of time and threads."""

    def now(self) -> float:
        """Monotonic seconds; only differences have a meaning."""

    def sleep(self, seconds: float) -> None: ...

    def event(self) -> Event: ...

    def condition(self) -> Condition: ...

    def spawn(self, target: Callable[[], None], name: str) -> Thread:
        """Start a daemon thread."""

    def result(self, future: Future[T], timeout_s: float) -> T:
        """Result of a future after at most `timeout_s` seconds. Raises TimeoutError, or the exception of the future."""


_WAKE_S = 1.0
"""Longest uninterrupted wait. Python runs a signal handler when the main thread runs next: a wait without a limit does
not end if the signal arrives just before it begins, or is delivered to another thread."""


class _Event(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return _wait_in_slices(super().wait, timeout)


class _Condition(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_WAKE_S if timeout is None else min(timeout, _WAKE_S))  # `wait_for` waits again


def _wait_in_slices(wait: Callable[[float], bool], timeout: float | None) -> bool:
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not wait(min(_WAKE_S, left := end - time.monotonic())):
        if left <= _WAKE_S:
            return False
    return True


class SystemClock:
    """The time and the threads of this machine. Signals interrupt each wait within a second, as in Ray."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def event(self) -> Event:
        return _Event()

    def condition(self) -> Condition:
        return _Condition()

    def spawn(self, target: Callable[[], None], name: str) -> Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def result(self, future: Future[T], timeout_s: float) -> T:
        def is_done(timeout: float) -> bool:
            return bool(wait([future], timeout).done)

        if not future.done():
            _wait_in_slices(is_done, timeout_s)
        return future.result(0.0)


SYSTEM: Clock = SystemClock()


IDLE_WAIT_S = 0.5
"""Longest sleep without work; messages wake the loop at once."""


class Loop(abc.ABC):
    """Wakes for messages, runs the commands of other threads between two steps, and reports since when the step under
    way runs."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._wake, self._stopping = clock.event(), clock.event()
        self._commands: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._began: float | None = None

    # ---- for any thread ----

    def stop(self) -> None:
        """End the loop after the step under way."""
        self._stopping.set()
        self._wake.set()

    def put(self, command: Callable[[], Any]) -> None:
        """Run `command` in the loop's thread, in the order in which commands were put; it must not raise."""
        self._commands.put(command)
        self._wake.set()

    def call(self, command: Callable[[], object]) -> Future[None]:
        """Run `command` in the loop's thread; the future has its outcome."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                command()
            except Exception as error:  # noqa: BLE001 - passed on by the future
                future.set_exception(error)
            else:
                future.set_result(None)

        self.put(run)
        return future

    @property
    def busy_s(self) -> float:
        """Seconds since the step or command under way began; 0 while there is none."""
        began = self._began
        return 0.0 if began is None else max(0.0, self._clock.now() - began)

    # ---- for the loop's thread ----

    def run_once(self) -> bool:
        """Run the commands of other threads, each as a step of its own, and then a step. Returns False when the step
        had nothing to do."""
        self._wake.clear()
        self._began = self._clock.now()
        try:
            while not self._commands.empty():
                self._commands.get()()
                self._began = self._clock.now()
            return self._step(self._began)
        finally:
            self._began = None

    @abc.abstractmethod
    def _step(self, begin: float) -> bool:
        """Do the work of a step; `begin` is the current time. Returns False when there was nothing to do."""
