"""The producer's side of a queue: at most one delivery per consumer in flight.

What is posted while a delivery is under way conflates by the same rules as in the consumer's mailbox and goes out in
one batch when that delivery is done. So a slow or stopped consumer slows nobody, and it costs its producers no more
than one slot per key. One delivery at a time also keeps the order of messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.queues.conflation import DEFAULT_MAX_KEYS, ConflatingBuffer, Rules

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutboxStats:
    """Counters since the outbox was made."""

    deliveries: int
    """Batches handed over, the one in flight included."""
    messages: int
    """Messages in those batches."""
    conflated: int
    """Messages that a later one made superfluous before they left."""
    dropped: int
    """Messages lost: too many keys, discarded, or posted after a failure."""
    in_flight_s: float
    """Seconds with a finished delivery under way; divided by `deliveries`, the latency of a delivery."""


class Outbox(Generic[T]):
    """Messages on their way to one consumer; every method may be called from any thread.

    Args:
        send: Starts the delivery of a batch and returns at once with its future; see `ray_sender`.
        rules: How messages conflate while they wait, for example `for_drafter()`.
        max_keys: Most waiting slots, as in `Mailbox`.
        clock: What deliveries are timed by.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Future[Any]],
        rules: Rules[T],
        *,
        max_keys: int = DEFAULT_MAX_KEYS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._buffer = ConflatingBuffer(rules, max_keys)
        self._in_flight = False
        self._sent_at = 0.0
        self._failed: BaseException | None = None
        self._deliveries = self._messages = self._discarded = 0
        self._in_flight_s = 0.0

    def post(self, messages: Iterable[T]) -> None:
        """Queue messages and send them if nothing is in flight. Never blocks; after a failure they are dropped."""
        self.queue(messages)
        self.flush()

    def queue(self, messages: Iterable[T]) -> None:
        """Queue without sending: goes out with the next `post` or `flush`, or when the delivery in flight is done."""
        with self._lock:
            self._buffer.add(messages)
            if self._failed is not None:
                self._discard()

    def flush(self) -> bool:
        """Send what waits if nothing is in flight. Returns True if a delivery was started."""
        with self._lock:
            if self._in_flight or self._failed is not None or not len(self._buffer):
                return False
            batch = self._buffer.take()
            self._in_flight = True
            self._sent_at = self._clock.now()
            self._deliveries += 1
            self._messages += len(batch)
        # Outside the lock: a future that is done already calls back at once, in this thread.
        try:
            future = self._send(batch)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises means that the consumer is out of reach
            self._landed(error)
        else:
            future.add_done_callback(self._on_done)
        return True

    def discard(self) -> int:
        """Drop what waits (not what is in flight). Returns how many messages that were."""
        with self._lock:
            return self._discard()

    @property
    def failed(self) -> BaseException | None:
        """Why a delivery failed; None while all is well. A failed outbox stays failed: make a new one."""
        return self._failed

    @property
    def in_flight(self) -> bool:
        return self._in_flight

    @property
    def in_flight_since(self) -> float | None:
        """When the delivery under way was started, by the outbox's clock; None if there is none."""
        with self._lock:
            return self._sent_at if self._in_flight else None

    def __len__(self) -> int:
        """Number of waiting slots."""
        with self._lock:
            return len(self._buffer)

    def stats(self) -> OutboxStats:
        with self._lock:
            dropped = self._buffer.dropped + self._discarded
            return OutboxStats(
                self._deliveries, self._messages, self._buffer.conflated, dropped, in_flight_s=self._in_flight_s
            )

    def _discard(self) -> int:
        discarded = len(self._buffer.take())
        self._discarded += discarded
        return discarded

    def _on_done(self, future: Future[Any]) -> None:
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        self._landed(error)

    def _landed(self, error: BaseException | None) -> None:
        with self._lock:
            self._in_flight = False
            self._in_flight_s += self._clock.now() - self._sent_at
            if error is not None:
                self._failed = error
                self._discard()
        self.flush()


_DELIVERED: Future[None] = Future()
_DELIVERED.set_result(None)


def direct_sender(receive: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Future[Any]]:
    """A `send` for `Outbox` within a process: the batch is delivered when `receive` returns."""

    def send(batch: list[Any]) -> Future[Any]:
        receive(batch)
        return _DELIVERED

    return send


def ray_sender(handle_method: Any) -> Callable[[list[Any]], Future[Any]]:
    """A `send` for `Outbox` that calls a Ray actor's method, for example `ray_sender(actor.receive)`.

    The method takes the batch (a list of messages) as its one argument; what it returns is ignored. A dead or
    unreachable actor shows as a failed future. Nothing of Ray is imported here: the handle brings it along.
    """

    def send(batch: list[Any]) -> Future[Any]:
        future: Future[Any] = handle_method.remote(batch).future()
        return future

    return send
