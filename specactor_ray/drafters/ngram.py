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

`suffix.py` is the elaborate one of the two: it counts, weighs its guesses, and sees outputs while they are generated.
"""

from __future__ import annotations

from typing import Self

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.drafters.copying import CopyingProposer
from specactor_ray.drafters.history import History, PromptHistory
from specactor_ray.drafters.mirror import CommitOutcome, RequestMirror
from specactor_ray.drafters.registry import BUILT_IN
from specactor_ray.drafters.suffix_index import SuffixIndex

DEFAULT_HISTORY_TOKENS = 1 << 16


class _Request:
    """One open request: its mirror, the index of its known text, and the history of its prompt."""

    __slots__ = ("history", "index", "mirror")

    def __init__(self, mirror: RequestMirror, index: SuffixIndex, history: PromptHistory | None) -> None:
        self.mirror, self.index, self.history = mirror, index, history
        index.append(mirror.prompt)
        index.append(mirror.committed)


class NgramProposer(CopyingProposer[_Request]):
    """Suffix matching as the module's text says; `history_tokens=0` keeps no earlier outputs.

    Arguments and errors are those of `CopyingProposer`.
    """

    method = "ngram"
    traits = BUILT_IN[method].traits

    def __init__(
        self, min_match: int = 2, max_match: int = 8, history_tokens: int = DEFAULT_HISTORY_TOKENS, max_batch: int = 64
    ) -> None:
        super().__init__(min_match, max_match, history_tokens, max_batch)
        self._history = History(history_tokens, min_match, max_match) if history_tokens else None

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        kept = DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens
        return cls(config.min_match, config.max_match, kept, config.max_batch)

    def forget_history(self) -> None:
        """Forget earlier outputs. Requests that are open do not learn from new ones either."""
        if self._history is not None:
            self._history = History(self._history.max_tokens, self._min, self._max)
            for request in self._requests.values():
                request.history = None

    @property
    def history_tokens(self) -> int:
        """Tokens kept of earlier outputs."""
        return self._history.num_tokens if self._history is not None else 0

    def _take_in(self, request_id: str, mirror: RequestMirror) -> _Request:
        history = self._history.attach(mirror.prompt) if self._history is not None else None
        return _Request(mirror, SuffixIndex(self._min, self._max), history)

    def _advance(self, request: _Request, outcome: CommitOutcome) -> None:
        request.index.append(request.mirror.committed[-outcome.advanced :])

    def _let_go(self, request_id: str, request: _Request, finished: bool) -> None:
        if self._history is None or request.history is None:
            return
        if finished:
            self._history.record(request.history, request.mirror.committed)
        self._history.detach(request.history)

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
