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

from dataclasses import dataclass
from typing import Self

import numpy as np

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.lookup.ngram import check_limits
from specactor_ray.draft.lookup.run_history import GROUP, RUN, Output, RunHistory
from specactor_ray.draft.lookup.token_log import Draft, Noise, Text, TokenLog, warm_up
from specactor_ray.draft.registry import BUILT_IN
from specactor_ray.draft.slots import RowProposer

DEFAULT_HISTORY_TOKENS = 1 << 20


@dataclass(slots=True)
class _Request:
    """A request that is drafted for: a log of its own known text, and its output in the run's history."""

    own: TokenLog
    text: Text
    output: Output | None


class SuffixProposer(RowProposer):
    """The `suffix` method.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of the outputs of the run, running ones included; 0 keeps none, and then only
            a request's own text is looked up.
        max_batch: Most requests drafted for at once, at least 1.
        length_factor: Most draft tokens per matched token, above 0.
        min_probability: Least estimated probability that a whole guess is right, from 0 to below 1.
        shared_noise: Let occurrences vote with the target's noise (temperatures above 0).

    Raises:
        ValueError: An argument is out of range.
    """

    method = "suffix"
    vocab_size: int | None = None
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
        check_limits(min_match, max_match, history_tokens)
        super().__init__(max_batch)
        if not 0.0 < length_factor < float("inf") or not 0.0 <= min_probability < 1.0:
            raise ValueError(
                f"length_factor is {length_factor} (above 0), min_probability is {min_probability} (0 to below 1)"
            )
        self._factor, self._floor, self._shared_noise = length_factor, min_probability, shared_noise
        self._history_shape = (history_tokens, min_match, max_match, max_batch)
        self._history = RunHistory(*self._history_shape) if history_tokens else None
        self._min, self._max = min_match, max_match
        self._requests: dict[int, _Request] = {}
        self._odds = np.zeros((0, 0))
        """`(slots, width)`: of each tail token in the lines of `mirrors` its probability given those before it."""
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

    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> np.ndarray:
        if self._odds.shape != self.mirrors.lines.shape:
            old, self._odds = self._odds, np.zeros(self.mirrors.lines.shape)
            self._odds[: old.shape[0], : old.shape[1]] = old
        line, odds = self.mirrors.lines[slot], self._odds[slot]
        known, begin = int(self.mirrors.known[slot]), int(self.mirrors.ends[slot])
        end, limit, budget = begin, begin + room, None
        while end < limit:
            draft = self._best(slot, known, end, limit - end, self._factor if budget is None else 0.0)
            if not draft.tokens:
                break
            if budget is None:
                budget = int(self._factor * (draft.matched - (begin - known)))
                limit = min(limit, known + budget)
            stop = end + len(draft.tokens)
            line[end:stop], odds[end:stop], end = draft.tokens, draft.odds, stop
            if not draft.cut_short:
                break
        guess: np.ndarray = line[begin:end]
        return guess

    def _enter(self, slot: int, late: bool) -> bool:
        known, history = self.mirrors.lines[slot, : self.mirrors.known[slot]], self._history
        own, text = TokenLog(max(len(known), 1), self._min, self._max, growing=True), Text()
        own.append(text, known)
        output = None
        if history is not None:
            output = history.open(self.request_ids[slot], self.mirrors.prompt(slot), self.mirrors.committed(slot))
        self._requests[slot] = _Request(own, text, output)
        return True

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        for slot in slots.tolist():
            request = self._requests.get(slot)
            if request is not None:
                request.own.append(request.text, self.mirrors.lines[slot, request.own.count : self.mirrors.known[slot]])
                if self._history is not None and request.output is not None:
                    self._history.write(request.output, self.mirrors.committed(slot))

    def _leave(self, slot: int, finished: bool) -> None:
        request = self._requests.pop(slot)
        if self._history is not None and request.output is not None:
            self._history.close(self.request_ids[slot], request.output, finished)

    def _best(self, slot: int, known: int, end: int, limit: int, factor: float) -> Draft:
        """The guess of the source with the highest score; of equals the own text, then the prompt's outputs."""
        request, sampling = self._requests[slot], self.samplings[slot]
        context = self.mirrors.lines[slot, max(end - self._max, 0) : end]
        path, drafted = float(self._odds[slot, known:end].prod()), end - known
        noise = None
        if self._shared_noise and sampling.temperature > 0.0:
            noise = Noise(sampling.seed, end - int(self.mirrors.prompts[slot]))
        drafts = [request.own.draft(context, limit, factor, drafted, self._floor, path, noise)]
        if self._history is not None and request.output is not None:
            for scope in (GROUP, RUN):
                group = request.output.text.group
                drafts.append(
                    self._history.log.draft(context, limit, factor, drafted, self._floor, path, noise, group, scope)
                )
        return max(drafts, key=lambda draft: draft.score)  # the first of equals
