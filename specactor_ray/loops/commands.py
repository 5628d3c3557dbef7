"""What other threads want done in a loop's thread, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from specactor_ray.loops.heartbeat import Heartbeat


class Commands:
    """Functions in the order in which they were put.

    Args:
        wake: Called after each, so that a sleeping loop looks.
        heartbeat: Of the loop; each function counts as a step of its own.
    """

    def __init__(self, wake: Callable[[], None], heartbeat: Heartbeat) -> None:
        self._wake, self._heartbeat = wake, heartbeat
        self._queue: SimpleQueue[Callable[[], Any]] = SimpleQueue()

    def put(self, function: Callable[[], Any]) -> None:
        """Have this run; it must not raise."""
        self._queue.put(function)
        self._wake()

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Have this run; the future has its outcome."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(None)

        self.put(run)
        return future

    def run(self) -> bool:
        """Run what is there, in the caller's thread. Returns whether there was anything."""
        worked = False
        while not self._queue.empty():
            self._queue.get()()
            self._heartbeat.begin()
            worked = True
        return worked
