"""A thread-safe queue for events that may be neither conflated nor lost (the rollout's journal)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from specactor_ray.clock import SYSTEM, Clock

E = TypeVar("E")


class EventQueue(Generic[E]):
    """First in, first out, unbounded; every method may be called from any thread.

    There is no bound because its contents are: every event is a part of an output that the run keeps anyway.

    Args:
        clock: What waiting is measured by.
    """

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._changed = clock.condition()
        self._events: list[E] = []
        self._closed = False

    def put(self, events: Iterable[E]) -> None:
        """Append events. Also taken after `close`, so that nothing on its way is lost."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()

    def drain(self, timeout_s: float = 0.0) -> list[E]:
        """All events so far. If there are none, wait up to `timeout_s` seconds, or until `close`, for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._events) > 0, max(0.0, timeout_s))
            events, self._events = self._events, []
            return events

    def close(self) -> None:
        """Wake whoever waits; from now on `drain` never blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        with self._changed:
            return len(self._events)
