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
from specactor_ray.sampling.candidates import candidates
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

    _by_slot = (*SlotProposer._by_slot, "_rows")

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
        self._rows = np.zeros(0, np.int64)
        """`(slots,)`: rows in the cache of the requests that have a place."""
        warm_up(cache.device, dtype)
        if branches:
            branching.warm_up()
            zero = np.zeros(1, np.int64)
            candidates(torch.zeros(1, 2, dtype=dtype), zero, zero, Rules(1))

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if self.branches.most:
            self._cache.free_rows(self.branches.settle(self.mirrors, self._rows, slots, starts, lengths, tokens))
        return super().commit(slots, starts, lengths, tokens)

    def tails(self, slots: np.ndarray) -> Tails:
        tails = super().tails(slots)
        return tails._replace(branches=self.branches.published(self.mirrors, slots)) if self.branches.most else tails

    def _cached(self, slots: np.ndarray) -> np.ndarray:
        """int64 `(n,)`: tokens in the cache of slots that have a place."""
        lengths: np.ndarray = self._cache.lengths[self._rows[slots]]
        return lengths

    @abc.abstractmethod
    def _ready(self) -> Chains:
        """Chains that a forward can draft for, most urgent first."""

    @abc.abstractmethod
    def _forward(self, chains: Chains) -> np.ndarray:
        """Run one forward for as many chains as fit. Returns slots whose tails changed, or that cannot go on."""

    def extend(self) -> np.ndarray:
        self.rows_drafted = 0
        while True:
            chains, answered = self._ready(), self._unanswered.copy()
            answered[chains.slots] = False  # the others have no more guesses
            if len(chains.slots):
                answered[self._forward(chains)] = True
            found = np.flatnonzero(answered)
            self._unanswered[found] = False
            if len(found) or not len(chains.slots):
                return found.astype(np.int32)

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
        if self.branches.most:
            self._cache.free_rows(self.branches.fit(slots, int(self.mirrors.windows.max(initial=1))))

    def _rows_of(self, chains: Chains) -> np.ndarray:
        """int64 `(n,)`: rows of the cache; that of a branch that begins is forked from its main chain's."""
        rows: np.ndarray = self._rows[chains.slots]
        if not len(rows) or chains.numbers[-1] == MAIN:  # main chains come first
            return rows
        new, branch = chains.begins != FREE, chains.numbers != MAIN
        held, forks = self.branches.rows, self._cache.fork(rows[new], chains.begins[new].astype(np.int64))
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
        Returns int32 `(n,)`, the slots of the chains."""
        mirrors, branches, slots = self.mirrors, self.branches, chains.slots
        if not branches.most:
            tokens = self._sample(slots, logits, mirrors.ends[slots])
            mirrors.append(slots[tokens >= 0], tokens[tokens >= 0])
            return slots
        main = chains.numbers == MAIN
        ends = np.where(main, mirrors.ends[slots], (branches.ats + branches.lengths)[slots, chains.numbers])
        tokens, gaps = candidates(logits, ends.astype(np.int64), slots.astype(np.int64), self._rules)
        for i in np.flatnonzero(tokens[:, 0] < 0).tolist():
            self._give_up_chain(int(slots[i]), int(chains.numbers[i]))
        branches.append(mirrors, slots, chains.numbers, tokens, ranges_of(gaps))
        return slots

    def _sample(self, slots: np.ndarray, logits: torch.Tensor, ends: np.ndarray) -> np.ndarray:
        """Sample the tokens at the positions `ends` of the lines from logits `(n, V)`, int32 `(n,)`.

        A row that cannot be sampled from is -1, and its slot is given up.
        """
        rows, none = np.arange(len(slots)), np.zeros(len(slots) + 1, np.int64)
        found = verify_arrays(logits, rows, none, none[:0], ends.astype(np.int64), slots, self._rules)
        tokens = found.tokens[:, 0].astype(np.int32)
        for slot in slots[tokens < 0].tolist():
            self._give_up(slot)
        return tokens
