"""Checks of messages where they arrive: behind them everything is of the type and within the range that it claims.

A message says what its sender believes, which may be wrong, and the protocol bears that. What it is made of is checked
here and nowhere else. A malformed message is counted for its sender and dropped, and who sends nothing else for long is
not listened to any more: the sender's mistake stays the sender's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from specactor_ray.errors import InputError
from specactor_ray.messages import (
    Commit,
    DraftClose,
    DraftOpen,
    DraftResync,
    DraftTail,
    Features,
    Mode,
    SamplingParams,
    ToDrafter,
    ToVerifier,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

MOST_MALFORMED = 100
"""Malformed messages that a sender may send before it is cut off."""
UNKNOWN = "?"
"""Stands for the sender of what does not even say who sent it; it is never cut off."""
_MOST_SENDERS = 1024
"""Senders that are told apart; those beyond count as unknown."""

_MAX_ID = 1024
_MAX_TAIL = 65_536
_MAX_SEQUENCE = 1 << 24
"""Most tokens of a prompt, an output or a commit, and most hidden states."""
_MAX_NUMBER = 1 << 62
_MAX_TOKEN_S = 1.0e6
_ANY_TOKEN = 1 << 31
"""Where the vocabulary is not known."""
_INT = {int}


class Screen(Generic[T]):
    """Lets well-formed messages through. For any thread.

    Args:
        find_problem: Says what is wrong with a message, or nothing.
        sender: Name of the attribute that holds the sender's id.
        on_cut: Called once with every sender that is cut off, in the thread that delivered its message.
    """

    def __init__(
        self, find_problem: Callable[[Any], str], sender: str, on_cut: Callable[[str], None] = lambda sender: None
    ) -> None:
        self._find_problem, self._sender, self._on_cut = find_problem, sender, on_cut
        self._lock = threading.Lock()
        self._malformed: dict[str, int] = {}
        self.cut_off: dict[str, None] = {}
        """Senders that are not listened to any more."""

    def sift(self, messages: object) -> list[T]:
        """The well-formed messages of those that came, in their order."""
        if not isinstance(messages, list | tuple):
            self._reject(None, f"a {type(messages).__name__} in place of a list of messages")
            return []
        good = []
        find_problem = self._find_problem
        for message in messages:
            try:
                problem = find_problem(message)
            except AttributeError as missing:  # an object of a message class that was never filled
                problem = str(missing)
            if problem:
                self._reject(message, problem)
            elif not self.cut_off or getattr(message, self._sender) not in self.cut_off:
                good.append(message)
        return good

    def snapshot(self) -> dict[str, Any]:
        """For status displays: malformed messages per sender, and who is cut off."""
        with self._lock:
            return {"malformed": dict(self._malformed), "cut_off": list(self.cut_off)}

    def _reject(self, message: object, problem: str) -> None:
        sender = getattr(message, self._sender, None) if type(message) in _CLASSES else None
        with self._lock:
            known = _is_id(sender) and (sender in self._malformed or len(self._malformed) < _MOST_SENDERS)
            name = str(sender) if known else UNKNOWN
            count = self._malformed[name] = self._malformed.get(name, 0) + 1
            cut = known and count > MOST_MALFORMED and name not in self.cut_off
            if cut:
                self.cut_off[name] = None
        if cut:
            logger.error("%s is cut off after %d malformed messages; the last: %s", name, count, problem)
            self._on_cut(name)
        elif count == 1:
            logger.warning("a malformed message of %s is dropped: %s", name, problem)


def verifier_screen(vocab_size: int) -> Screen[ToVerifier]:
    """For messages of drafters to a verifier.

    Args:
        vocab_size: Token ids must lie in `[0, vocab_size)`.
    """

    def find_problem(message: Any) -> str:
        kind = type(message)
        if kind is not DraftTail and kind is not DraftResync:
            return f"{kind.__name__} is no message of a drafter"
        if not (_is_id(message.request_id) and _is_id(message.drafter_id)):
            return "an id is no string, or far too long"
        if kind is DraftResync:
            return ""
        if not _is_count(message.base_len):
            return "base_len is no position"
        if not _are_tokens(message.token_ids, vocab_size, _MAX_TAIL):
            return f"token_ids are not at most {_MAX_TAIL} token ids below {vocab_size}"
        if not _is_count(message.weight_version):
            return "weight_version is no version"
        if type(message.complete) is not bool:
            return "complete is neither true nor false"
        if not (type(message.token_s) in (float, int) and 0.0 <= message.token_s <= _MAX_TOKEN_S):
            return "token_s is no number of seconds"
        return ""

    return Screen(find_problem, "drafter_id")


def drafter_screen(vocab_size: int | None, on_cut: Callable[[str], None]) -> Screen[ToDrafter]:
    """For messages of verifiers to a drafter.

    Args:
        vocab_size: Token ids must lie in `[0, vocab_size)`; None: any vocabulary.
        on_cut: Called once with every verifier that is cut off, in the thread that delivered its message.
    """
    limit = _ANY_TOKEN if vocab_size is None else vocab_size

    def find_problem(message: Any) -> str:
        kind = type(message)
        if kind is not Commit and kind is not DraftClose and kind is not DraftOpen:
            return f"{kind.__name__} is no message of a verifier"
        if not (_is_id(message.request_id) and _is_id(message.verifier_id)):
            return "an id is no string, or far too long"
        if kind is DraftClose:
            return "" if type(message.finished) is bool else "finished is neither true nor false"
        if not (_is_count(message.window) and message.window <= _MAX_TAIL and type(message.mode) is Mode):
            return f"window is not between 0 and {_MAX_TAIL}, or mode no mode"
        if kind is Commit:
            good = _is_count(message.start) and _are_tokens(message.token_ids, limit, _MAX_SEQUENCE)
        else:
            good = _are_tokens(message.prompt_token_ids, limit, _MAX_SEQUENCE) and _are_tokens(
                message.committed_token_ids, limit, _MAX_SEQUENCE
            )
            if not _is_sampling(message.sampling):
                return "sampling is not in order"
        if not good:
            return f"its tokens are not token ids below {limit}, or where they begin is no position"
        return "" if message.features == () or _are_features(message.features) else "features are not in order"

    return Screen(find_problem, "verifier_id", on_cut)


def _is_id(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_ID


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _are_tokens(token_ids: Any, limit: int, most: int) -> bool:
    if type(token_ids) is not tuple or len(token_ids) > most:
        return False
    return not token_ids or (set(map(type, token_ids)) == _INT and min(token_ids) >= 0 and max(token_ids) < limit)


def _are_features(features: Any) -> bool:
    return type(features) is tuple and all(
        type(span) is Features
        and _is_count(span.begin)
        and type(span.states) is np.ndarray
        and span.states.ndim == 2
        and len(span.states) <= _MAX_SEQUENCE
        and span.states.dtype.kind in "fi"
        for span in features
    )


def _is_sampling(sampling: Any) -> bool:
    if type(sampling) is not SamplingParams:
        return False
    numbers = all(type(value) in (float, int) for value in (sampling.temperature, sampling.top_p))
    counts = all(_is_count(value) for value in (sampling.top_k, sampling.max_tokens))
    stops = _are_tokens(sampling.stop_token_ids, _ANY_TOKEN, _MAX_SEQUENCE)
    if not (numbers and counts and stops and type(sampling.seed) is int and type(sampling.ignore_eos) is bool):
        return False
    try:
        sampling.__post_init__()  # the ranges; an object that came over the wire was never asked
    except InputError:
        return False
    return True


_CLASSES = (ToVerifier | ToDrafter).__args__
