"""What proposers with a model share: cache rows of the requests they draft for, the loop over forwards, sampling."""

from __future__ import annotations

import abc

import numpy as np
import torch

from specactor_ray.draft import branches as branching
from specactor_ray.draft.branches import FREE, MAIN, BranchTable, Chains, main_chains, ranges_of
from specactor_ray.draft.proposer import Tails
from specactor_ray.draft.slots import SlotProposer
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.sampling.candidates import MOST, Candidates, candidates
from specactor_ray.sampling.candidates import warm_up as warm_up_candidates
from specactor_ray.sampling.keyed import own_noise, verify_arrays, warm_up
from specactor_ray.sampling.rules import Rules

_MAX_STEP_TOKENS = 512
"""Most positions in one forward; a long prompt is read in chunks of this size."""
_FIRST_RESERVATION = 128


class ModelProposer(SlotProposer):
    """Implements `Proposer` by forwards of several requests.

    Args:
        cache: Cache of the model; owned by the proposer.
        dtype: Of the logits.
        vocab_size: Of the logits.
        max_positions: Longest sequence of the model.
        max_batch: Most requests drafted for at once; others are answered with empty tails until one ends.
        shared_noise: Sample with the target's noise, else with independent noise.
        branches: Most branches of a request.
    """

    _by_slot = (*SlotProposer._by_slot, "_rows", "_origins")

    def __init__(
        self,
        cache: PagedCache,
        dtype: torch.dtype,
        vocab_size: int,
        max_positions: int,
        max_batch: int,
        shared_noise: bool,
        branches: int = 0,
    ) -> None:
        super().__init__(max_batch)
        self.branches = BranchTable(branches)
        self._cache, self._shared_noise = cache, shared_noise
        self.vocab_size: int | None = vocab_size
        self.max_len = min(max_positions, cache.slots)
        self._rules = Rules(0, cache.device)
        """Sampling rules by slot; positions are those of the lines."""
        self._rows, self._origins = np.zeros((2, 0), np.int64)
        """int64 `(slots,)`, of the requests that have a place: rows in the cache; index in the line of the token that
        the first entry of the row has read."""
        warm_up(cache.device, dtype)
        branching.warm_up()
        if branches:
            warm_up_candidates(cache.device, dtype)

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if self.branches.most:
            self._cache.free_rows(self.branches.settle(self.mirrors, self._rows, slots, starts, lengths, tokens))
        return super().commit(slots, starts, lengths, tokens)

    def tails(self, slots: np.ndarray) -> Tails:
        tails = super().tails(slots)
        return tails._replace(branches=self.branches.published(self.mirrors, slots)) if self.branches.most else tails

    @property
    def _tips(self) -> np.ndarray:
        """int32 `(slots,)`: where main chains are drafted on, see `BranchTable.append`."""
        return self.mirrors.ends

    @property
    @abc.abstractmethod
    def _backlogs(self) -> np.ndarray:
        """int `(slots,)`: tokens that the main chain reads before its next one is drafted, at least 1."""

    @abc.abstractmethod
    def _ready(self) -> Chains:
        """Chains that a forward can draft for, main chains first, the most urgent ones first."""

    @abc.abstractmethod
    def _run(
        self, chains: Chains, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Read `counts` tokens of each chain into its row of the cache.

        Returns:
            bool `(n,)`: chains that have read all their tokens; logits of their next ones.
        """

    def extend(self) -> np.ndarray:
        self.rows_drafted, again = 0, False
        while True:
            chains, answered = self._ready(), self._unanswered.copy()
            answered[chains.slots] = False  # the others have no more guesses
            if len(chains.slots):
                answered[self._forward(chains)] = True
            found = np.flatnonzero(answered)
            self._unanswered[found] = False
            if len(found) or not len(chains.slots):
                self.rows_drafted *= not again
                return found.astype(np.int32)
            again = True

    def _plan(self, reading: np.ndarray, ahead: np.ndarray) -> Chains:
        """Chains of the next forward where the slots `reading` have to read first and the slots `ahead` can draft on,
        bool `(slots,)` each: main chains, the fewer tokens to read the earlier; the likeliest branches of `ahead`."""
        tips, limits = self._tips, np.minimum(self.mirrors.limits, self.max_len)
        room, (slots,) = tips < limits, np.nonzero(ahead)
        late, running = np.flatnonzero(reading & room), slots[room[slots]]
        late = late[np.argsort(self._backlogs[late], kind="stable")]
        if not self.branches.most or self.budget <= len(late):
            return main_chains(np.concatenate([running, late]))
        budget, forward_s = self.budget - len(late), self.forward_s[len(late) :]
        chains = self.branches.plan(self.mirrors, slots, limits[slots], budget, tips, forward_s)
        mains, behind = np.count_nonzero(chains.numbers == MAIN), zip(chains, main_chains(late), strict=True)
        return Chains(*(np.insert(column, mains, more) for column, more in behind))

    def _forward(self, chains: Chains) -> np.ndarray:
        """Run one forward of the chains that fit. Returns slots with changed tails, and slots that cannot go on."""
        rows = self._rows_of(chains)
        counts = np.where(chains.numbers == MAIN, self._backlogs[chains.slots], 1)
        chains, rows, counts = self._reserve(chains, rows, counts)
        slots, branch = chains.slots, chains.numbers != MAIN
        if not len(slots):
            return slots
        tokens = self.mirrors.tokens(slots, self._origins[slots] + self._cache.lengths[rows], counts)
        if branch.any():
            tokens[np.cumsum(counts)[branch] - 1] = self.branches.newest(slots[branch], chains.numbers[branch])
        complete, logits = self._run(chains, rows, counts, tokens)
        self.rows_drafted = len(rows) if (counts == 1).all() else 0
        return self._draw(chains.at(complete), logits)

    def _enter(self, slot: int, late: bool) -> bool:
        tokens = min(int(self.mirrors.known[slot]) + _FIRST_RESERVATION, self.max_len)
        row = self._cache.open(tokens)
        if row is None:
            self._drop_branches()
            row = self._cache.open(tokens)
        if row is None:
            return False
        self._rows[slot] = row
        sampling = self.samplings[slot] if self._shared_noise else own_noise(self.samplings[slot])
        self._rules.write([slot], [sampling], [-int(self.mirrors.prompts[slot])])
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        self._cache.free_rows(np.append(self.branches.release(slot), self._rows[slot]))

    def _drop_branches(self) -> None:
        """Free the pages of all branches, which main chains need more."""
        self._cache.free_rows(self.branches.close_all())

    def _fit(self, slots: int) -> None:
        super()._fit(slots)
        self._cache.free_rows(self.branches.fit(slots, int(self.mirrors.windows.max(initial=1))))

    def _rows_of(self, chains: Chains) -> np.ndarray:
        """int64 `(n,)`: rows of the cache; that of a branch that begins is forked from its main chain's."""
        rows: np.ndarray = self._rows[chains.slots]
        if not len(rows) or chains.numbers[-1] == MAIN:  # main chains come first
            return rows
        new, branch = chains.begins != FREE, chains.numbers != MAIN
        kept = chains.begins[new] - self._origins[chains.slots[new]]
        held, forks = self.branches.rows, self._cache.fork(rows[new], kept)
        held[chains.slots[new], chains.numbers[new]] = forks
        rows[branch] = held[chains.slots[branch], chains.numbers[branch]]
        return rows

    def _reserve(self, chains: Chains, rows: np.ndarray, counts: np.ndarray) -> tuple[Chains, np.ndarray, np.ndarray]:
        """Make room in the cache for `counts` more tokens of each chain. Where a main chain finds none, all branches
        are given up; chains without room are, too.

        Returns:
            The chains that fit in one forward, their cache rows, and their tokens in it, at least 1.
        """
        if counts.sum() > _MAX_STEP_TOKENS:
            counts = np.minimum(counts, _MAX_STEP_TOKENS - np.cumsum(counts) + counts)
            chains, rows, counts = chains.at(counts > 0), rows[counts > 0], counts[counts > 0]  # the first ones
        ends = self._cache.lengths[rows] + counts
        short = np.flatnonzero(ends > self._cache.room(rows))
        full = short[~self._cache.reserve_rows(rows[short], ends[short])]
        if not len(full):
            return chains, rows, counts
        for i in full.tolist():
            if chains.numbers[i] == MAIN:
                self._drop_branches()
            if chains.numbers[i] != MAIN or not self._cache.reserve(int(rows[i]), int(ends[i])):
                self._give_up_chain(int(chains.slots[i]), int(chains.numbers[i]))
        left, branch = self._placed[chains.slots], np.flatnonzero(chains.numbers != MAIN)
        left[branch] = self.branches.ats[chains.slots[branch], chains.numbers[branch]] != FREE
        return chains.at(left), rows[left], counts[left]

    def _give_up_chain(self, slot: int, number: int) -> None:
        """Give up a branch, or with its main chain the request."""
        if number == MAIN:
            self._give_up(slot)
        elif self.branches.ats[slot, number] != FREE:  # else it went with its main chain
            self._cache.free_rows(self.branches.rows[slot, [number]])
            self.branches.close(slot, number)

    def _draw(self, chains: Chains, logits: torch.Tensor) -> np.ndarray:
        """Append the token that each chain draws from its logits `(n, V)`; one that cannot be sampled from is given up.
        Returns int32: slots with changed tails, and slots that were given up."""
        slots, numbers, tips = chains.slots, chains.numbers, self._tips
        tokens, gaps = self._candidates(logits, self.branches.ends(chains, tips), slots.astype(np.int64))
        unsound = (numbers == MAIN) & (tokens[:, 0] < 0)  # no numbers: a whole window is wrong
        self.judged[0] += self.mirrors.windows[slots[unsound]].sum()
        for i in np.flatnonzero(tokens[:, 0] < 0).tolist():
            self._give_up_chain(int(slots[i]), int(numbers[i]))
        return slots[self.branches.append(self.mirrors, slots, numbers, tokens, ranges_of(gaps), tips)]

    def _candidates(self, logits: torch.Tensor, ends: np.ndarray, slots: np.ndarray) -> Candidates:
        """Draw the tokens at the positions `ends` of the lines of slots from logits `(n, V)`."""
        if self.branches.most:
            return candidates(logits, ends, slots, self._rules)
        rows, none = np.arange(len(slots)), np.zeros(len(slots) + 1, np.int64)
        tokens = np.full((len(slots), MOST), -1, np.int32)
        tokens[:, 0] = verify_arrays(logits, rows, none, none[:0], ends, slots, self._rules).tokens[:, 0]
        return Candidates(tokens, np.full(len(slots), np.inf, np.float32))
