"""A thread-safe log of events that may be neither conflated nor lost (for the rollout's journal)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from specactor_ray.core.clock import SYSTEM, Clock

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Events in order, numbered from 0, kept until the reader acknowledges them; for any thread.

    A reader that lost an answer reads again with the same number and gets the same events. The size has no other bound:
    every event is a part of an output that the run keeps anyway.
    """

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._changed = clock.condition()
        self._events: list[E] = []
        self._first = 0
        self._urgent = 0
        """Number after the newest urgent event."""

    def put(self, events: Iterable[E], urgent: bool = True) -> None:
        """Append events. `urgent` ones end the wait of a lingering `read`."""
        with self._changed:
            self._events.extend(events)
            if urgent:
                self._urgent = self._end
            self._changed.notify_all()

    def read(self, after: int, timeout_s: float = 0.0, linger_s: float = 0.0) -> tuple[int, list[E]]:
        """Events from number `after` on. Waits up to `timeout_s` seconds for the first, and if none of them is urgent
        up to `linger_s` longer for one that is, so that the others are read in batches.

        Events before `after` are acknowledged and are discarded.

        Returns:
            Number of the first event returned, and the events. It is `after`, or more if those in between were
            discarded by an earlier call.

        Raises:
            ValueError: The number was not given out yet, so it cannot come from this queue.
        """
        with self._changed:
            if after > self._end:
                raise ValueError(f"event {after} was asked for, but the next one is number {self._end}")
            del self._events[: max(0, after - self._first)]
            self._first = max(self._first, after)
            self._changed.wait_for(lambda: self._end > after, max(0.0, timeout_s))
            if linger_s > 0.0 and self._end > after:
                self._changed.wait_for(lambda: self._urgent > after, linger_s)
            return self._first, list(self._events)

    @property
    def _end(self) -> int:
        return self._first + len(self._events)

    def __len__(self) -> int:
        """Events that are kept."""
        with self._changed:
            return len(self._events)
