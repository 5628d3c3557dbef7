"""Mirrors of requests by slot of a proposer: committed tokens and the tail after them.

Commits may be repeated, late or overlapping.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np

from specactor_ray.core.ragged import enlarged
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft import _mirror_numba as kernels
from specactor_ray.draft.proposer import Tails

_MOST = 2**31 - 1


class MirrorTable:
    """One line of tokens per slot: prompt, committed output, tail."""

    def __init__(self) -> None:
        self.lines = np.zeros((0, 0), np.int32)
        """int32 `(slots, width)` tokens; an open line has room for its committed tokens and a whole tail."""
        self.prompts = np.zeros(0, np.int32)
        """int32 `(slots,)`: tokens of the prompt. `known`, `ends`, `windows` and `lasts` have this type and shape."""
        self.known = np.zeros(0, np.int32)
        """Tokens of prompt and committed output; -1: the slot is not open."""
        self.ends = np.zeros(0, np.int32)
        """Tokens of prompt, committed output and tail."""
        self.windows = np.zeros(0, np.int32)
        """Most tokens per tail."""
        self.lasts = np.zeros(0, np.int32)
        """Tokens of prompt and output at which `max_tokens` ends the output."""
        self.judged = np.zeros(2, np.int64)
        """See `Proposer.judged`."""
        self.arrays = _LINES(self)
        """All of these arrays, for kernels."""

    def is_open(self, slot: int) -> bool:
        return slot < len(self.known) and bool(self.known[slot] >= 0)

    @property
    def limits(self) -> np.ndarray:
        """int32 `(slots,)`: index in the line at which each tail ends at the latest, by window and `max_tokens`; -1
        where nothing is open."""
        limits: np.ndarray = np.minimum(self.known + self.windows, self.lasts)
        return limits

    def prompt(self, slot: int) -> np.ndarray:
        """The prompt, int32, a view."""
        return self.lines[slot, : self.prompts[slot]]

    def committed(self, slot: int) -> np.ndarray:
        """The final output tokens, int32, a view."""
        return self.lines[slot, self.prompts[slot] : self.known[slot]]

    def open(
        self, slot: int, prompt: Sequence[int], committed: Sequence[int], sampling: SamplingParams, window: int
    ) -> None:
        tokens = np.array([*prompt, *committed], np.int32)  # raises before any change
        begin, known = len(prompt), len(tokens)
        self._fit(slot + 1, known + window)
        self.lines[slot, :known] = tokens
        self.prompts[slot], self.windows[slot] = begin, window
        self.lasts[slot] = min(begin + sampling.max_tokens, _MOST)
        self.known[slot] = self.ends[slot] = known

    def close(self, slot: int) -> None:
        self.prompts[slot] = self.windows[slot] = 0
        self.known[slot] = self.ends[slot] = self.lasts[slot] = -1

    def commit(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Proposer.commit`; a tail that disagrees is dropped as a whole.

        Returns:
            int32 `(n,)` each: the token up to which the line, tail included, is unchanged (-1: the commit does not fit
            and changed nothing); new output tokens.
        """
        # Copies: kernels are compiled for writable arrays, and those of a message may be read-only.
        slots, starts, lengths, tokens = (np.array(array, np.int32) for array in (slots, starts, lengths, tokens))
        self._fit(0, kernels.reach(self.arrays, slots, starts, lengths, len(tokens)))
        same: np.ndarray
        same, fresh = kernels.commit(self.arrays, slots, starts, lengths, tokens)
        return same, fresh

    def lengthen(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to a tail, up to its limit.

        Raises:
            TypeError: The tokens are not integers.
            ValueError: A token does not fit into an int32.
        """
        tokens = np.asarray(tokens)
        if len(tokens) and tokens.dtype.kind not in "iu":
            raise TypeError(f"guesses are token ids, not {tokens.dtype}")
        begin = int(self.ends[slot])
        tokens = tokens[: max(int(self.limits[slot]) - begin, 0)]
        if len(tokens) and tokens.dtype != np.int32 and int(tokens.max()) > _MOST:
            raise ValueError(f"guesses are token ids, not {tokens.max()}")
        self.lines[slot, begin : begin + len(tokens)] = tokens
        self.ends[slot] = begin + len(tokens)

    def tails(self, slots: np.ndarray) -> Tails:
        return Tails(*kernels.tails(self.arrays, np.asarray(slots, np.int32)))

    def _fit(self, slots: int, width: int) -> None:
        """Grow to at least `slots` lines of `width` tokens by doubling."""
        have, wide = self.lines.shape
        if slots <= have and width <= wide:
            return
        slots, width = _doubled(have, slots), _doubled(wide, width)
        old, self.lines = self.lines, np.zeros((slots, width), np.int32)
        for slot, end in enumerate(self.ends.tolist()):  # pages behind the ends stay untouched
            if end > 0:
                self.lines[slot, :end] = old[slot, :end]
        for name, closed in (("prompts", 0), ("known", -1), ("ends", -1), ("windows", 0), ("lasts", -1)):
            setattr(self, name, enlarged(getattr(self, name), 0, slots))
            getattr(self, name)[have:] = closed
        self.arrays = _LINES(self)


_LINES = operator.attrgetter(*kernels.Lines._fields)


def _doubled(have: int, wanted: int) -> int:
    return have if wanted <= have else 1 << (wanted - 1).bit_length()


@functools.cache
def warm_up() -> None:
    """Compile or load the kernels."""
    table, zero = MirrorTable(), np.zeros(1, np.int32)
    table.open(0, (1,), (), SamplingParams(), 1)
    table.commit(zero, zero, zero, zero[:0])
    table.tails(zero)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
