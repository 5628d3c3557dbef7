"""The producer's side of a queue: at most one delivery per consumer in flight.

What is posted while a delivery is under way conflates by the same rules as in the consumer's mailbox and goes out in
one batch when that delivery is done. So a slow or stopped consumer slows nobody, and it costs its producers no more
than one slot per key.

A delivery that does not arrive is sent again, with what has been posted since, until the consumer is known to be gone
for good. It may have arrived nevertheless: the protocol bears repetition and reordering (`messages.py`).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, Protocol, TypeVar

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.errors import ActorLostError, ActorUnavailableError, CallTimeoutError
from specactor_ray.queues.conflation import DEFAULT_MAX_KEYS, ConflatingBuffer, Rules

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0
"""After this time a delivery counts as not arrived. Consumers only put what arrives into a queue."""
_RETRY_S, _RETRY_MAX_S = 0.1, 5.0
"""Pause before the next attempt: doubles from the first to the second."""


class Delivery(Protocol):
    """A batch on its way; the part of `concurrent.futures.Future` that is used here."""

    def add_done_callback(self, done: Callable[[Any], None]) -> object:
        """Call `done` with this delivery when it has ended, at once if it has."""

    def exception(self) -> BaseException | None:
        """Why it failed; None when it arrived."""


class Outbox(Generic[T]):
    """Messages on their way to one consumer; every method may be called from any thread.

    A delivery that ends in `ActorUnavailableError` or `CallTimeoutError`, or has not ended by its deadline, is tried
    again by a later `flush`; `ActorLostError` ends the link for good; of any other error (the consumer raised it) the
    batch is the cause: it is dropped.

    Args:
        send: Starts the delivery of a batch and returns at once; raises like `Delivery.exception`.
        rules: How messages conflate while they wait, for example `for_drafter()`.
        max_keys: Most waiting slots, as in `Mailbox`.
        clock: What deadlines and pauses are measured by.
        deadline_s: Seconds after which a delivery counts as not arrived.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Delivery],
        rules: Rules[T],
        *,
        max_keys: int = DEFAULT_MAX_KEYS,
        clock: Clock = SYSTEM,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._send, self._clock, self._deadline_s = send, clock, deadline_s
        self._lock = threading.Lock()
        self._buffer = ConflatingBuffer(rules, max_keys)
        self._sent = 0
        """Deliveries so far; the number of the newest."""
        self._flying: list[T] | None = None
        """The batch of the newest delivery; None when that has ended."""
        self._sent_at = 0.0
        self._pause_s, self._again_at = _RETRY_S, 0.0
        self._failed: BaseException | None = None
        self._retries = self._rejected = self._discarded = 0

    def post(self, messages: Iterable[T]) -> None:
        """Queue messages and send them if nothing is in flight. Never blocks; after a failure they are dropped."""
        self.queue(messages)
        self.flush()

    def queue(self, messages: Iterable[T]) -> None:
        """Queue without sending: goes out with the next `post` or `flush`, or when the delivery in flight is done."""
        with self._lock:
            self._buffer.add(messages)
            if self._failed is not None:
                self._discarded += len(self._buffer.take())

    def flush(self) -> bool:
        """Send what waits if nothing is in flight and no pause is to be kept. Returns True if a delivery was started.

        Also gives up a delivery that is past its deadline, so whoever owns an outbox calls this now and then.
        """
        with self._lock:
            if self._flying is not None and self._clock.now() >= self._sent_at + self._deadline_s:
                self._send_again_later()
            if self._flying is not None or self._failed is not None or not len(self._buffer):
                return False
            now = self._clock.now()
            if now < self._again_at:
                return False
            batch = self._flying = self._buffer.take()
            self._sent_at = now
            self._sent += 1
            number = self._sent
        # Outside the lock: a delivery that is done already calls back at once, in this thread.
        try:
            delivery = self._send(batch)
        except Exception as error:  # noqa: BLE001 - an error of the transport is one of the delivery
            self._end(number, error)
        else:
            delivery.add_done_callback(functools.partial(self._on_done, number))
        return True

    @property
    def failed(self) -> BaseException | None:
        """Why the consumer is gone for good; None while it is not. A failed outbox stays failed: make a new one."""
        return self._failed

    @property
    def in_flight(self) -> bool:
        return self._flying is not None

    @property
    def conflated(self) -> int:
        """Messages that a later one made superfluous before they left."""
        with self._lock:
            return self._buffer.conflated

    def __len__(self) -> int:
        """Number of waiting slots."""
        with self._lock:
            return len(self._buffer)

    def snapshot(self) -> dict[str, Any]:
        """For status displays. `failed`: why the link has ended, empty while it has not; `retries`: deliveries that did
        not arrive in time; messages `rejected` by the consumer, and `dropped` here: too many keys, or after the end."""
        with self._lock:
            return {
                "failed": "" if self._failed is None else str(self._failed) or type(self._failed).__name__,
                "retries": self._retries,
                "rejected": self._rejected,
                "dropped": self._buffer.dropped + self._discarded,
            }

    def _on_done(self, number: int, delivery: Delivery) -> None:
        try:
            error = delivery.exception()
        except CancelledError as cancelled:
            error = cancelled
        self._end(number, error)

    def _end(self, number: int, error: BaseException | None) -> None:
        """A delivery has ended. One that was given up before is of no interest any more."""
        with self._lock:
            if number != self._sent or self._flying is None:
                return
            if isinstance(error, ActorUnavailableError | CallTimeoutError):
                self._send_again_later()
            else:
                self._settle(self._flying, error)
        self.flush()

    def _settle(self, batch: list[T], error: BaseException | None) -> None:
        """The newest delivery has arrived, or it never will."""
        self._flying, self._pause_s = None, _RETRY_S
        if isinstance(error, ActorLostError):
            self._failed = error
            self._discarded += len(batch) + len(self._buffer.take())
        elif error is not None:
            if not self._rejected:
                logger.warning("a consumer does not take what it is sent; further cases are only counted: %s", error)
            self._rejected += len(batch)

    def _send_again_later(self) -> None:
        """The newest delivery goes back under what has been queued meanwhile, and out again after a pause."""
        batch, waiting = self._flying, self._buffer.take()
        assert batch is not None
        self._buffer.add(batch)
        self._buffer.add(waiting)
        self._flying = None
        self._retries += 1
        self._again_at = self._clock.now() + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, _RETRY_MAX_S)


_DELIVERED: Future[None] = Future()
_DELIVERED.set_result(None)


def direct_sender(receive: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Delivery]:
    """A `send` for `Outbox` within a process: the batch is delivered when `receive` returns."""

    def send(batch: list[Any]) -> Delivery:
        receive(batch)
        return _DELIVERED

    return send
