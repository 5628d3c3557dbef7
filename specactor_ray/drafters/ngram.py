"""Drafting by copying: find where the last tokens occurred before and guess that the same follows.

The idea is prompt lookup decoding (Saxena, 2023), with the outputs of earlier samples of the same prompt added as in
SuffixDecoding (arXiv 2411.04975). No model, no weights: microseconds per token.

The rule, exactly. Let `text` = prompt + committed output + tail, and `known` its part without the tail.
1. *Own* occurrences are looked up in `known`, at most `MAX_CANDIDATES` of the latest (`suffix_index.py` defines an
   occurrence). The longest match wins, of equal ones the latest.
2. *History* occurrences are looked up in the earlier outputs of the same prompt, likewise; `history.py` says which of
   several equally long ones wins. History is taken if its match is longer than the own one.
3. What followed the occurrence is copied into the tail until the window is full. Copying from the own text goes on into
   the tokens just copied, so periodic text continues. A copy from history ends where that output ended; then 1. is
   tried again with the longer text.
The tail never enters the index: a wrong guess is rolled back by forgetting it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from specactor_ray.drafters.history import History, PromptHistory
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.drafters.suffix_index import SuffixIndex
from specactor_ray.messages import SamplingParams

_REFUSED_PER_SLOT = 16
"""Refused requests remembered per slot of `max_batch`; their ids and committed lengths only."""


class _Request:
    """One open request: its mirror, the index of its known text, and the history of its prompt."""

    __slots__ = ("history", "index", "mirror")

    def __init__(self, mirror: RequestMirror, index: SuffixIndex, history: PromptHistory | None) -> None:
        self.mirror, self.index, self.history = mirror, index, history
        index.append(mirror.prompt)
        index.append(mirror.committed)


class NgramProposer:
    """Implements `drafters.base.Proposer` by suffix matching; works on token ids of any vocabulary.

    `extend` fills the windows of all requests that were opened or advanced since the last call, and reports each of
    them once, also if there is no guess.

    A request beyond `max_batch` is refused quietly: commits of it are accepted and answered with an empty tail,
    so that nobody waits for it or asks to open it again. When a place is free its next commit returns False, and the
    `open` that follows takes it in.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of earlier outputs; 0 keeps none.
        max_batch: Most requests mirrored at once, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """

    method = "ngram"
    vocab_size: int | None = None

    def __init__(
        self, min_match: int = 2, max_match: int = 8, history_tokens: int = 65_536, max_batch: int = 64
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match is {min_match} and max_match is {max_match}; need 1 <= min_match <= max_match")
        if history_tokens < 0 or max_batch < 1:
            raise ValueError(f"history_tokens is {history_tokens} (0 or more), max_batch is {max_batch} (1 or more)")
        self.weight_version = 0
        self._min, self._max, self._max_batch = min_match, max_match, max_batch
        self._history = History(history_tokens, min_match, max_match) if history_tokens else None
        self._requests: dict[str, _Request] = {}
        self._refused: OrderedDict[str, int] = OrderedDict()
        self._unanswered: dict[str, None] = {}

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
        if len(self._requests) >= self._max_batch:
            self._refuse(request_id, len(committed_token_ids))
            return
        mirror = RequestMirror(prompt_token_ids, committed_token_ids, sampling, window)
        history = self._history.attach(mirror.prompt) if self._history is not None else None
        self._requests[request_id] = _Request(mirror, SuffixIndex(self._min, self._max), history)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], window: int) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return self._commit_refused(request_id, start + len(token_ids))
        mirror = request.mirror
        old_window = mirror.window
        outcome = mirror.commit(start, token_ids, window)
        if outcome.advanced:
            request.index.append(mirror.committed[-outcome.advanced :])
        if outcome.advanced or mirror.window > old_window:
            self._unanswered[request_id] = None
        return outcome.ok

    def extend(self) -> list[str]:
        answered, self._unanswered = list(self._unanswered), {}
        for request_id in answered:
            request = self._requests.get(request_id)
            if request is not None:
                self._fill(request)
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
        request = self._requests.pop(request_id, None)
        if request is None or self._history is None or request.history is None:
            return
        if finished:
            self._history.record(request.history, request.mirror.committed)
        self._history.detach(request.history)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """There are none: notes the version. Earlier outputs stay, the new policy resembles the old one."""
        self.weight_version = version

    def forget_history(self) -> None:
        """Forget earlier outputs. Requests that are open do not learn from new ones either."""
        if self._history is not None:
            self._history = History(self._history.max_tokens, self._min, self._max)
            for request in self._requests.values():
                request.history = None

    @property
    def num_requests(self) -> int:
        """Requests that are mirrored, without the refused ones."""
        return len(self._requests)

    @property
    def history_tokens(self) -> int:
        """Tokens kept of earlier outputs."""
        return self._history.num_tokens if self._history is not None else 0

    def _refuse(self, request_id: str, base_len: int) -> None:
        self._refused[request_id] = base_len
        if len(self._refused) > _REFUSED_PER_SLOT * self._max_batch:
            forgotten, _ = self._refused.popitem(last=False)
            self._unanswered.pop(forgotten, None)

    def _commit_refused(self, request_id: str, end: int) -> bool:
        base_len = self._refused.get(request_id)
        if base_len is None or len(self._requests) < self._max_batch:
            return False
        if end > base_len:
            self._refused[request_id] = end
            self._unanswered[request_id] = None
        return True

    def _fill(self, request: _Request) -> None:
        mirror, tail = request.mirror, request.mirror.tail
        while mirror.room:
            known = request.index.tokens
            suffix = tail[-self._max :]
            if len(suffix) < self._max:
                suffix = known[len(suffix) - self._max :] + suffix
            own_length, own = request.index.find(suffix, latest_only=True)
            length, copied = 0, list[int]()
            if request.history is not None and own_length < self._max:  # else it could not be longer
                length, copied = request.history.guess(suffix, mirror.room)
            if length > own_length:
                tail.extend(copied)
            elif own:
                _copy_onwards(known, tail, own[0], mirror.room)
            else:
                return


def _copy_onwards(known: list[int], tail: list[int], start: int, length: int) -> None:
    """Append to `tail` the `length` tokens of `known + tail` from position `start < len(known)` on; the copy may run
    into the tokens it has just appended."""
    copied = known[start : start + length]
    tail.extend(copied)
    for position in range(length - len(copied)):
        tail.append(tail[position])
