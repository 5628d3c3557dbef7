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
from typing import Any, TypeVar

T = TypeVar("T")


Thread = threading.Thread

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


class Clock:
    """Source of time and threads: those of this machine. Signals interrupt each wait within a second, as in Ray."""

    def now(self) -> float:
        """Monotonic seconds; only differences have a meaning."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> threading.Event:
        return _Event()

    def condition(self) -> threading.Condition:
        """A lock with a wait. A holder of the lock must not wait for anything else."""
        return _Condition()

    def spawn(self, target: Callable[[], None], name: str) -> Thread:
        """Start a daemon thread."""
        thread = Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def result(self, future: Future[T], timeout_s: float) -> T:
        """Result of a future after at most `timeout_s` seconds. Raises TimeoutError, or the exception of the future."""

        def is_done(timeout: float) -> bool:
            return bool(wait([future], timeout).done)

        if not future.done():
            _wait_in_slices(is_done, timeout_s)
        return future.result(0.0)


SYSTEM = Clock()


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
