"""A clock that a test moves by hand."""

from __future__ import annotations

from collections.abc import Callable

from specactor_ray.core.clock import Clock


class HandClock(Clock):
    """Seconds that pass only in `sleep` and when a test adds some; events and conditions are those of this machine.

    Args:
        tick_s: Seconds that pass with every look at it.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.seconds, self._tick_s = 0.0, tick_s
        self.now: Callable[[], float] = self._read  # type: ignore[method-assign]

    def _read(self) -> float:
        self.seconds += self._tick_s
        return self.seconds - self._tick_s

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
