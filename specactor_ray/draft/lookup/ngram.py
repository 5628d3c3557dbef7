"""Drafting by copying: find where the last tokens occurred before and guess that the same follows.

The idea is prompt lookup decoding (Saxena, 2023), with the outputs of earlier samples of the same prompt added as in
SuffixDecoding (arXiv 2411.04975). No model, no weights: microseconds per token.

The rule, exactly. Let `text` = prompt + committed output + tail, and `known` its part without the tail.
1. *Own* occurrences are looked up in `known`, at most `MAX_CANDIDATES` of the latest (`_ngram_numba.py` defines an
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

import numpy as np

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.lookup import _ngram_numba as kernels
from specactor_ray.draft.lookup.history import History, PromptHistory
from specactor_ray.draft.registry import BUILT_IN
from specactor_ray.draft.slots import SlotProposer

DEFAULT_HISTORY_TOKENS = 1 << 16
MAX_CANDIDATES = 64
"""Most recent occurrences of the last `min_match` tokens that a look-up compares. Bounds its cost in texts that
repeat a short phrase very often."""


def check_limits(min_match: int, max_match: int, history_tokens: int) -> None:
    """Refuse limits of a look-up that are out of range."""
    if not 1 <= min_match <= max_match:
        raise ValueError(f"min_match is {min_match} and max_match is {max_match}; need 1 <= min_match <= max_match")
    if history_tokens < 0:
        raise ValueError(f"history_tokens is {history_tokens} (0 or more)")


class NgramProposer(SlotProposer):
    """Suffix matching as the module's text says; works on token ids of any vocabulary.

    `extend` fills the windows of all requests that were opened or advanced since the last call, and reports each of
    them once, also if there is no guess.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of earlier outputs, 0 or more.
        max_batch: Most requests drafted for at once, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """

    method = "ngram"
    vocab_size: int | None = None
    traits = BUILT_IN[method].traits
    _by_slot = (*SlotProposer._by_slot, "_indexed", "_prompts")

    def __init__(
        self, min_match: int = 2, max_match: int = 8, history_tokens: int = DEFAULT_HISTORY_TOKENS, max_batch: int = 64
    ) -> None:
        check_limits(min_match, max_match, history_tokens)
        super().__init__(max_batch)
        self._min, self._max = min_match, max_match
        self._history = History(history_tokens, min_match, max_match)
        self._attached: dict[int, PromptHistory] = {}
        self._indexed, self._prompts = np.zeros((2, 0), np.int64)
        self._links, self._heads = np.zeros((2, 0, 0), np.int32)
        """These four: see `_ngram_numba.fill`."""
        self._fill(np.zeros(0, np.int64))  # compiles or loads the kernels

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        kept = DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens
        return cls(config.min_match, config.max_match, kept, config.max_batch)

    def extend(self) -> np.ndarray:
        slots = np.flatnonzero(self._unanswered)
        self._unanswered[slots] = False
        self._fill(slots[self._placed[slots]])
        return slots.astype(np.int32)

    def forget_history(self) -> None:
        """Forget earlier outputs. Requests that are open do not learn from new ones either."""
        self._history = History(self._history.max_tokens, self._min, self._max)
        self._attached.clear()
        self._prompts[:] = kernels.OWN

    @property
    def history_tokens(self) -> int:
        """Tokens kept of earlier outputs."""
        return self._history.num_tokens

    def _enter(self, slot: int, late: bool) -> bool:
        entry = self._attached[slot] = self._history.attach(self.mirrors.prompt(slot))
        self._indexed[slot], self._prompts[slot] = 0, entry.number
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        entry = self._attached.pop(slot, None)
        if entry is not None:
            if finished:
                self._history.record(entry, self.mirrors.committed(slot))
            self._history.detach(entry)

    def _fill(self, slots: np.ndarray) -> None:
        mirrors, history = self.mirrors, self._history
        if self._links.shape != mirrors.lines.shape:  # they have grown: index all texts again
            self._links, self._heads = np.zeros((2, *mirrors.lines.shape), np.int32)
            self._indexed[:] = 0
        kernels.fill(
            mirrors.lines, mirrors.known, mirrors.ends, mirrors.limits, self._links, self._heads, self._indexed,
            history.tokens, history.owners, history.links, history.heads, history.floor, self._prompts,
            slots, self._min, self._max, MAX_CANDIDATES,
        )  # fmt: skip
