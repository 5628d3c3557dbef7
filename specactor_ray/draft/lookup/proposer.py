"""Base of the lookup methods: drafts what followed earlier occurrences of the last tokens.

Let `text` be prompt, committed output and tail, and `known` its part without the tail. Sources, in this order: `known`;
the outputs of the same prompt; with two scopes all outputs of the run, finished or not. In each source the occurrences
of the longest match of the end of `text` are followed by vote (`token_log.py`). A later source replaces an earlier one
if its match is at least as long and its expected accepted length (the sum of the path's probabilities) is larger; a
source without a guess is replaced by any. Where the texts end before the window is full, the search goes on with the
guess as context. Tails never enter an index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specactor_ray.draft.lookup import _token_log_numba as kernels
from specactor_ray.draft.lookup.run_history import Output, RunHistory
from specactor_ray.draft.lookup.token_log import TokenLog
from specactor_ray.draft.slots import SlotProposer
from specactor_ray.messages import FinishedOutput


class LookupProposer(SlotProposer):
    """Drafts by look-ups, on token ids of any vocabulary.

    `extend` fills the windows of all requests that were opened or advanced since the last call and reports each of them
    once, also without a guess.

    Args:
        min_match: Shortest suffix that counts as a match, at least 1.
        max_match: Longest suffix that is looked up, at least `min_match`.
        history_tokens: Most tokens kept of outputs, running ones included; 0: only a request's own text is looked up.
        max_batch: Most requests drafted for at once, at least 1.
        scopes: 1: look up outputs of the same prompt. 2: also outputs of all prompts.
        length_factor: Most draft tokens per matched token; 0: no such limit.
        min_probability: Smallest estimated probability of a whole guess, from 0 to below 1.
        shared_noise: Add the target's noise to the votes (temperatures above 0).

    Raises:
        ValueError: An argument is out of range.
    """

    vocab_size: int | None = None
    _by_slot = (
        *SlotProposer._by_slot, "_indexed", "_buckets", "_groups", "_lasts", "_written", "_seeds", "_bases", "_noisy"
    )  # fmt: skip

    def __init__(
        self,
        min_match: int,
        max_match: int,
        history_tokens: int,
        max_batch: int,
        *,
        scopes: int,
        length_factor: float = 0.0,
        min_probability: float = 0.0,
        shared_noise: bool = False,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match is {min_match} and max_match is {max_match}; need 1 <= min_match <= max_match")
        if history_tokens < 0:
            raise ValueError(f"history_tokens is {history_tokens} (0 or more)")
        super().__init__(max_batch)
        self._max, self._factor, self._floor = max_match, float(length_factor), float(min_probability)
        self._shared_noise = shared_noise
        self._history_shape = (history_tokens, min_match, max_match, max_batch, scopes)
        self._history = RunHistory(*self._history_shape) if history_tokens else None
        self._log = self._history.log if self._history is not None else TokenLog(1, min_match, max_match, scopes)
        self._outputs: dict[int, Output] = {}
        """Slot → the request's output in the history."""
        self._indexed, self._buckets, self._groups, self._lasts, self._written = np.zeros((5, 0), np.int64)
        self._own_rows, self._own_heads = np.zeros((0, 0, 0), np.int32), np.zeros((0, 0), np.int32)
        """These seven: see `_token_log_numba.advance`."""
        self._seeds, self._bases = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._noisy, self._odds = np.zeros(0, np.bool_), np.zeros((0, 0))
        """See `_token_log_numba.fill`."""
        nothing = np.zeros(0, np.int32)  # compiles or loads the kernels (some seconds on the first run of a machine)
        self._log.begin(nothing)
        self._log.write(nothing, 0, 0, -1)
        self._write(nothing)
        self._fill(nothing)

    def extend(self) -> np.ndarray:
        slots = np.flatnonzero(self._unanswered).astype(np.int32)
        self._unanswered[slots] = False
        self._fill(slots)
        return slots

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        if (history := self._history) is not None:
            for request_id, prompt, tokens in outputs:
                history.add(request_id, np.array(prompt, np.int32), tokens)

    def forget_history(self) -> None:
        """Clear the history; requests that are open add nothing to the new one."""
        if self._history is not None:
            self._history = RunHistory(*self._history_shape)
            self._log = self._history.log
            self._outputs.clear()
            self._groups[:] = -1

    @property
    def history_tokens(self) -> int:
        """Tokens kept of outputs, with the ends of their prompts."""
        return self._history.log.num_tokens if self._history is not None else 0

    @property
    def history_bytes(self) -> int:
        """Bytes reserved for outputs and for the text of open requests, untouched pages included."""
        shared = self._history.nbytes if self._history is not None else 0
        return int(shared + self._own_rows.nbytes + self._own_heads.nbytes)

    def _enter(self, slot: int, late: bool) -> bool:
        sampling = self.samplings[slot]
        self._seeds[slot], self._noisy[slot] = sampling.seed, self._shared_noise and sampling.temperature > 0.0
        self._bases[slot] = sampling.first_position - int(self.mirrors.prompts[slot])
        self._indexed[slot], self._buckets[slot], self._groups[slot] = 0, 1, -1
        if self._history is not None:
            prompt, committed = self.mirrors.prompt(slot), self.mirrors.committed(slot)
            output = self._outputs[slot] = self._history.open(self.request_ids[slot], prompt, committed)
            self._groups[slot], self._lasts[slot] = output.group, output.last
            self._written[slot] = len(output.tokens)
        self._write(np.array([slot], np.int32))
        return True

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        self._write(slots)

    def _leave(self, slot: int, finished: bool) -> None:
        self._buckets[slot] = 0
        output = self._outputs.pop(slot, None)
        if self._history is not None and output is not None:
            committed = None if finished else self.mirrors.committed(slot)
            self._history.close(self.request_ids[slot], output, int(self._lasts[slot]), committed)

    def _write(self, slots: np.ndarray) -> None:
        """Bring the logs up to what is committed."""
        mirrors, log = self.mirrors, self._log
        if self._odds.shape != mirrors.lines.shape:  # the lines have grown: index all texts again
            (have, width), columns = mirrors.lines.shape, len(log.levels)
            self._own_rows = np.zeros((have, width, kernels.LINKS + columns), np.int32)
            self._own_heads = np.zeros((have, columns * width), np.int32)
            old, self._odds = self._odds, np.zeros((have, width))
            self._odds[: old.shape[0], : old.shape[1]] = old
            self._indexed[:] = 0
            slots = np.arange(len(self._buckets), dtype=np.int32)
        log.count = kernels.advance(
            mirrors.lines, mirrors.prompts, mirrors.known, self._own_rows, self._own_heads, self._indexed,
            self._buckets, log.rows, log.heads, log.levels, log.scopes, log.count, self._groups, self._lasts,
            self._written, slots,
        )  # fmt: skip

    def _fill(self, slots: np.ndarray) -> None:
        mirrors, log = self.mirrors, self._log
        kernels.fill(
            mirrors.lines, mirrors.known, mirrors.ends, mirrors.limits, self._odds, self._own_rows,
            self._own_heads, self._buckets, log.rows, log.heads, log.levels, log.scopes, log.count, self._groups,
            self._seeds, self._bases, self._noisy, self._max, self._factor, self._floor, slots,
        )  # fmt: skip
