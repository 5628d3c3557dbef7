"""An event loop of asyncio on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from specactor_ray.core.clock import Clock


class VirtualLoop(asyncio.BaseEventLoop):
    """Waits by the events of a `Clock`, such as that of a simulated process; has no sockets."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._woken, self._selector = clock, clock.event(), self

    def time(self) -> float:
        return self._clock.now()

    def select(self, timeout: float | None) -> list[Any]:
        """What `BaseEventLoop` calls to wait for events."""
        self._woken.wait(timeout)
        self._woken.clear()
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        """Called to wake the loop from another task."""
        self._woken.set()
