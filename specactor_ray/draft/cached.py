"""What proposers with a model share: cache rows of the requests they draft for, and sampling."""

from __future__ import annotations

import numpy as np
import torch

from specactor_ray.draft.slots import SlotProposer
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.sampling.keyed import own_noise, verify_arrays
from specactor_ray.sampling.rules import Rules

_MAX_STEP_TOKENS = 512
"""Most positions in one forward; a long prompt is read in chunks of this size."""
_FIRST_RESERVATION = 128


class CachedProposer(SlotProposer):
    """Implements `Proposer` but for `extend`.

    Args:
        cache: Of the model; it is the proposer's own.
        max_positions: Longest sequence that the model reads.
        max_batch: Most requests drafted for at once.
        shared_noise: Sample with the target's noise; without it with independent noise, to measure what sharing gains.
    """

    _by_slot = (*SlotProposer._by_slot, "_rows", "_cached")

    def __init__(self, cache: PagedCache, max_positions: int, max_batch: int, shared_noise: bool) -> None:
        super().__init__(max_batch)
        self._cache, self._shared_noise = cache, shared_noise
        self._rules = Rules(0, cache.device)
        """How the slots are sampled; positions are those of the lines."""
        self._rows, self._cached = np.zeros((2, 0), np.int32)
        """`(slots,)`: rows in the cache of the requests that have a place, and their lengths at the next forward."""
        self.max_len = min(max_positions, cache.slots)

    def _enter(self, slot: int, late: bool) -> bool:
        row = self._cache.open(min(int(self.mirrors.known[slot]) + _FIRST_RESERVATION, self.max_len))
        if row is None:
            return False
        self._rows[slot], self._cached[slot] = row, 0
        sampling = self.samplings[slot] if self._shared_noise else own_noise(self.samplings[slot])
        self._rules.write([slot], [sampling], [-int(self.mirrors.prompts[slot])])
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        self._cache.free(int(self._rows[slot]))

    def _reserve(self, slots: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Room in the cache for rows that grow to the lengths `ends`. Where there is none no more is drafted for it.

        Returns:
            Those of the slots that fit in one forward, the lengths that their rows grow to in it, and their rows.
        """
        lengths = self._cached[slots]
        ends = np.minimum(ends, lengths + _MAX_STEP_TOKENS - np.cumsum(ends - lengths) + (ends - lengths))
        count = np.count_nonzero(ends > lengths)  # the first ones
        slots, ends, rows = slots[:count], ends[:count], self._rows[slots[:count]]
        self._cache.truncate(rows, lengths[:count])
        short = np.flatnonzero(ends > self._cache.room(rows))
        for i in short.tolist():
            if not self._cache.reserve(int(rows[i]), int(ends[i])):
                self._give_up(int(slots[i]))
        placed = self._placed[slots]
        return slots[placed], ends[placed], rows[placed]

    def _sample(self, slots: np.ndarray, logits: torch.Tensor, ends: np.ndarray) -> np.ndarray:
        """int32 `(n,)`: the tokens behind the first `ends` of each line; -1, and no more drafts, for requests whose
        logits `(n, V)` cannot be sampled from."""
        rows, none = np.arange(len(slots)), np.zeros(len(slots) + 1, np.int64)
        found = verify_arrays(logits, rows, none, none[:0], ends.astype(np.int64), slots, self._rules)
        tokens = found.tokens[:, 0].astype(np.int32)
        for slot in slots[tokens < 0].tolist():
            self._give_up(slot)
        return tokens
