"""What the proposers that copy from known text share: mirrors, places, and when a request is answered.

They have no model: one `extend` does all that can be done, in microseconds.
"""

from __future__ import annotations

import abc
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specactor_ray.drafters.base import RowProposer
from specactor_ray.drafters.mirror import CommitOutcome, RequestMirror
from specactor_ray.messages import SamplingParams

logger = logging.getLogger(__name__)

_REFUSED_PER_SLOT = 16
"""Refused requests remembered per slot of `max_batch`; their ids and committed lengths only."""


class Mirrored(Protocol):
    """An open request of a proposer: a mirror and what the proposer adds to it."""

    mirror: RequestMirror


RequestT = TypeVar("RequestT", bound=Mirrored)


class CopyingProposer(RowProposer, Generic[RequestT]):
    """Implements `drafters.base.Proposer` but for the guessing itself; works on token ids of any vocabulary.

    `extend` fills the windows of all requests that were opened or advanced since the last call, and reports each of
    them once, also if there is no guess. If guessing fails for a request, its tail is empty.

    A request beyond `max_batch` is refused quietly: commits of it are accepted and answered with an empty tail,
    so that nobody waits for it or asks to open it again. When a place is free the next commit of one of them
    returns False, and the place is kept for the `open` that follows.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of other outputs, 0 or more.
        max_batch: Most requests mirrored at once, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """

    vocab_size: int | None = None

    def __init__(self, min_match: int, max_match: int, history_tokens: int, max_batch: int) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match is {min_match} and max_match is {max_match}; need 1 <= min_match <= max_match")
        if history_tokens < 0 or max_batch < 1:
            raise ValueError(f"history_tokens is {history_tokens} (0 or more), max_batch is {max_batch} (1 or more)")
        self._min, self._max, self._max_batch = min_match, max_match, max_batch
        self._requests: dict[str, RequestT] = {}
        self._refused: OrderedDict[str, int] = OrderedDict()
        self._unanswered: dict[str, None] = {}
        self._promised: set[str] = set()
        """Refused requests that a place is kept for, until they are opened afresh or closed."""

    @abc.abstractmethod
    def _take_in(self, request_id: str, mirror: RequestMirror) -> RequestT:
        """A request was opened; learn its text."""

    @abc.abstractmethod
    def _advance(self, request: RequestT, outcome: CommitOutcome) -> None:
        """The mirror took a commit; learn the last `outcome.advanced` tokens of its output."""

    @abc.abstractmethod
    def _fill(self, request: RequestT) -> None:
        """Lengthen the tail as far as is worth it, at most to the window."""

    @abc.abstractmethod
    def _let_go(self, request_id: str, request: RequestT, finished: bool) -> None:
        """A request was closed."""

    @property
    @abc.abstractmethod
    def history_tokens(self) -> int:
        """Tokens kept of outputs, as far as `history_tokens` bounds them."""

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self.close(request_id, finished=False)
        self._unanswered[request_id] = None
        if self._is_full():
            self._refuse(request_id, len(committed_token_ids))
            return
        mirror = RequestMirror(prompt_token_ids, committed_token_ids, sampling, window)
        self._requests[request_id] = self._take_in(request_id, mirror)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return self._commit_refused(request_id, start + len(token_ids))
        mirror = request.mirror
        outcome = mirror.commit(start, token_ids)
        if outcome.advanced:
            self._advance(request, outcome)
            self._unanswered[request_id] = None
        return outcome.ok

    def extend(self) -> list[str]:
        answered, self._unanswered = list(self._unanswered), {}
        for request_id in answered:
            request = self._requests.get(request_id)
            if request is None:
                continue
            try:
                self._fill(request)
            except Exception:
                logger.exception("%s: no draft for request %s", self.method, request_id)
                request.mirror.tail.clear()
        return answered

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        if request_id in self._refused:
            return self._refused[request_id], ()
        mirror = self._requests[request_id].mirror
        return mirror.base_len, tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        """One `extend` does all that can be done, so only what it has not seen yet is pending."""
        return request_id in self._unanswered

    def close(self, request_id: str, finished: bool = True) -> None:
        self._unanswered.pop(request_id, None)
        self._refused.pop(request_id, None)
        self._promised.discard(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._let_go(request_id, request, finished)

    def _refuse(self, request_id: str, base_len: int) -> None:
        self._refused[request_id] = base_len
        if len(self._refused) > _REFUSED_PER_SLOT * self._max_batch:
            forgotten, _ = self._refused.popitem(last=False)
            self._unanswered.pop(forgotten, None)
            self._promised.discard(forgotten)

    def _is_full(self) -> bool:
        return len(self._requests) + len(self._promised) >= self._max_batch

    def _commit_refused(self, request_id: str, end: int) -> bool:
        base_len = self._refused.get(request_id)
        if base_len is not None and not self._is_full():
            self._promised.add(request_id)
        if base_len is None or request_id in self._promised:
            return False
        if end > base_len:
            self._refused[request_id] = end
            self._unanswered[request_id] = None
        return True
