"""The sign of life of a loop: not that its process answers, but since when it has been at the step under way."""

from __future__ import annotations

from collections.abc import Callable


class Heartbeat:
    """Kept by a loop's thread, read by any.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began: float | None = None

    def begin(self) -> float:
        """A step, or a command within it, begins. Returns the time."""
        self._began = now = self._now()
        return now

    def end(self) -> None:
        """The loop is between two steps."""
        self._began = None

    @property
    def busy_s(self) -> float:
        """Seconds since what is under way began; 0 while nothing is."""
        began = self._began
        return 0.0 if began is None else max(0.0, self._now() - began)
