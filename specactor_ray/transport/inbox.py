"""The consumer's side of a queue: a thread-safe inbox that lets well-formed messages in.

A message states what its sender holds true, which may be outdated; the protocol tolerates that. The form of a message
is checked here only: afterwards every array has the stated type, length and range. A malformed message is counted for
its sender and dropped; a sender of many of them is cut off.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.jit import kernel
from specactor_ray.core.types import SamplingParams
from specactor_ray.transport.messages import NO_BRANCHES, Branches, CommitBatch, DraftOpen, Features, TailBatch

M = TypeVar("M")

logger = logging.getLogger(__name__)

MOST_MALFORMED = 100
"""Malformed messages that a sender may send before it is cut off."""
UNKNOWN = "?"
"""Sender of messages without a sender; it is never cut off."""
MOST_WAITING = 256
"""Messages of one sender that wait; beyond it its oldest is lost, which costs speed, never tokens."""
_MOST_SENDERS = 1024
"""Most senders that are distinguished; further ones count as unknown."""

_MAX_ID = 1024
_MAX_ROWS = 1 << 20
_MAX_SEQUENCE = 1 << 24
"""Most tokens of a prompt, an output or a batch, and most hidden states."""
_MAX_WINDOW = 65_536
_MAX_NUMBER = 1 << 31
_MAX_SECONDS = 1.0e6
_INT32 = np.dtype(np.int32)
_STATES = (np.float32, np.float16, np.int16)
"""Types of hidden states, see `models/weight_buckets.py`."""
_ANY_TOKEN = 1 << 31
"""Limit of token ids where the vocabulary is unknown."""


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
        self.cut_off: dict[str, None] = {}
        """Senders whose messages are dropped from now on."""
        self.dropped = 0
        """Messages lost because too many of one sender waited."""

    def put(self, message: Any) -> None:
        """Take a message in. A malformed one is dropped and counted."""
        try:
            self._check(message)
        except (Malformed, InputError, AttributeError, TypeError) as problem:
            self._reject(message, str(problem))
            return
        sender = getattr(message, self._sender)
        if sender in self.cut_off:
            return
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
        """For displays: malformed messages per sender, senders that are cut off, and messages that were dropped."""
        with self._lock:
            return {"malformed": dict(self._malformed), "cut_off": list(self.cut_off), "dropped_messages": self.dropped}

    def _reject(self, message: object, problem: str) -> None:
        sender = getattr(message, self._sender, None) if type(message) in (TailBatch, CommitBatch) else None
        with self._lock:
            known = _is_id(sender) and (sender in self._malformed or len(self._malformed) < _MOST_SENDERS)
            name = str(sender) if known else UNKNOWN
            count = self._malformed[name] = self._malformed.get(name, 0) + 1
            cut = known and count > MOST_MALFORMED and name not in self.cut_off
            if cut:
                self.cut_off[name] = None
        if cut:
            logger.error("%s is cut off after %d malformed messages; the last: %s", name, count, problem)
        elif count == 1:
            logger.warning("a malformed message of %s is dropped: %s", name, problem)


def for_verifier(vocab_size: int, branches: int = 0) -> Inbox[TailBatch]:
    """Inbox of a verifier for messages of drafters. Token ids must lie in `[0, vocab_size)`, and a tail has at most
    `branches` branches."""

    def check(message: Any) -> None:
        _require(type(message) is TailBatch, f"{type(message).__name__} is no message of a drafter")
        _require(_is_id(message.drafter_id), "the drafter's id is no string, or far too long")
        _check_arrays(message, "bases", vocab_size)
        _check_branches(message, branches, vocab_size)
        _require(_is_seconds(message.token_s), "token_s is no number of seconds")
        _require(_are_all(message.lost, _is_handle), "lost holds no handles")

    return Inbox(check, "drafter_id")


def for_drafter(vocab_size: int | None) -> Inbox[CommitBatch]:
    """Inbox of a drafter for messages of verifiers. Token ids must lie in `[0, vocab_size)`, None: any vocabulary."""
    limit = _ANY_TOKEN if vocab_size is None else vocab_size

    def check(message: Any) -> None:
        _require(type(message) is CommitBatch, f"{type(message).__name__} is no message of a verifier")
        _require(_is_id(message.verifier_id), "the verifier's id is no string, or far too long")
        _require(_is_count(message.session), f"session is not between 0 and {_MAX_NUMBER - 1}")
        _check_arrays(message, "starts", limit)
        _require(type(message.opened) is tuple, "opened is no tuple")
        for one in message.opened:
            _check_open(one, limit)
        closed = _are_all(message.closed, lambda one: _is_handle(one[:2]) and type(one[2]) is bool, size=3)
        _require(closed, "closed holds something else than handles and whether they finished")
        features = _are_all(message.features, lambda one: _is_count(one[0]) and _are_features(one[1]), size=2)
        _require(features, "features are not in order")

    return Inbox(check, "verifier_id")


def _check_open(one: Any, limit: int) -> None:
    _require(type(one) is DraftOpen and _is_id(one.request_id), "opened holds something else than requests")
    _require(_is_handle((one.row, one.generation)), "a request's handle is out of range")
    _require(_is_count(one.window) and one.window <= _MAX_WINDOW, f"window is not between 0 and {_MAX_WINDOW}")
    for tokens in (one.prompt_token_ids, one.committed_token_ids):
        _require(_are_tokens(tokens, limit), f"its tokens are not token ids below {limit}")
    _require(len(one.prompt_token_ids) > 0, "its prompt has no tokens")
    _require(type(one.sampling) is SamplingParams, "sampling is of another type")
    one.sampling.check()
    _require(_are_features(one.features), "features are not in order")


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


def _check_branches(message: Any, most: int, limit: int) -> None:
    """As `_check_arrays`, for at most `most` branches of each tail."""
    branches = message.branches
    if branches is NO_BRANCHES:
        return
    good = type(branches) is Branches and len(branches) == 4 and all(map(_is_column, branches))
    _require(good, "branches are not one-dimensional int32 arrays")
    tails, ats, sizes, tokens = branches = Branches(*map(_read_only, branches))
    _require(len(tails) == len(ats) == len(sizes), "branches differ in number")
    _require(len(tokens) <= _MAX_SEQUENCE, "too many tokens")
    if number := _problem_of_branches(*branches, message.lengths, most, limit):
        raise Malformed(_PROBLEMS[number - 1])
    object.__setattr__(message, "branches", branches)


def _read_only(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


_PROBLEMS = (
    "a row, a position or a length is negative or too large",
    "lengths and tokens do not fit",
    "a token id is outside the vocabulary",
    "a branch is of no tail, out of order, or one too many",
    "a branch is empty or leaves its tail behind the end",
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
    return 2 if total != len(tokens) else 3 * _are_outside(tokens, limit)


@kernel()
def _problem_of_branches(tails: Any, ats: Any, sizes: Any, tokens: Any, lengths: Any, most: int, limit: int) -> int:
    """As `_problem_of`."""
    total, last, count = 0, -1, 0
    for b in range(len(tails)):
        count = count + 1 if tails[b] == last else 1
        if tails[b] < max(last, 0) or tails[b] >= len(lengths) or count > most:
            return 4
        if sizes[b] < 1 or ats[b] < 0 or ats[b] > lengths[tails[b]]:
            return 5
        last = tails[b]
        total += sizes[b]
    return 2 if total != len(tokens) else 3 * _are_outside(tokens, limit)


@kernel(inline="always")
def _are_outside(tokens: Any, limit: int) -> bool:
    """A token id is negative, or not below `limit`."""
    least, most = 0, 0
    for token in tokens:
        least, most = min(least, token), max(most, token)
    return least < 0 or most >= limit


@functools.cache
def warm_up() -> None:
    """Compile the checks."""
    none = np.zeros(0, np.int32)
    message = TailBatch("", none, none, none, none, none, Branches(none, none, none, none))
    _check_arrays(message, "bases", 1)
    _check_branches(message, 1, 1)


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


def _are_all(values: Any, check: Callable[[Any], bool], size: int | None = None) -> bool:
    """Whether it is a tuple whose elements all pass; with `size`, each element is a tuple of `size` parts."""
    if type(values) is not tuple:
        return False
    return all((size is None or (type(one) is tuple and len(one) == size)) and check(one) for one in values)


def _are_tokens(token_ids: Any, limit: int) -> bool:
    if type(token_ids) is not tuple or len(token_ids) > _MAX_SEQUENCE:
        return False
    return not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < limit)


def _are_features(features: Any) -> bool:
    return _are_all(features, _is_span)


def _is_span(span: Any) -> bool:
    if type(span) is not Features or not _is_count(span.begin) or type(span.states) is not np.ndarray:
        return False
    shape_fits = span.states.ndim == 2 and len(span.states) <= _MAX_SEQUENCE and span.end < _MAX_NUMBER
    return shape_fits and span.states.dtype in _STATES
