"""What proposers with a model share: cache rows of the requests they draft for, the loop over forwards, sampling."""

from __future__ import annotations

import abc

import numpy as np
import torch

from specactor_ray.draft import branches as branching
from specactor_ray.draft.branches import FREE, MAIN, BranchTable, Chains, ranges_of
from specactor_ray.draft.proposer import Tails
from specactor_ray.draft.slots import SlotProposer
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.sampling.candidates import MOST, Candidates, candidates, warm_up
from specactor_ray.sampling.keyed import own_noise
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
        self._most = MOST if branches else 1
        """Candidates of a draw."""
        warm_up(cache.device, dtype, self._most)
        branching.warm_up()

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

    @abc.abstractmethod
    def _ready(self) -> Chains:
        """Chains that a forward can draft for, main chains first, the most urgent ones first."""

    @abc.abstractmethod
    def _run(
        self, chains: Chains, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        """Read `counts` tokens of each chain into its row of the cache. Returns the logits of the next tokens of those
        chains that are complete then, bool `(n,)`."""

    def extend(self) -> np.ndarray:
        self.rows_drafted, again = 0, False
        while True:
            chains, answered = self._ready(), self._unanswered.copy()
            answered[chains.slots] = False  # the others have no more guesses
            if len(chains.slots):
                answered[self._forward(chains)] = True
            (found,) = answered.nonzero()
            self._unanswered[found] = False
            if len(found) or not len(chains.slots):
                self.rows_drafted *= not again
                return found.astype(np.int32)
            again = True

    def _plan(self, reading: np.ndarray, ahead: np.ndarray, backlogs: np.ndarray) -> Chains:
        """See `BranchTable.plan`."""
        chains = self.mirrors, self._tips, reading, ahead, backlogs
        return self.branches.plan(*chains, self.budget, self.max_len, self.forward_s)

    def _forward(self, chains: Chains) -> np.ndarray:
        """Run one forward of the chains that fit. Returns slots with changed tails, and slots that cannot go on."""
        chains, rows = self._reserve(chains, self._rows_of(chains))
        if not len(rows):
            return chains.slots
        tokens, ends, complete = self.branches.read(
            self.mirrors, self._tips, self._origins, self._cache.lengths, chains, rows
        )
        logits = self._run(chains, rows, chains.counts.astype(np.int64), tokens, complete)
        self.rows_drafted = len(rows) if len(tokens) == len(rows) else 0
        if not complete.all():
            chains, ends = chains.at(complete), ends[complete]
        return self._draw(chains, ends, logits)

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
        slots, numbers, begins, _ = chains
        rows: np.ndarray = self._rows[slots]
        if not len(rows) or numbers[-1] == MAIN:  # branches come last
            return rows
        new, held = np.flatnonzero(begins != FREE), self.branches.rows
        held[slots[new], numbers[new]] = self._cache.fork(rows[new], begins[new] - self._origins[slots[new]])
        return np.where(numbers == MAIN, rows, held[slots, numbers])

    def _reserve(self, chains: Chains, rows: np.ndarray) -> tuple[Chains, np.ndarray]:
        """Make room in the cache for the tokens that each chain reads. Where a main chain finds none, all branches are
        given up; chains without room are, too.

        Returns:
            The chains that fit in one forward, with the tokens that do, and their cache rows.
        """
        counts = chains.counts
        if counts.sum() > _MAX_STEP_TOKENS:
            counts = np.minimum(counts, _MAX_STEP_TOKENS - np.cumsum(counts) + counts).astype(np.int32)
            chains, rows = chains._replace(counts=counts).at(counts > 0), rows[counts > 0]  # the first ones
        ends = self._cache.lengths[rows] + chains.counts
        fits = self._cache.reserve_rows(rows, ends)
        if fits.all():
            return chains, rows
        for i in np.flatnonzero(~fits).tolist():
            if chains.numbers[i] == MAIN:
                self._drop_branches()
            if chains.numbers[i] != MAIN or not self._cache.reserve(int(rows[i]), int(ends[i])):
                self._give_up_chain(int(chains.slots[i]), int(chains.numbers[i]))
        left, branch = self._placed[chains.slots], np.flatnonzero(chains.numbers != MAIN)
        left[branch] = self.branches.ats[chains.slots[branch], chains.numbers[branch]] != FREE
        return chains.at(left), rows[left]

    def _give_up_chain(self, slot: int, number: int) -> None:
        """Give up a branch, or with its main chain the request."""
        if number == MAIN:
            self._give_up(slot)
        elif self.branches.ats[slot, number] != FREE:  # else it went with its main chain
            self._cache.free_rows(self.branches.rows[slot, [number]])
            self.branches.close(slot, number)

    def _draw(self, chains: Chains, ends: np.ndarray, logits: torch.Tensor) -> np.ndarray:
        """Append the token that each chain draws at `ends` of its line, int64 `(n,)`, from its logits `(n, V)`; a chain
        without one is given up. Returns int32: slots with changed tails, and slots that were given up."""
        slots, numbers = chains.slots, chains.numbers
        tokens, gaps = self._candidates(logits, ends, slots.astype(np.int64))
        for i in (tokens[:, 0] < 0).nonzero()[0].tolist():
            if numbers[i] == MAIN:  # no numbers: a whole window is wrong
                self.judged[0] += self.mirrors.windows[slots[i]]
            self._give_up_chain(int(slots[i]), int(numbers[i]))
        return slots[self.branches.append(self.mirrors, self._tips, chains, tokens, ranges_of(gaps))]

    def _candidates(self, logits: torch.Tensor, ends: np.ndarray, slots: np.ndarray) -> Candidates:
        """Draw the tokens at the positions `ends` of the lines of slots from logits `(n, V)`."""
        return candidates(logits, ends, slots, self._rules, self._most)
