"""The consumer's side of a queue: a thread-safe inbox that lets well-formed messages in.

The form of a message is checked here only: afterwards every array has the stated type, length and range. All parts of a
drafter's message are checked: its proposer may be a user's own class. Malformed messages are counted and dropped.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.transport.messages import CommitBatch, TailBatch

M = TypeVar("M")

logger = logging.getLogger(__name__)

UNKNOWN = "?"
"""Sender of messages without a sender."""
MOST_WAITING = 256
"""Messages of one sender that wait; beyond it its oldest is lost, which costs speed, never tokens."""
_MOST_SENDERS = 1024
"""Most senders that are distinguished; further ones count as unknown."""

_MAX_ID = 1024
_MAX_ROWS = 1 << 20
_MAX_SEQUENCE = 1 << 24
"""Most tokens of a batch."""
_MAX_NUMBER = 1 << 31
_MAX_SECONDS = 1.0e6
_INT32 = np.dtype(np.int32)


class Malformed(ValueError):
    """A message is malformed; the text states how."""


class Inbox(Generic[M]):
    """Messages in the order in which they came; every method may be called from any thread. `check` raises
    `Malformed`; `sender` names the attribute that holds the sender's id."""

    def __init__(self, check: Callable[[Any], None], sender: str) -> None:
        warm_up()
        self._check, self._sender = check, sender
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[M]] = {}
        self._malformed: dict[str, int] = {}
        self.dropped = 0
        """Messages lost because too many of one sender waited."""

    def put(self, message: Any) -> None:
        """Take a message in. A malformed one is dropped and counted."""
        try:
            self._check(message)
        except (Malformed, AttributeError, TypeError) as problem:
            self._reject(message, str(problem))
            return
        sender = getattr(message, self._sender)
        with self._lock:
            waiting = self._waiting.setdefault(sender, deque())
            waiting.append(message)
            if len(waiting) > MOST_WAITING:
                waiting.popleft()
                self.dropped += 1

    def drain(self) -> list[M]:
        """Everything that waits, sender by sender. Never blocks."""
        if not self._waiting:
            return []
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return [message for messages in waiting.values() for message in messages]

    def __len__(self) -> int:
        """Messages that wait."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def snapshot(self) -> dict[str, Any]:
        """For displays: malformed messages per sender, and number of messages that were dropped."""
        with self._lock:
            return {"malformed": dict(self._malformed), "dropped_messages": self.dropped}

    def _reject(self, message: object, problem: str) -> None:
        sender = getattr(message, self._sender, None) if type(message) in (TailBatch, CommitBatch) else None
        with self._lock:
            known = _is_id(sender) and (sender in self._malformed or len(self._malformed) < _MOST_SENDERS)
            name = str(sender) if known else UNKNOWN
            self._malformed[name] = self._malformed.get(name, 0) + 1
        if self._malformed[name] == 1:
            logger.warning("a malformed message of %s is dropped; further ones are only counted: %s", name, problem)


def for_verifier(vocab_size: int) -> Inbox[TailBatch]:
    """Inbox of a verifier for messages of drafters. Token ids must lie in `[0, vocab_size)`."""

    def check(message: Any) -> None:
        _require(type(message) is TailBatch, f"{type(message).__name__} is no message of a drafter")
        _require(_is_id(message.drafter_id), "the drafter's id is no string, or far too long")
        _check_arrays(message, "bases", vocab_size)
        _require(_is_seconds(message.token_s), "token_s is no number of seconds")
        _require(type(message.lost) is tuple and all(map(_is_handle, message.lost)), "lost holds no handles")

    return Inbox(check, "drafter_id")


def for_drafter() -> Inbox[CommitBatch]:
    """Inbox of a drafter for messages of verifiers. Token ids must not be negative."""

    def check(message: Any) -> None:
        _require(type(message) is CommitBatch, f"{type(message).__name__} is no message of a verifier")
        _check_arrays(message, "starts", _MAX_NUMBER)

    return Inbox(check, "verifier_id")


def _require(good: bool, problem: str) -> None:
    if not good:
        raise Malformed(problem)


def _check_arrays(message: Any, starts: str, limit: int) -> None:
    """Check int32 arrays `(n,)` of handles and positions, and int32 `(sum(lengths),)` token ids below `limit`. They
    become read-only: kernels are compiled for one kind of arrays, not for each mix of own and received ones."""
    names = ("rows", "generations", starts, "lengths", "tokens")
    arrays = [getattr(message, name) for name in names]
    _require(all(map(_is_column, arrays)), "rows, positions, lengths or tokens are not one-dimensional int32 arrays")
    rows, generations, begins, lengths, tokens = arrays = list(map(_read_only, arrays))
    _require(len(rows) == len(generations) == len(begins) == len(lengths) <= _MAX_ROWS, "rows differ in number")
    _require(len(tokens) <= _MAX_SEQUENCE, "too many tokens")
    if number := _problem_of(*arrays, limit):
        raise Malformed(_PROBLEMS[number - 1])
    for name, array in zip(names, arrays, strict=True):
        object.__setattr__(message, name, array)


def _read_only(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


_PROBLEMS = (
    "a row, a position or a length is negative or too large",
    "lengths and tokens do not fit",
    "a token id is outside the vocabulary",
)


@kernel()
def _problem_of(rows: Any, generations: Any, starts: Any, lengths: Any, tokens: Any, limit: int) -> int:
    """1 + the index in `_PROBLEMS`, or 0. Sums are int64, so nothing wraps around."""
    total = 0
    for i in range(len(rows)):
        if min(rows[i], generations[i], starts[i], lengths[i]) < 0:
            return 1
        if rows[i] >= _MAX_ROWS or starts[i] + lengths[i] >= _MAX_NUMBER:
            return 1
        total += lengths[i]
    least, most = 0, 0
    for token in tokens:
        least, most = min(least, token), max(most, token)
    return 2 if total != len(tokens) else 3 * (least < 0 or most >= limit)


@functools.cache
def warm_up() -> None:
    """Compile the checks."""
    none = np.zeros(0, np.int32)
    _check_arrays(TailBatch("", none, none, none, none, none), "bases", 1)


def _is_column(value: Any) -> bool:
    is_column = type(value) is np.ndarray and value.dtype == _INT32 and value.ndim == 1
    return is_column and value.flags.c_contiguous and value.flags.aligned


def _is_seconds(value: Any) -> bool:
    return type(value) in (float, int) and 0.0 <= value <= _MAX_SECONDS


def _is_id(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_ID


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_handle(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and all(map(_is_count, value)) and value[0] < _MAX_ROWS
