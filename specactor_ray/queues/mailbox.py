"""The consumer's side of a queue: a thread-safe inbox that conflates what waits in it.

A consumer that is slow sees only the newest and never holds more than one slot per key. Ray calls of producers
`put`; the consumer's one loop `drain`s.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from specactor_ray.queues.conflation import DEFAULT_MAX_KEYS, MAX_PER_SENDER, ConflatingBuffer, Rules
from specactor_ray.queues.screening import Screen

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A conflating inbox; every method may be called from any thread.

    Args:
        rules: How messages conflate, for example `for_verifier()`.
        screen: What lets only well-formed messages in.
        max_keys: Most slots; beyond it the oldest droppable slot is lost and counted. Losing messages is part of the
            protocol: it costs speed, never tokens.
        max_per_sender: Most slots of one sender; beyond it its own oldest droppable slot is lost.
    """

    def __init__(
        self,
        rules: Rules[T],
        screen: Screen[T],
        max_keys: int = DEFAULT_MAX_KEYS,
        max_per_sender: int = MAX_PER_SENDER,
    ) -> None:
        self._lock = threading.Lock()
        self._screen = screen
        self._buffer = ConflatingBuffer(rules, max_keys, max_per_sender)

    def put(self, messages: object) -> None:
        """Take a list of messages in, in this order. Whatever is malformed is dropped and counted."""
        good = self._screen.sift(messages)
        with self._lock:
            self._buffer.add(good)

    def drain(self) -> list[T]:
        """Everything that waits, in the order in which the keys first arrived. Never blocks."""
        with self._lock:
            return self._buffer.take()

    def __len__(self) -> int:
        """Number of occupied slots."""
        with self._lock:
            return len(self._buffer)

    @property
    def conflated(self) -> int:
        """Messages that a later one made superfluous while they waited here."""
        with self._lock:
            return self._buffer.conflated

    @property
    def dropped(self) -> int:
        """Messages lost because there were too many keys."""
        with self._lock:
            return self._buffer.dropped
