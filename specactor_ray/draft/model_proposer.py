"""What proposers with a model share: cache rows of the requests they draft for, the loop over forwards, sampling."""

from __future__ import annotations

import abc

import numpy as np
import torch

from specactor_ray.draft.slots import SlotProposer
from specactor_ray.models.paged_cache import PagedCache
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
    ) -> None:
        super().__init__(max_batch)
        self._cache, self._shared_noise = cache, shared_noise
        self.vocab_size: int | None = vocab_size
        self.max_len = min(max_positions, cache.slots)
        self._rules = Rules(0, cache.device)
        """Sampling rules by slot; positions are those of the lines."""
        self._rows = np.zeros(0, np.int64)
        """`(slots,)`: rows in the cache of the requests that have a place."""
        warm_up(cache.device, dtype)

    def _cached(self, slots: np.ndarray) -> np.ndarray:
        """int64 `(n,)`: tokens in the cache of slots that have a place."""
        lengths: np.ndarray = self._cache.lengths[self._rows[slots]]
        return lengths

    @abc.abstractmethod
    def _ready(self) -> np.ndarray:
        """int `(n,)`: slots that a forward can draft for, most urgent first."""

    @abc.abstractmethod
    def _forward(self, slots: np.ndarray) -> np.ndarray:
        """Run one forward for as many of `slots` as fit. Returns those whose tails changed, or that cannot go on."""

    def extend(self) -> np.ndarray:
        while True:
            slots, answered = self._ready(), self._unanswered.copy()
            answered[slots] = False  # the others have no more guesses
            if len(slots):
                answered[self._forward(slots)] = True
            found = np.flatnonzero(answered)
            self._unanswered[found] = False
            if len(found) or not len(slots):
                return found.astype(np.int32)

    def _enter(self, slot: int, late: bool) -> bool:
        row = self._cache.open(min(int(self.mirrors.known[slot]) + _FIRST_RESERVATION, self.max_len))
        if row is None:
            return False
        self._rows[slot] = row
        sampling = self.samplings[slot] if self._shared_noise else own_noise(self.samplings[slot])
        self._rules.write([slot], [sampling], [-int(self.mirrors.prompts[slot])])
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        self._cache.free(int(self._rows[slot]))

    def _reserve(self, slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make room in the cache for `counts` more tokens of each slot; slots without room are given up.

        Returns:
            The slots that fit in one forward, their cache rows, and their tokens in it, at least 1.
        """
        if counts.sum() > _MAX_STEP_TOKENS:
            counts = np.minimum(counts, _MAX_STEP_TOKENS - np.cumsum(counts) + counts)
            slots, counts = slots[counts > 0], counts[counts > 0]  # the first ones
        rows = self._rows[slots]
        ends = self._cache.lengths[rows] + counts
        short = np.flatnonzero(ends > self._cache.room(rows)).tolist()
        if not short:
            return slots, rows, counts
        for i in short:
            if not self._cache.reserve(int(rows[i]), int(ends[i])):
                self._give_up(int(slots[i]))
        placed = self._placed[slots]
        return slots[placed], rows[placed], counts[placed]

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
