"""The consumer's side of a queue: a thread-safe inbox that conflates what waits in it.

A consumer that is slow sees only the newest and never holds more than one slot per key. Ray calls of producers
`put`; the consumer's one loop `drain`s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from specactor_ray.queues.conflation import DEFAULT_MAX_KEYS, ConflatingBuffer, Rules

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A conflating inbox; every method may be called from any thread.

    Args:
        rules: How messages conflate, for example `for_verifier()`.
        max_keys: Most slots; beyond it the oldest droppable slot is lost and counted. Losing messages is part of the
            protocol: it costs speed, never tokens.
    """

    def __init__(self, rules: Rules[T], max_keys: int = DEFAULT_MAX_KEYS) -> None:
        self._changed = threading.Condition()
        self._buffer = ConflatingBuffer(rules, max_keys)
        self._closed = False

    def put(self, messages: Iterable[T]) -> None:
        """Take messages in, in this order. After `close` they are ignored."""
        with self._changed:
            if self._closed:
                return
            self._buffer.add(messages)
            self._changed.notify_all()

    def drain(self) -> list[T]:
        """Everything that waits, in the order in which the keys first arrived. Never blocks."""
        with self._changed:
            return self._buffer.take()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is a message, the mailbox is closed or `timeout_s` seconds are over.

        Returns:
            True if `drain` would return something.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._buffer) > 0, max(0.0, timeout_s))
            return len(self._buffer) > 0

    def close(self) -> None:
        """Refuse further messages and wake whoever waits. What is in can still be drained."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        """Number of occupied slots."""
        with self._changed:
            return len(self._buffer)

    @property
    def conflated(self) -> int:
        """Messages that a later one made superfluous while they waited here."""
        with self._changed:
            return self._buffer.conflated

    @property
    def dropped(self) -> int:
        """Messages lost because there were too many keys."""
        with self._changed:
            return self._buffer.dropped
