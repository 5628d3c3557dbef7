"""Chains of a drafter: the main chain of each request, and branches for other outcomes of the verification under way.

The main chains are the lines of `MirrorTable`: prompt, committed output, tail. A drafter that samples with the target's
noise has the next best candidates of each position for this very draw; a branch is the main chain up to a position,
then such a candidate and its continuation. Where a commit refutes the main chain, the branch that agrees takes its
place. How often each candidate is right is learned by the gap between the first and the second score. SSD (arXiv
2603.03251) drafts outcomes by their distribution; here they are those of the draw.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specactor_ray.core.ragged import grow
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft import _kernels as kernels
from specactor_ray.draft._kernels import FREE, GAPS, MAIN, RANKS
from specactor_ray.draft.proposer import Tails

__all__ = ["FREE", "GAPS", "MAIN", "RANKS"]  # names of `_kernels` for other modules
GAP_EDGES = np.array([0.1, 0.3, 0.7, 1.5, 3.0, 5.0, 8.0])
"""Ends of the ranges of gaps between scores (logits over temperature, plus noise)."""
UNKNOWN = np.zeros(0)
"""Seconds of forwards without a measurement."""
_MOST = 2**31 - 1
_BY_SLOT = ("prompts", "known", "ends", "windows", "lasts")


class MirrorTable:
    """One line of tokens per slot: prompt, committed output, tail."""

    def __init__(self) -> None:
        self.lines = np.zeros((0, 0), np.int32)
        """int32 `(slots, width)` tokens; an open line has room for its committed tokens and a whole tail."""
        self.prompts, self.known, self.ends, self.windows, self.lasts = np.zeros((5, 0), np.int32)
        """int32 `(slots,)`, -1 where nothing is open: tokens of the prompt; of prompt and committed output; of these
        and the tail; most tokens of the tail; most tokens of prompt and output."""
        self.judged = np.zeros(2, np.int64)
        """See `Proposer.judged`."""
        self.arrays = _LINES(self)
        """All of these arrays, for kernels."""

    def is_open(self, slot: int) -> bool:
        return slot < len(self.known) and bool(self.known[slot] >= 0)

    @property
    def limits(self) -> np.ndarray:
        """int32 `(slots,)`: index in the line at which each tail ends at the latest; negative where nothing is open."""
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
        for name in _BY_SLOT:
            getattr(self, name)[slot] = -1

    def commit(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Proposer.commit`; a tail that disagrees is dropped as a whole. Returns int32 `(n,)` each: the token up
        to which the line, tail included, is unchanged (-1: the commit does not fit); new output tokens."""
        # Copies: kernels are compiled for writable arrays, and those of a message may be read-only.
        slots, starts, lengths, tokens = (np.array(array, np.int32) for array in (slots, starts, lengths, tokens))
        self._fit(0, kernels.reach(self.arrays, slots, starts, lengths, len(tokens)))
        same: np.ndarray
        same, fresh = kernels.commit(self.arrays, slots, starts, lengths, tokens)
        return same, fresh

    def lengthen(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to a tail, up to its limit. Raises TypeError or ValueError if they are no int32 token ids."""
        tokens = np.asarray(tokens)
        if len(tokens) and tokens.dtype.kind not in "iu":
            raise TypeError(f"guesses are token ids, not {tokens.dtype}")
        begin = int(self.ends[slot])
        tokens = tokens[: max(int(self.limits[slot]) - begin, 0)]
        if len(tokens) and tokens.dtype != np.int32 and int(tokens.max()) > _MOST:
            raise ValueError(f"guesses are token ids, not {tokens.max()}")
        self.lines[slot, begin : begin + len(tokens)] = tokens
        self.ends[slot] = begin + len(tokens)

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
        grow(self, _BY_SLOT, slots, fill=-1)
        self.arrays = _LINES(self)


class Chains(NamedTuple):
    """Chains of a forward: int32 `(n,)` each."""

    slots: np.ndarray
    numbers: np.ndarray
    """`MAIN`, or the number of the branch."""
    begins: np.ndarray
    """Index in the line at which a branch that begins with this forward leaves the main chain, else `FREE`."""
    counts: np.ndarray
    """Tokens that each chain reads, at least 1; a branch reads one."""

    def at(self, chosen: np.ndarray) -> Chains:
        """The chains chosen by bool `(n,)`."""
        return Chains(*(column[chosen] for column in self))


class BranchTable:
    """Candidates of the main chains in `mirrors`, and up to `most` branches of each slot.

    Rows of the drafter's cache are kept with the branches; the caller defines their meaning. `gaps` and `others` have
    one more place than branches: that of the main chain, the last one. Both are stored at their index in the line
    modulo `width`. `tips`, int32 `(slots,)`, are indices in the line at which each main chain is extended: from there
    to the end of the tail it is drafted again, and another token replaces the rest.
    """

    def __init__(self, mirrors: MirrorTable, most: int) -> None:
        self.most, self._mirrors = most, mirrors
        self.ats, self.lengths, self.ranks = np.zeros((3, 0, most), np.int32)
        """`(slots, most)`: index in the line at which the branch leaves the main chain (`FREE`: no branch); its tokens;
        the candidate with which it begins, from 1. `rows`: rows of the cache."""
        self.rows = np.zeros((0, most), np.int64)
        self.tokens = np.zeros((0, most, 1), np.int32)
        """`(slots, most, width)`: tokens of the branches."""
        self.others = np.zeros((0, most + 1, 1, RANKS), np.int32)
        """`(slots, most + 1, width, RANKS)`: candidates from the second on of each token. `gaps`, `(slots, most + 1,
        width)`: range of the gap between the first two scores; `FREE`: unknown."""
        self.gaps = np.zeros((0, most + 1, 1), np.int32)
        self.opened = np.zeros((0, 1), np.int32)
        """`(slots, width)`: bit `r`: a branch was opened with candidate `r + 1` of the main chain's token."""
        self.evidence = np.zeros((2, RANKS + 1, GAPS))
        """Hits and tries of each candidate where those before it were wrong, by range of the gap."""
        self.arrays = _PLANES(self)

    def fit(self, slots: int, window: int) -> np.ndarray:
        """Make room for tails of `window` tokens. If the width grows, all branches end; returns their rows."""
        (have, width), freed = self.opened.shape, np.zeros(0, np.int64)
        if window + 1 > width:
            width, freed = 1 << window.bit_length(), self.close_all()
            self.tokens = np.zeros((have, self.most, width), np.int32)
            self.others = np.zeros((have, self.most + 1, width, RANKS), np.int32)
            self.gaps = np.full((have, self.most + 1, width), FREE, np.int32)
            self.opened = np.zeros((have, width), np.int32)
        if slots > have:
            grow(self, kernels.Planes._fields[:-1], slots)
            self.ats[have:], self.gaps[have:] = FREE, FREE
        self.arrays = _PLANES(self)
        return freed

    def settle(self, main_rows: np.ndarray, *commits: np.ndarray) -> np.ndarray:
        """Compare the branches with commits (see `Proposer.commit`), right before `MirrorTable.commit` of the same.
        `main_rows`, int64 `(slots,)`, change where a branch takes the place of a main chain. Returns freed rows."""
        arrays = [np.array(array, np.int32) for array in commits]
        freed: np.ndarray = kernels.settle(self.arrays, self._mirrors.arrays, main_rows, *arrays)
        return freed

    def release(self, slots: np.ndarray | int) -> np.ndarray:
        """Drop the branches and candidates of slots. Returns their rows."""
        slots = np.atleast_1d(slots)
        freed: np.ndarray = self.rows[slots][self.ats[slots] != FREE]
        self.ats[slots], self.gaps[slots, MAIN], self.opened[slots] = FREE, FREE, 0
        return freed

    def plan(
        self,
        tips: np.ndarray,
        reading: np.ndarray,
        ahead: np.ndarray,
        backlogs: np.ndarray,
        budget: int,
        longest: int = 2**31 - 1,
        forward_s: np.ndarray = UNKNOWN,
    ) -> Chains:
        """Choose up to `budget` chains of the next forward: main chains of `ahead`, then main chains of `reading` with
        the fewest tokens to read first, then branches of `ahead`. Main chains with room in their tails are taken in any
        case, other chains by the chance that their next token is needed. New branches have one token and no row.

        `reading`, `ahead`, bool `(slots,)`: slots that read first, and slots whose chains are extended. `backlogs`,
        int64 `(slots,)`: tokens that a main chain reads, at least 1. `longest`: most tokens of a line. `forward_s`,
        float64 `(budget + 1,)`: seconds of a forward with 0, 1, ... chains; if given, only as many chains are taken as
        give the most needed tokens per second.
        """
        slots = reading, ahead, backlogs
        return Chains(*kernels.plan(self.arrays, self._mirrors.arrays, tips, longest, forward_s, *slots, budget))

    def read(
        self, tips: np.ndarray, origins: np.ndarray, cached: np.ndarray, chains: Chains, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens that chains read, int32 `(sum of counts,)`; by chain the index in the line of the next token, and
        whether all tokens before that one are then read. int64: `origins` `(slots,)`, index in the line of the first
        token in the cache; `cached`, tokens of each row of the cache; `rows` `(n,)`, row of each chain."""
        (slots, numbers, _, counts), mirror = chains, self._mirrors.arrays
        found: tuple[np.ndarray, np.ndarray, np.ndarray]
        found = kernels.read(self.arrays, mirror, tips, origins, cached, slots, numbers, counts, rows)
        return found

    def close_all(self) -> np.ndarray:
        """Give up all branches; they are not opened again. Returns their rows."""
        rows: np.ndarray = self.rows[self.ats != FREE]
        self.ats[:] = FREE
        return rows

    def close(self, slot: int, number: int) -> None:
        """Give up a branch that has no row."""
        self.ats[slot, number] = FREE

    def append(self, tips: np.ndarray, chains: Chains, tokens: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        """Append the token that each chain drafted, and update `tips`; chains that were given up are left out.
        `tokens`, int32 `(n, 1 + RANKS)`, or `(n, 1)` without branches: that token and the other candidates, -1 where
        there is none; `gaps`: see `ranges_of`. Returns bool `(n,)`: False where a tail did not change."""
        changed: np.ndarray
        changed = kernels.append(self.arrays, self._mirrors.arrays, tips, chains.slots, chains.numbers, tokens, gaps)
        return changed

    def tails(self, slots: np.ndarray) -> Tails:
        """Main chains of these slots, each with its branches of two tokens or more: the target finds the first token
        itself."""
        return Tails(*kernels.tails(self.arrays, self._mirrors.arrays, np.asarray(slots, np.int32)))


_LINES = operator.attrgetter(*kernels.Lines._fields)
_PLANES = operator.attrgetter(*kernels.Planes._fields)


def _doubled(have: int, wanted: int) -> int:
    return have if wanted <= have else 1 << (wanted - 1).bit_length()


def ranges_of(gaps: np.ndarray) -> np.ndarray:
    """int32: range of each gap between the first and the second score."""
    ranges: np.ndarray = GAP_EDGES.searchsorted(gaps).astype(np.int32)
    return ranges


@functools.cache
def compile_kernels(branches: bool) -> None:
    """Compile or load the kernels of mirrors, or also those of chains that a model extends."""
    mirrors, zero, long = MirrorTable(), np.zeros(1, np.int32), np.zeros(1, np.int64)
    mirrors.open(0, (1,), (), SamplingParams(), 4)
    mirrors.commit(zero, zero, zero, zero[:0])
    table = BranchTable(mirrors, 1)
    table.fit(1, 4)
    table.tails(zero)
    if branches:
        chains = table.plan(mirrors.ends, zero > 0, zero == 0, long + 1, 4)
        table.read(mirrors.ends, long, long, chains, long)
        table.append(mirrors.ends, chains, np.ones((1, 1 + RANKS), np.int32), zero)
        table.settle(long, zero, zero, zero + 1, zero + 2)
