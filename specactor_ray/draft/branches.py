"""Branches of a drafter's tails: outcomes of the verification under way that are drafted before it ends.

A main chain is what `MirrorTable` holds. A drafter that samples with the target's noise knows the second and the third
candidate of each position for this very draw; a branch is the main chain up to a position, then such a candidate and
what follows it. Where a commit refutes the main chain, the branch that agrees takes its place. SSD (arXiv 2603.03251)
drafts outcomes by their distribution; here they are those of the draw.

The worth of a branch is learned: how often each candidate is right, by the gap between the first and the second score.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from specactor_ray.draft import _branches_numba as kernels
from specactor_ray.draft._branches_numba import FREE as FREE
from specactor_ray.draft._branches_numba import GAPS as GAPS
from specactor_ray.draft._branches_numba import MAIN as MAIN
from specactor_ray.draft._branches_numba import RANKS as RANKS
from specactor_ray.draft.mirror import MirrorTable
from specactor_ray.messages import NO_BRANCHES, Branches, SamplingParams
from specactor_ray.ragged import enlarged

GAP_EDGES = np.array([0.1, 0.3, 0.7, 1.5, 3.0, 5.0, 8.0])
"""Ends of the ranges of gaps between scores (logits over temperature, plus noise)."""
UNKNOWN = np.zeros(0)
"""Seconds of forwards that were not measured."""
_FADE = 0.999
"""Weight that an observation loses with each message of commits."""


class Chains(NamedTuple):
    """What a forward drafts for: `n` chains."""

    slots: np.ndarray
    """int32 `(n,)`."""
    numbers: np.ndarray
    """int32 `(n,)`: `MAIN`, or the number of the branch."""
    begins: np.ndarray
    """int32 `(n,)`: for a branch that begins with this forward, the index in the line at which it leaves the main
    chain; else `FREE`."""

    def at(self, chosen: np.ndarray) -> Chains:
        """Those that bool `(n,)` chooses."""
        return Chains(*(column[chosen] for column in self))


def main_chains(slots: np.ndarray) -> Chains:
    """The main chains of slots."""
    return Chains(slots.astype(np.int32), *np.full((2, len(slots)), -1, np.int32))


class BranchTable:
    """Candidates of main chains and up to `most` branches of each slot, beside a `MirrorTable`.

    Rows of the drafter's cache are kept with the branches; what they are is up to the caller.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        slots, width = 0, 1
        self.ats = np.full((slots, most), FREE, np.int32)
        """int32 `(slots, most)`: index in the line at which the branch leaves the main chain; `FREE`: no branch."""
        self.lengths, self.ranks = np.zeros((2, slots, most), np.int32)
        """int32 `(slots, most)`: tokens; the candidate with which it begins, from 1."""
        self.rows = np.zeros((slots, most), np.int64)
        """int64 `(slots, most)`: rows of the cache."""
        self.tokens = np.zeros((slots, most, width), np.int32)
        # Candidates lie at their index in the line modulo `width`.
        self.others = np.zeros((slots, width, RANKS), np.int32)
        """int32 `(slots, width, RANKS)`: second and third candidate of each token of a main chain."""
        self.gaps = np.zeros((slots, width), np.int32)
        """int32 `(slots, width)`: range of the gap between the first two scores; `FREE`: unknown."""
        self.branch_others = np.zeros((slots, most, width, RANKS), np.int32)
        self.branch_gaps = np.zeros((slots, most, width), np.int32)
        self.opened = np.zeros((slots, width), np.int32)
        """int32 `(slots, width)`: bit `r`: a branch was opened with candidate `r + 1` of the main chain's token."""
        self.evidence = np.zeros((2, RANKS + 1, GAPS))
        """Hits and tries of each candidate where those before it were wrong, by range of the gap."""
        self.outcomes = np.zeros(2, np.int64)
        """Main chains that were refuted, and branches that took their place with tokens past the commit."""

    def fit(self, slots: int, window: int) -> np.ndarray:
        """Make room for `slots` slots with tails of `window` tokens. Where the width grows, all branches are dropped:
        returns their rows, int64."""
        (have, width), freed = self.gaps.shape, np.zeros(0, np.int64)
        if window + 1 > width:
            width, freed = 1 << window.bit_length(), self.close_all()
            for name, shape in (
                ("tokens", (have, self.most, width)), ("others", (have, width, RANKS)), ("gaps", (have, width)),
                ("branch_others", (have, self.most, width, RANKS)), ("branch_gaps", (have, self.most, width)),
                ("opened", (have, width)),
            ):  # fmt: skip
                setattr(self, name, np.zeros(shape, np.int32))
            self.gaps[:] = FREE
        if slots > have:
            for name in kernels.Planes._fields[:-1]:
                setattr(self, name, enlarged(getattr(self, name), 0, slots))
            self.ats[have:], self.gaps[have:] = FREE, FREE
        return freed

    def settle(
        self,
        mirrors: MirrorTable,
        main_rows: np.ndarray,
        slots: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> np.ndarray:
        """Hold the branches against commits, right before `MirrorTable.commit` of the same ones.

        Args:
            main_rows: int64 `(slots,)`: rows of the main chains, updated where a branch takes the place of one.
            slots, starts, lengths, tokens: As in `Proposer.commit`.

        Returns:
            Rows that are free now, int64.
        """
        arrays = [np.array(array, np.int32) for array in (slots, starts, lengths, tokens)]
        freed: np.ndarray
        freed = kernels.settle(self._planes, _lines(mirrors), _FADE, main_rows, *arrays, self.outcomes)
        return freed

    def release(self, slots: np.ndarray | int) -> np.ndarray:
        """Drop the branches and candidates of slots. Returns their rows, int64."""
        freed: np.ndarray = kernels.release(self._planes, np.atleast_1d(np.asarray(slots, np.int64)))
        return freed

    def plan(
        self,
        mirrors: MirrorTable,
        slots: np.ndarray,
        limits: np.ndarray,
        budget: int,
        tips: np.ndarray | None = None,
        forward_s: np.ndarray = UNKNOWN,
    ) -> Chains:
        """The chains of the next forward: of the main chains of `slots` that have room below `limits` (`(n,)` each) and
        their branches the `budget` most likely ones, main chains first. Branches that begin have one token, and no
        row. `tips`: as in `append`. `forward_s`: float64 `(k,)`, seconds of a forward with 0, 1, ... chains; where
        known, only as many chains as bring most needed tokens per second."""
        arrays = np.asarray(slots, np.int64), np.asarray(limits, np.int64)
        chosen = kernels.plan(self._planes, _lines(mirrors, tips), *arrays, budget, forward_s)
        return Chains(*chosen[:3, kernels.open_branches(self._planes, chosen)])

    def ends(self, chains: Chains, tips: np.ndarray) -> np.ndarray:
        """int64 `(n,)`: index in the line of the next token of each chain. `tips`: as in `append`."""
        ends, branch = tips[chains.slots].astype(np.int64), chains.numbers != MAIN
        at = chains.slots[branch], chains.numbers[branch]
        ends[branch] = self.ats[at] + self.lengths[at]
        return ends

    def newest(self, slots: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """int32 `(n,)`: the last token of each branch."""
        tokens: np.ndarray = self.tokens[slots, numbers, self.lengths[slots, numbers] - 1]
        return tokens

    def close_all(self) -> np.ndarray:
        """Give up all branches; they are not opened again. Returns their rows, int64."""
        rows: np.ndarray = self.rows[self.ats != FREE]
        self.ats[:] = FREE
        return rows

    def close(self, slot: int, number: int) -> None:
        """Give up a branch that has no row."""
        self.ats[slot, number] = FREE

    def append(
        self,
        mirrors: MirrorTable,
        slots: np.ndarray,
        numbers: np.ndarray,
        tokens: np.ndarray,
        gaps: np.ndarray,
        tips: np.ndarray | None = None,
    ) -> np.ndarray:
        """Append the token that each chain drafted, int32 `(n,)` each; chains that were given up are passed over.

        Args:
            tokens: int32 `(n, 1 + RANKS)`: that token and the other candidates, -1 where there is none.
            gaps: int32 `(n,)`: see `ranges_of`.
            tips: int32 `(slots,)`, updated: where main chains are drafted on. From there to the ends of the tails they
                are drafted again: another token replaces the rest. None: at the ends.

        Returns:
            bool `(n,)`: False where a tail is what it was.
        """
        tips = mirrors.ends if tips is None else tips
        changed: np.ndarray = kernels.append(self._planes, _lines(mirrors), tips, slots, numbers, tokens, gaps)
        return changed

    def published(self, mirrors: MirrorTable, slots: np.ndarray) -> Branches:
        """Branches of the tails of these slots that have two tokens or more: the target finds the first one itself."""
        if not len(slots):
            return NO_BRANCHES
        return Branches(*kernels.published(self._planes, mirrors.known, mirrors.ends, np.asarray(slots, np.int32)))

    @property
    def _planes(self) -> kernels.Planes:
        return kernels.Planes(*(getattr(self, name) for name in kernels.Planes._fields))


def ranges_of(gaps: np.ndarray) -> np.ndarray:
    """int32: range of each gap between the first and the second score."""
    ranges: np.ndarray = GAP_EDGES.searchsorted(gaps).astype(np.int32)
    return ranges


def _lines(mirrors: MirrorTable, ends: np.ndarray | None = None) -> kernels.Lines:
    ends = mirrors.ends if ends is None else ends
    return kernels.Lines(mirrors.lines, mirrors.prompts, mirrors.known, ends, mirrors.judged)


@functools.cache
def warm_up() -> None:
    """Compile or load the kernels."""
    table, mirrors, zero = BranchTable(1), MirrorTable(), np.zeros(1, np.int32)
    mirrors.open(0, (1,), (), SamplingParams(), 4)
    table.fit(1, 4)
    table.append(mirrors, zero, zero + MAIN, np.ones((1, 1 + RANKS), np.int32), zero)
    table.plan(mirrors, zero, zero + 5, 4)
    table.settle(mirrors, np.zeros(1, np.int64), zero, zero, zero + 1, zero + 2)
    table.published(mirrors, zero)
    table.release(zero)
