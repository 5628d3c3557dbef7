"""Chains of a drafter: the main chain of each request, and branches for other outcomes of the verification under way.

A main chain is the text of a row: prompt, committed output, tail. A drafter that samples with the target's
noise has the next best candidates of each position for this very draw; a branch is the main chain up to a position,
then such a candidate and its continuation. Where a commit refutes the main chain, the branch that agrees takes its
place. How often each candidate is right is learned by the gap between the first and the second score. SSD (arXiv
2603.03251) drafts outcomes by their distribution; here they are those of the draw.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import numpy as np

from specactor_ray.core.ragged import grow
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft import _kernels as kernels
from specactor_ray.draft._kernels import FREE, GAPS, MAIN, RANKS
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView

__all__ = ["FREE", "GAPS", "MAIN", "RANKS"]  # names of `_kernels` for other modules
GAP_EDGES = np.array([0.1, 0.3, 0.7, 1.5, 3.0, 5.0, 8.0])
"""Ends of the ranges of gaps between scores (logits over temperature, plus noise)."""
UNKNOWN = np.zeros(0)
"""Seconds of forwards without a measurement."""


class Chains(NamedTuple):
    """Chains of a forward: int32 `(n,)` each."""

    rows: np.ndarray
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
    """Candidates of the main chains in a table of requests, and up to `most` branches of each row.

    Rows of the drafter's cache are kept with the branches; the caller defines their meaning. `gaps` and `others` have
    one more place than branches: that of the main chain, the last one. Both are stored at their index in the line
    modulo `width`. `tips`, int32 `(rows,)`, are indices in the line at which each main chain is extended: from there
    to the end of the tail it is drafted again, and another token replaces the rest.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.ats, self.lengths, self.ranks = np.zeros((3, 0, most), np.int32)
        """`(rows, most)`: index in the line at which the branch leaves the main chain (`FREE`: no branch); its tokens;
        the candidate with which it begins, from 1. `rows`: rows of the cache."""
        self.rows = np.zeros((0, most), np.int64)
        self.tokens = np.zeros((0, most, 1), np.int32)
        """`(rows, most, width)`: tokens of the branches."""
        self.others = np.zeros((0, most + 1, 1, RANKS), np.int32)
        """`(rows, most + 1, width, RANKS)`: candidates from the second on of each token. `gaps`, `(rows, most + 1,
        width)`: range of the gap between the first two scores; `FREE`: unknown."""
        self.gaps = np.zeros((0, most + 1, 1), np.int32)
        self.opened = np.zeros((0, 1), np.int32)
        """`(rows, width)`: bit `r`: a branch was opened with candidate `r + 1` of the main chain's token."""
        self.evidence = np.zeros((2, RANKS + 1, GAPS))
        """Hits and tries of each candidate where those before it were wrong, by range of the gap."""
        self.arrays = _BRANCHES(self)

    def fit(self, rows: int, window: int) -> np.ndarray:
        """Make room for tails of `window` tokens. If the width grows, all branches end; returns their rows."""
        (have, width), freed = self.opened.shape, np.zeros(0, np.int64)
        if window + 1 > width:
            width, freed = 1 << window.bit_length(), self.close_all()
            self.tokens = np.zeros((have, self.most, width), np.int32)
            self.others = np.zeros((have, self.most + 1, width, RANKS), np.int32)
            self.gaps = np.full((have, self.most + 1, width), FREE, np.int32)
            self.opened = np.zeros((have, width), np.int32)
        if rows > have:
            grow(self, kernels.BranchArrays._fields[:-1], rows)
            self.ats[have:], self.gaps[have:] = FREE, FREE
        self.arrays = _BRANCHES(self)
        return freed

    def settle(
        self, view: TableView, cache_rows: np.ndarray, rows: np.ndarray, befores: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Compare the branches of rows with the tokens committed since the last call, int32 `(n,)` each: rows, and the
        numbers of tokens of line, and of line and tail, that they had then. `cache_rows`, int64 `(rows,)`, change where
        a branch takes the place of a main chain. Returns freed rows of the cache."""
        freed: np.ndarray = kernels.settle(self.arrays, view.texts, cache_rows, rows, befores, ends)
        return freed

    def release(self, rows: np.ndarray | int) -> np.ndarray:
        """Drop the branches and candidates of rows. Returns their rows of the cache."""
        rows = np.atleast_1d(rows)
        freed: np.ndarray = self.rows[rows][self.ats[rows] != FREE]
        self.ats[rows], self.gaps[rows, MAIN], self.opened[rows] = FREE, FREE, 0
        return freed

    def plan(
        self,
        view: TableView,
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

        `reading`, `ahead`, bool `(rows,)`: rows that read first, and rows whose chains are extended. `backlogs`,
        int64 `(rows,)`: tokens that a main chain reads, at least 1. `longest`: most tokens of a line. `forward_s`,
        float64 `(budget + 1,)`: seconds of a forward with 0, 1, ... chains; if given, only as many chains are taken as
        give the most needed tokens per second.
        """
        masks = reading, ahead, backlogs
        return Chains(*kernels.plan(self.arrays, view.texts, tips, longest, forward_s, *masks, budget))

    def read(
        self,
        view: TableView,
        tips: np.ndarray,
        origins: np.ndarray,
        cached: np.ndarray,
        chains: Chains,
        cache_rows: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens that chains read, int32 `(sum of counts,)`; by chain the index in the line of the next token, and
        whether all tokens before that one are then read. int64: `origins` `(rows,)`, index in the line of the first
        token in the cache; `cached`, tokens of each row of the cache; `cache_rows` `(n,)`, that of each chain."""
        rows, numbers, _, counts = chains
        found: tuple[np.ndarray, np.ndarray, np.ndarray]
        found = kernels.read(self.arrays, view.texts, tips, origins, cached, rows, numbers, counts, cache_rows)
        return found

    def close_all(self) -> np.ndarray:
        """Give up all branches; they are not opened again. Returns their rows."""
        rows: np.ndarray = self.rows[self.ats != FREE]
        self.ats[:] = FREE
        return rows

    def close(self, row: int, number: int) -> None:
        """Give up a branch that has no row of the cache."""
        self.ats[row, number] = FREE

    def append(
        self, view: TableView, tips: np.ndarray, chains: Chains, tokens: np.ndarray, gaps: np.ndarray
    ) -> np.ndarray:
        """Append the token that each chain drafted, and update `tips`; chains that were given up are left out.
        `tokens`, int32 `(n, 1 + RANKS)`, or `(n, 1)` without branches: that token and the other candidates, -1 where
        there is none; `gaps`: see `ranges_of`. Returns bool `(n,)`: False where a tail did not change."""
        changed: np.ndarray
        changed = kernels.append(self.arrays, view.texts, tips, chains.rows, chains.numbers, tokens, gaps)
        return changed

    def publish(self, view: TableView, rows: np.ndarray) -> None:
        """Write the branches of two tokens or more behind the main tails: the target finds the first token itself."""
        if self.most:
            kernels.publish(self.arrays, view.texts, rows)


_BRANCHES = operator.attrgetter(*kernels.BranchArrays._fields)


def ranges_of(gaps: np.ndarray) -> np.ndarray:
    """int32: range of each gap between the first and the second score."""
    ranges: np.ndarray = GAP_EDGES.searchsorted(gaps).astype(np.int32)
    return ranges


@functools.cache
def compile_kernels() -> None:
    """Compile or load the kernels of chains that a model extends."""
    requests, zero, long = RequestTable(4, branches=1), np.zeros(1, np.int32), np.zeros(1, np.int64)
    requests.open(TargetRequest("", (1,), SamplingParams()))
    view, table = TableView(requests, 0, 4), BranchTable(1)
    table.fit(len(requests.lengths), 4)
    mask, tips, many = np.arange(len(requests.lengths)) == 0, view.ends, np.ones(len(requests.lengths), np.int64)
    chains = table.plan(view, tips, ~mask, mask, many, 4)
    table.read(view, tips, many, long, chains, long)
    table.append(view, tips, chains, np.ones((1, 1 + RANKS), np.int32), zero)
    table.publish(view, zero)
    requests.follow(zero, zero, zero + 1, zero + 2)
    table.settle(view, many, zero, zero + 1, zero + 2)
