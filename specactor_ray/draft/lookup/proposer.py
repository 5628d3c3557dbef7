"""The lookup methods: they draft the tokens that followed earlier occurrences of the last tokens.

Let `text` be prompt, committed output and tail, and `known` its part without the tail. Sources, in this order: `known`;
the outputs of the same prompt; with two scopes all outputs of the run, finished or not. In each source the occurrences
of the longest match of the end of `text` are followed by vote (`token_log.py`). A later source replaces an earlier one
if its match is at least as long and its expected accepted length (the sum of the path's probabilities) is larger; any
source replaces one without a guess. If the texts end before the window is full, the search continues with the guess as
context. Tails never enter an index.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Self
from zlib import crc32

import numpy as np

from specactor_ray.config.methods import BUILT_IN
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.lookup import _token_log_numba as kernels
from specactor_ray.draft.lookup.token_log import TokenLog
from specactor_ray.draft.slots import SlotProposer
from specactor_ray.transport.messages import FinishedOutput


class LookupProposer(SlotProposer):
    """Drafts by look-ups, on token ids of any vocabulary.

    `extend` fills the windows of all requests that were opened or advanced since the last call and returns each of them
    once, also without a guess.

    The outputs of the run are in one `TokenLog`, each visible to all requests from its first token on. Before it is the
    end of its prompt as context only, so that the start of an output is found, too. An output that is closed unfinished
    (moved, or opened again) is continued when its request returns, so no token counts twice.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of outputs, with the ends of their prompts, running ones included; 0: only a
            request's own text is looked up. Default: the method's.
        max_batch: Most requests drafted for at once, at least 1.
        length_factor: Most draft tokens per matched token; 0: no such limit.
        min_probability: Smallest estimated probability of a whole guess, from 0 to below 1.
        shared_noise: Add the target's noise to the votes (temperatures above 0).

    Raises:
        ValueError: An argument is out of range.
    """

    vocab_size: int | None = None
    history: int
    """Default of `history_tokens`."""
    scopes: int
    """1: outputs of the same prompt are searched. 2: also outputs of all prompts."""
    _by_slot = (*SlotProposer._by_slot, "_indexed", "_groups", "_lasts", "_written", "_seeds", "_bases", "_noisy")

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 8,
        history_tokens: int | None = None,
        max_batch: int = 64,
        length_factor: float = 0.0,
        min_probability: float = 0.0,
        *,
        shared_noise: bool = False,
    ) -> None:
        kept = self.history if history_tokens is None else history_tokens
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match is {min_match} and max_match is {max_match}; need 1 <= min_match <= max_match")
        if kept < 0:
            raise ValueError(f"history_tokens is {kept} (0 or more)")
        super().__init__(max_batch)
        self._limits = max_match, float(length_factor), float(min_probability)
        self._shared_noise, self._max_batch = shared_noise, max_batch
        self._log_shape = max(kept, 1), min_match, max_match, self.scopes
        self._log, self._has_history = TokenLog(*self._log_shape), kept > 0
        self._unfinished: OrderedDict[str, tuple[int, int, np.ndarray]] = OrderedDict()
        """Request that was closed unfinished → its group, number of the last row, and output tokens in the history."""
        self._indexed, self._groups, self._lasts, self._written = np.zeros((4, 0), np.int64)
        self._seeds, self._bases = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._noisy, self._odds = np.zeros(0, np.bool_), np.zeros((0, 0))
        self._own_rows, self._own_heads = np.zeros((0, 0, 0), np.int32), np.zeros((0, 0), np.int32)
        """These ten arrays: see `_token_log_numba.Texts`."""
        nothing = np.zeros(0, np.int32)  # compiles or loads the kernels (some seconds on the first run of a machine)
        self._log.write(nothing, 0, -1)
        self._write(nothing)
        self._fill(nothing)

    def extend(self) -> np.ndarray:
        slots = np.flatnonzero(self._unanswered).astype(np.int32)
        self._unanswered[slots] = False
        self._fill(slots)
        return slots

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        for request_id, prompt, tokens in outputs if self._has_history else ():
            text = np.concatenate([np.array(prompt, np.int32), tokens])
            group, last, written = self._resume(request_id, text[: len(prompt)], tokens)
            self._log.write(text, group, last, len(prompt) + written)
            self._unfinished.pop(request_id, None)

    def forget_history(self) -> None:
        """Clear the history; open requests add nothing to the new one."""
        self._log = TokenLog(*self._log_shape)
        self._unfinished.clear()
        self._groups[:] = -1

    @property
    def history_tokens(self) -> int:
        """Tokens of outputs, with the ends of their prompts, in the history."""
        return self._log.num_tokens

    @property
    def history_bytes(self) -> int:
        """Bytes reserved for outputs and for the text of open requests, untouched pages included."""
        return int(self._log.nbytes + self._own_rows.nbytes + self._own_heads.nbytes)

    def _enter(self, slot: int, late: bool) -> bool:
        sampling, prompt, committed = self.samplings[slot], self.mirrors.prompt(slot), self.mirrors.committed(slot)
        self._seeds[slot], self._noisy[slot] = sampling.seed, self._shared_noise and sampling.temperature > 0.0
        self._bases[slot] = sampling.first_position - int(self.mirrors.prompts[slot])
        self._indexed[slot], self._groups[slot] = 0, -1
        if self._has_history:
            found = self._resume(self.request_ids[slot], prompt, committed)
            self._groups[slot], self._lasts[slot], self._written[slot] = found
        self._write(np.array([slot], np.int32))
        return True

    def _resume(self, request_id: str, prompt: np.ndarray, committed: np.ndarray) -> tuple[int, int, int]:
        """Begin an output of a prompt in the history, or continue one that agrees with `committed`. Returns its group,
        the number of its last row and how many tokens it has there."""
        group = crc32(prompt.tobytes()) >> 1
        known, last, tokens = self._unfinished.get(request_id, (-1, -1, committed))
        length = min(len(tokens), len(committed))
        if known == group and self._log.remembers(last) and np.array_equal(tokens[:length], committed[:length]):
            return group, last, len(tokens)
        self._unfinished.pop(request_id, None)
        return group, self._log.write(prompt[-self._limits[0] :], kernels.CONTEXT_ONLY, -1), 0

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        self._write(slots[self._placed[slots]])

    def _leave(self, slot: int, finished: bool) -> None:
        group, request_id, committed = int(self._groups[slot]), self.request_ids[slot], self.mirrors.committed(slot)
        _, _, earlier = self._unfinished.pop(request_id, (-1, -1, committed[:0]))
        if not finished and group >= 0:
            tokens = max(earlier, committed.copy(), key=len)
            self._unfinished[request_id] = group, int(self._lasts[slot]), tokens
            if len(self._unfinished) > self._max_batch:
                self._unfinished.popitem(last=False)

    def _write(self, slots: np.ndarray) -> None:
        """Add the newly committed tokens to the logs."""
        log, (have, width) = self._log, self.mirrors.lines.shape
        if self._odds.shape != (have, width):  # the lines have grown: index all texts again
            columns = len(log.arrays[2])
            self._own_rows = np.zeros((have, width, kernels.LINKS + columns), np.int32)
            self._own_heads = np.zeros((have, columns * width), np.int32)
            old, self._odds = self._odds, np.zeros((have, width))
            self._odds[: old.shape[0], : old.shape[1]] = old
            self._indexed[:] = 0
            slots = np.append(np.flatnonzero(self._placed).astype(np.int32), slots)
        log.count = kernels.advance(self.mirrors.arrays, _TEXTS(self), log.arrays, log.count, slots)

    def _fill(self, slots: np.ndarray) -> None:
        mirrors, log, placed = self.mirrors, self._log, slots[self._placed[slots]]
        kernels.fill(mirrors.arrays, mirrors.limits, _TEXTS(self), log.arrays, log.count, *self._limits, placed)


_TEXTS = operator.attrgetter(
    "_own_rows", "_own_heads", *(f"_{name}" for name in kernels.Texts._fields if name not in ("rows", "heads"))
)


class NgramProposer(LookupProposer):
    """`ngram`: the request's own text and outputs of the same prompt; fills the window wherever there is a match.

    Prompt lookup decoding (Saxena, 2023) with the other samples of the prompt, as in SuffixDecoding.
    """

    method = "ngram"
    traits = BUILT_IN[method].traits
    history, scopes = 1 << 16, 1

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        return cls(config.min_match, config.max_match, config.history_tokens, config.max_batch)


class SuffixProposer(LookupProposer):
    """`suffix`: also all outputs of the run, with drafts as long as their estimated probability allows.

    SuffixDecoding (arXiv 2411.04975) over the many samples per prompt of reinforcement learning; recent outputs count
    more, as in DAS (arXiv 2511.13841). At temperatures above 0 the target's noise is added to the votes.
    """

    method = "suffix"
    traits = BUILT_IN[method].traits
    history, scopes = 1 << 20, 2

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 8,
        history_tokens: int | None = None,
        max_batch: int = 64,
        length_factor: float = 2.0,
        min_probability: float = 0.1,
        *,
        shared_noise: bool = True,
    ) -> None:
        if not 0.0 < length_factor < float("inf") or not 0.0 <= min_probability < 1.0:
            raise ValueError(
                f"length_factor is {length_factor} (above 0), min_probability is {min_probability} (0 to below 1)"
            )
        limits = (min_match, max_match, history_tokens, max_batch, length_factor, min_probability)
        super().__init__(*limits, shared_noise=shared_noise)

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        limits = (config.min_match, config.max_match, config.history_tokens, config.max_batch)
        return cls(*limits, config.length_factor, config.min_probability, shared_noise=config.shared_noise)
