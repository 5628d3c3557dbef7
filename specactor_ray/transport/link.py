"""Links, the producer's side of a queue: at most one delivery per consumer is in flight, and later news are merged. And
the queue of events for the rollout, none of which is merged or lost.

Producers keep state, not messages: the next message is made when it can be sent (`offer`), so a slow or stopped
consumer slows no producer and costs it no memory. A delivery that does not arrive is sent again until the consumer is
gone for good; the protocol tolerates repetition and reordering (`messages.py`).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, Protocol, TypeVar

from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import ActorLostError, ActorUnavailableError, CallTimeoutError

M = TypeVar("M")
E = TypeVar("E")

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0
"""Seconds after which a delivery counts as not arrived. Consumers only put a message into a queue."""
_RETRY_S = 1.0
"""Pause after a delivery that did not arrive."""


class Delivery(Protocol):
    """A message in flight; the part of `concurrent.futures.Future` that is used here."""

    def add_done_callback(self, done: Callable[[Any], None]) -> object:
        """Call `done` with this delivery when it has ended, at once if it has."""

    def exception(self) -> BaseException | None:
        """Why it failed; None when it arrived."""


class Link(Generic[M]):
    """The way to one consumer. `offer` is for the producer's loop, everything else for any thread.

    A message whose delivery ends in `ActorUnavailableError` or `CallTimeoutError`, or has not ended by its deadline, is
    sent again by a later `offer`; `ActorLostError` ends the link for good; any other error drops the message. `send`
    starts a delivery and raises like `Delivery.exception`; `on_free` is called in any thread when a delivery has ended.
    """

    def __init__(
        self, send: Callable[[M], Delivery], on_free: Callable[[], object] = lambda: None, *, clock: Clock = SYSTEM
    ) -> None:
        self._send, self._clock, self.on_free = send, clock, on_free
        self._lock = threading.Lock()
        self._sent = 0
        """Number of deliveries so far, and number of the newest one."""
        self._flying: M | None = None
        """The message of the newest delivery that has not arrived, which is sent again at `_again_at`."""
        self._again_at = 0.0
        self.failed: BaseException | None = None
        """Why the consumer is gone for good; None while it is not. A failed link stays failed: make a new one."""
        self._retries = self._rejected = 0

    @property
    def is_free(self) -> bool:
        """Whether a message can be sent now, or has to be sent again."""
        return self.failed is None and (self._flying is None or self._clock.now() >= self._again_at)

    def offer(self, make: Callable[[], M | None]) -> bool:
        """Send the result of `make`, which is called only when its message can be sent, and returns None if there is
        nothing to send. Returns whether a message was sent."""
        with self._lock:
            if not self.is_free:
                return False
            self._retries += self._flying is not None
            message = self._flying if self._flying is not None else make()
            if message is None:
                return False
            self._flying, self._again_at = message, self._clock.now() + _DEADLINE_S
            self._sent += 1
            number = self._sent
        # Outside the lock: a delivery that is done already calls back at once, in this thread.
        try:
            delivery = self._send(message)
        except Exception as error:  # noqa: BLE001 - an error of the transport is one of the delivery
            self._end(number, error)
        else:
            delivery.add_done_callback(functools.partial(self._on_done, number))
        return True

    def snapshot(self) -> dict[str, Any]:
        """For status displays: why the link has ended, messages that were sent again, and those that were rejected."""
        return {
            "failed": "" if self.failed is None else str(self.failed) or type(self.failed).__name__,
            "retries": self._retries,
            "rejected": self._rejected,
        }

    def _on_done(self, number: int, delivery: Delivery) -> None:
        try:
            error = delivery.exception()
        except CancelledError as cancelled:
            error = cancelled
        self._end(number, error)

    def _end(self, number: int, error: BaseException | None) -> None:
        """Handle the end of a delivery, unless its message was sent again meanwhile."""
        with self._lock:
            if number != self._sent:
                return
            if isinstance(error, ActorUnavailableError | CallTimeoutError):
                self._again_at = self._clock.now() + _RETRY_S
            elif isinstance(error, ActorLostError):
                self.failed, self._flying = error, None
            else:
                self._flying = None
                if error is not None and not self._rejected:
                    logger.warning(
                        "a consumer does not take what it is sent; further cases are only counted: %s", error
                    )
                self._rejected += error is not None
        self.on_free()


_DELIVERED: Future[None] = Future()
_DELIVERED.set_result(None)


def direct_sender(receive: Callable[[Any], Any]) -> Callable[[Any], Delivery]:
    """A `send` for `Link` within a process: the message is delivered when `receive` returns."""

    def send(message: Any) -> Delivery:
        receive(message)
        return _DELIVERED

    return send


class EventQueue(Generic[E]):
    """Events in order, numbered from 0, kept until the reader acknowledges them; for any thread. A reader that lost an
    answer reads again with the same number. The run keeps the outputs anyway, so the size has no other bound."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._changed = clock.condition()
        self._events: list[E] = []
        self._first = 0
        self._urgent = self._reads = 0
        """Number after the newest urgent event, and number of calls of `read`."""

    def put(self, events: Iterable[E], urgent: bool = True) -> None:
        """Append events. `urgent` ones end the wait of a lingering `read`."""
        with self._changed:
            self._events.extend(events)
            if urgent:
                self._urgent = self._end
            self._changed.notify_all()

    def read(self, after: int, timeout_s: float = 0.0, linger_s: float = 0.0) -> tuple[int, list[E]]:
        """Discard events before number `after`. Returns the number of the first event that is left, and the events.
        Waits up to `timeout_s` seconds for the first, and if none is urgent up to `linger_s` longer for one that is, so
        that the others are read in batches. The next call ends these waits. ValueError: the number was not given out
        yet."""
        with self._changed:
            if after > self._end:
                raise ValueError(f"event {after} was asked for, but the next one is number {self._end}")
            del self._events[: max(0, after - self._first)]
            self._first = max(self._first, after)
            self._reads = mine = self._reads + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._end > after or self._reads > mine, max(0.0, timeout_s))
            if linger_s > 0.0 and self._end > after:
                self._changed.wait_for(lambda: self._urgent > after or self._reads > mine, linger_s)
            return self._first, list(self._events)

    @property
    def _end(self) -> int:
        return self._first + len(self._events)

    def __len__(self) -> int:
        """Events that are kept."""
        with self._changed:
            return len(self._events)
