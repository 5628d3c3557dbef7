"""Base of the verifier's and the drafter's loop: a thread that works in steps and sleeps in between."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from specactor_ray.core.clock import SYSTEM, Clock

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
