"""The lookup methods `ngram` and `suffix`: they draft the tokens that followed earlier occurrences of the last tokens.

Let `text` be prompt, committed output and tail, and `known` its part without the tail. Sources, in this order: `known`;
the outputs of the same prompt; with two scopes all outputs of the run, finished or not. In each source the occurrences
of the longest match of the end of `text` are followed by vote. A later source replaces an earlier one if its match is
at least as long and its expected accepted length (the sum of the path's probabilities) is larger; any source replaces
one without a guess. Tails never enter an index. Other lookups derive from `RowProposer` (`draft/rows.py`). See
docs/design/drafters.md.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Self
from zlib import crc32

import numpy as np

from specactor_ray.config.methods import BUILT_IN
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft import _lookup_kernels as kernels
from specactor_ray.draft.rows import BatchProposer
from specactor_ray.transport.messages import FinishedOutput


class TokenLog:
    """The outputs of the run, `capacity` tokens at most, interleaved in the order they were written.

    An *occurrence* of a context is a token of some text such that the `n` tokens before it, in its text, equal the
    last `n` of the context, `min_match <= n <= max_match`. Contexts are hashed at the lengths `min_match`, four times
    that, and so on. Of the longest of these that has occurrences the `MAX_VOTES` latest are compared, and those with
    the longest match vote for the next token. The winner is drafted, the occurrences that agree with it go on to their
    next token and vote again. With two scopes look-ups may go over all groups.
    """

    def __init__(self, capacity: int, min_match: int, max_match: int, scopes: int) -> None:
        levels = [min_match]
        while 4 * levels[-1] <= max_match:
            levels.append(4 * levels[-1])
        columns = scopes * len(levels)
        # Untouched zero pages take no memory.
        self.rows = np.zeros((capacity, kernels.LINKS + columns), np.int32)
        self.heads = np.zeros(columns << (capacity - 1).bit_length(), np.int32)
        self.arrays = (self.rows, self.heads, np.array(levels, np.int32), scopes)
        """See `_lookup_kernels.Log`."""
        self.count = 0
        """Total of written tokens."""

    def write(self, text: np.ndarray, group: int, last: int, begin: int = 0) -> int:
        """Append `text[begin:]` (int32) after the row number `last` (-1: none). Returns the number of its last row."""
        self.count, last = kernels.write(self.arrays, self.count, text, begin, len(text), group, last)
        return last


class LookupProposer(BatchProposer):
    """Drafts by look-ups, on token ids of any vocabulary.

    The outputs of the run are in one `TokenLog`, each behind the end of its prompt, which is context only. An output
    that is opened again is written again. The arguments are keys of
    `drafters` (`config/schema.py`); `history_tokens`: None: the default of the method; 0: only a request's own text.
    """

    vocab_size: int | None = None
    scopes: int
    """1: outputs of the same prompt are searched. 2: also outputs of all prompts."""
    history: int
    """Default of `history_tokens`."""
    length_factor, min_probability = 0.0, 0.0
    """Most draft tokens per matched token (0: no limit); least estimated chance that a whole draft is right."""
    _by_row = (*BatchProposer._by_row, "_indexed", "_groups", "_lasts", "_written")

    def __init__(
        self, min_match: int = 2, max_match: int = 8, history_tokens: int | None = None, max_batch: int = 64
    ) -> None:
        super().__init__(max_batch)
        kept = self.history if history_tokens is None else history_tokens
        self._max_match, self._has_history = max_match, kept > 0
        self._log_shape = max(kept, 1), min_match, max_match, self.scopes
        self._log = TokenLog(*self._log_shape)
        self._indexed, self._groups, self._lasts, self._written = np.zeros((4, 0), np.int64)
        self._own_rows, self._own_heads = np.zeros((0, 0, 0), np.int32), np.zeros((0, 0), np.int32)
        """These six arrays: see `_lookup_kernels.Indexes`."""
        kernels.warm_up()

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        return cls(config.min_match, config.max_match, config.history_tokens, config.max_batch)

    def extend(self) -> np.ndarray:
        rows = np.flatnonzero(self._unanswered).astype(np.int32)
        self._unanswered[rows] = False
        placed = rows[self._placed[rows]]
        log, limits = self._log, (self._max_match, self.length_factor, self.min_probability)
        kernels.fill(self.view.texts, _INDEXES(self), log.arrays, log.count, *limits, placed)
        return rows

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        for request_id, prompt, tokens in outputs if self._has_history else ():
            text, row = np.concatenate([np.array(prompt, np.int32), tokens]), self._row_of(request_id)
            if row < 0:
                self._log.write(text, *self._begin_output(text[: len(prompt)]), len(prompt))
            elif self._groups[row] >= 0:  # its beginning is in the log
                begin = len(prompt) + int(self._written[row])
                self._log.write(text, int(self._groups[row]), int(self._lasts[row]), begin)
                self._groups[row] = -1

    def _row_of(self, request_id: str) -> int:
        """Row of a request with a place; -1 without one."""
        if not len(self._placed):  # before the first call
            return -1
        table = self.view.table
        row = table.row_of.get(request_id, -1)
        is_here = 0 <= row < len(self._placed) and self._generations[row] == table.generation[row]
        return row if is_here and self._placed[row] else -1

    def forget_history(self) -> None:
        """Clear the history; open requests add nothing to the new one."""
        self._log = TokenLog(*self._log_shape)
        self._groups[:] = -1

    @property
    def history_tokens(self) -> int:
        """Tokens of outputs, with the ends of their prompts, in the history."""
        return min(self._log.count, len(self._log.rows))

    def _enter(self, row: int) -> bool:
        self._indexed[row] = self._written[row] = 0
        prompt = self.view.prompt(row)
        self._groups[row], self._lasts[row] = self._begin_output(prompt) if self._has_history else (-1, -1)
        self._write(np.array([row], np.int32))
        return True

    def _advance(self, rows: np.ndarray, same: np.ndarray) -> None:
        self._write(rows[self._placed[rows]])

    def _begin_output(self, prompt: np.ndarray) -> tuple[int, int]:
        """Write the end of the prompt of a new output to the history. Returns its group and the number of the row."""
        group = crc32(prompt.tobytes()) >> 1
        return group, self._log.write(prompt[-self._max_match :], kernels.CONTEXT_ONLY, -1)

    def _write(self, rows: np.ndarray) -> None:
        """Add the newly committed tokens to the logs."""
        log, (have, width) = self._log, self.view.table.lines.shape
        if self._own_rows.shape[:2] != (have, width):  # the lines have grown: index all texts again
            columns = len(log.arrays[2])
            self._own_rows = np.zeros((have, width, kernels.LINKS + columns), np.int32)
            self._own_heads = np.zeros((have, columns * width), np.int32)
            self._indexed[:] = 0
            rows = np.append(np.flatnonzero(self._placed).astype(np.int32), rows)
        log.count = kernels.advance(self.view.texts, _INDEXES(self), log.arrays, log.count, rows)


_INDEXES = operator.attrgetter(*(f"_{name}" for name in kernels.Indexes._fields))


class NgramProposer(LookupProposer):
    """`ngram`: the request's own text and outputs of the same prompt; fills the window wherever there is a match.
    Prompt lookup decoding (Saxena, 2023) with the other samples of the prompt, as in SuffixDecoding."""

    method = "ngram"
    traits = BUILT_IN[method].traits
    scopes, history = 1, 1 << 16


class SuffixProposer(LookupProposer):
    """`suffix`: also all outputs of the run, with drafts as long as their estimated probability allows.

    SuffixDecoding (arXiv 2411.04975) over the many samples per prompt of reinforcement learning; recent outputs count
    more, as in DAS (arXiv 2511.13841).
    """

    method = "suffix"
    traits = BUILT_IN[method].traits
    scopes, history = 2, 1 << 20
    length_factor, min_probability = 2.0, 0.1
