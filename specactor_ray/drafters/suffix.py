"""Drafting by counting: what followed this context before, how often, and is the guess worth a verify row?

SuffixDecoding (arXiv 2411.04975) over what reinforcement learning has plenty of, many samples of the same prompts:
earlier epochs, and the other samples of the group *while* they are generated; recent outputs count for more, as in DAS
(arXiv 2511.13841). `ngram` is the simple one of the two history drafters: it copies one earlier occurrence, as far
as the window goes, and sees an output when it is finished. This one

- looks in three sources: the request's own prompt and output; the outputs of the same prompt, finished or not; all
  outputs of the run (`run_history.py`);
- follows, in each, the votes of all occurrences of the longest match (`token_log.py`). At temperatures above 0 the
  target's own noise has a say: where earlier samples went several ways, it takes the one this request's noise favours;
- takes the source with the highest expected accepted length, the sum of the path's probabilities;
- stops at `length_factor` tokens per matched one, or when the path's probability falls below `min_probability`.

When a source's text ends before that, the search goes on with the guess as context. The guess itself never enters an
index: a wrong one is rolled back by forgetting it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Self

import numpy as np

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.drafters.copying import CopyingProposer
from specactor_ray.drafters.mirror import CommitOutcome, RequestMirror
from specactor_ray.drafters.registry import BUILT_IN
from specactor_ray.drafters.run_history import GROUP, RUN, Output, RunHistory
from specactor_ray.drafters.token_log import Draft, Noise, Text, TokenLog, warm_up

DEFAULT_HISTORY_TOKENS = 1 << 20


@dataclass(slots=True)
class _Request:
    """One open request: its mirror, a log of its own known text, and its output in the run's history."""

    mirror: RequestMirror
    own: TokenLog
    text: Text
    output: Output | None
    odds: list[float] = field(default_factory=list)
    """Of each tail token: its probability given those before it."""

    def context(self, length: int) -> list[int]:
        """The last `length` tokens of prompt, committed output and tail."""
        context: list[int] = []
        for part in (self.mirror.tail, self.mirror.committed, self.mirror.prompt):
            missing = length - len(context)
            if missing <= 0:
                break
            context = [*part[-missing:], *context]
        return context


class SuffixProposer(CopyingProposer[_Request]):
    """The `suffix` method.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of the outputs of the run, running ones included; 0 keeps none, and then only
            a request's own text is looked up.
        max_batch: Most requests mirrored at once, at least 1.
        length_factor: Most draft tokens per matched token, above 0.
        min_probability: Least estimated probability that a whole guess is right, from 0 to below 1.
        shared_noise: Let occurrences vote with the target's noise (temperatures above 0).

    Raises:
        ValueError: An argument is out of range.
    """

    method = "suffix"
    traits = BUILT_IN[method].traits

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 8,
        history_tokens: int = DEFAULT_HISTORY_TOKENS,
        max_batch: int = 64,
        length_factor: float = 2.0,
        min_probability: float = 0.1,
        *,
        shared_noise: bool = True,
    ) -> None:
        super().__init__(min_match, max_match, history_tokens, max_batch)
        if not 0.0 < length_factor < float("inf") or not 0.0 <= min_probability < 1.0:
            raise ValueError(
                f"length_factor is {length_factor} (above 0), min_probability is {min_probability} (0 to below 1)"
            )
        self._factor, self._floor, self._shared_noise = length_factor, min_probability, shared_noise
        self._history_shape = (history_tokens, min_match, max_match, max_batch)
        self._history = RunHistory(*self._history_shape) if history_tokens else None
        warm_up()

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        kept = DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens
        limits = (config.min_match, config.max_match, kept, config.max_batch)
        return cls(*limits, config.length_factor, config.min_probability, shared_noise=config.shared_noise)

    def forget_history(self) -> None:
        """Forget the run's outputs. Requests that are open do not add to new ones."""
        if self._history is not None:
            self._history = RunHistory(*self._history_shape)
            for request in self._requests.values():
                request.output = None

    @property
    def history_tokens(self) -> int:
        """Tokens kept of the run's outputs, with the ends of their prompts."""
        return self._history.log.num_tokens if self._history is not None else 0

    @property
    def history_bytes(self) -> int:
        """Bytes set aside for the run's outputs and for the text of the open requests."""
        shared = self._history.nbytes if self._history is not None else 0
        return shared + sum(request.own.nbytes for request in list(self._requests.values()))

    def _take_in(self, request_id: str, mirror: RequestMirror) -> _Request:
        known = [*mirror.prompt, *mirror.committed]
        own, text = TokenLog(max(len(known), 1), self._min, self._max, growing=True), Text()
        own.append(text, known)
        history = self._history
        output = history.open(request_id, mirror.prompt, mirror.committed) if history is not None else None
        return _Request(mirror, own, text, output)

    def _advance(self, request: _Request, outcome: CommitOutcome) -> None:
        request.own.append(request.text, request.mirror.committed[-outcome.advanced :])
        del request.odds[: len(request.odds) - outcome.survived]
        if self._history is not None and request.output is not None:
            self._history.write(request.output, request.mirror.committed)

    def _let_go(self, request_id: str, request: _Request, finished: bool) -> None:
        if self._history is not None and request.output is not None:
            self._history.close(request_id, request.output, finished)

    def _fill(self, request: _Request) -> None:
        tail, guessed = request.mirror.tail, len(request.mirror.tail)
        budget = None
        while True:
            limit = (
                self._room(request.mirror) if budget is None else min(self._room(request.mirror), budget - len(tail))
            )
            if limit <= 0:
                return
            draft = self._best(request, limit, self._factor if budget is None else 0.0)
            if not draft.tokens:
                return
            if budget is None:
                budget = int(self._factor * (draft.matched - guessed))
            tail.extend(draft.tokens)
            request.odds.extend(draft.odds)
            if not draft.cut_short:
                return

    def _room(self, mirror: RequestMirror) -> int:
        """Tokens the tail may grow by: within the window, and within the length of the output."""
        return min(mirror.room, mirror.sampling.max_tokens - mirror.base_len - len(mirror.tail))

    def _best(self, request: _Request, limit: int, factor: float) -> Draft:
        """The guess of the source with the highest score; of equals the own text, then the prompt's outputs."""
        mirror, path = request.mirror, prod(request.odds)
        context = np.array(request.context(self._max), np.int32)
        drafted = len(mirror.tail)
        noise = None
        if self._shared_noise and mirror.sampling.temperature > 0.0:
            noise = Noise(mirror.sampling.seed, mirror.base_len + drafted)
        drafts = [request.own.draft(context, limit, factor, drafted, self._floor, path, noise)]
        if self._history is not None and request.output is not None:
            for scope in (GROUP, RUN):
                group = request.output.text.group
                drafts.append(
                    self._history.log.draft(context, limit, factor, drafted, self._floor, path, noise, group, scope)
                )
        return max(drafts, key=lambda draft: draft.score)  # the first of equals
