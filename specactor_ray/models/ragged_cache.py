"""Key/value cache for rows of different lengths, with rollback, inside one memory budget.

All rows share one pool per layer; a row owns a contiguous region of token slots in it (the same slots in every
layer). Writing the new positions of all rows is one indexed copy per layer, reading a row is a view. Rolling back
is setting the row's length: what lies behind it is overwritten later.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_GROWTH = 128
"""Slots are handed out in multiples of this many tokens."""


class RegionAllocator:
    """Contiguous regions out of `total` slots: best fit, neighbours merge when freed."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: list[tuple[int, int]] = [(0, total)] if total else []

    @property
    def free_slots(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def largest_free(self) -> int:
        return max((size for _, size in self._free), default=0)

    def take(self, size: int) -> int | None:
        """Offset of a region of `size` slots, or None when no free region is large enough."""
        fitting = [(have, offset) for offset, have in self._free if have >= size]
        if not fitting:
            return None
        have, offset = min(fitting)
        self._free.remove((offset, have))
        if have > size:
            insort(self._free, (offset + size, have - size))
        return offset

    def extend(self, offset: int, size: int, extra: int) -> bool:
        """Grow the region at `offset` in place by `extra` slots; False when what lies behind it is taken."""
        for index, (start, length) in enumerate(self._free):
            if start == offset + size and length >= extra:
                del self._free[index]
                if length > extra:
                    insort(self._free, (start + extra, length - extra))
                return True
        return False

    def free(self, offset: int, size: int) -> None:
        """Give a region back."""
        insort(self._free, (offset, size))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key and value shape of one token in one layer."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes(self, itemsize: int) -> int:
        return self.heads * (self.key_dim + self.value_dim) * itemsize


class RaggedCache:
    """The pool. Keys and values of layer l: `(heads, slots, dim)`."""

    def __init__(
        self, shapes: Sequence[LayerShape], budget_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bytes_per_token = sum(shape.bytes(dtype.itemsize) for shape in shapes)
        slots = budget_bytes // self.bytes_per_token // _GROWTH * _GROWTH
        self.allocator = RegionAllocator(slots)
        self._shapes, self._dtype, self.device = shapes, dtype, device
        self.allocate()

    def allocate(self) -> None:
        """Make the pool's tensors, after `release`."""
        self._pools: list[torch.Tensor] = []
        self.keys = self._make_pools([(s.heads, s.key_dim) for s in self._shapes])
        self.values = self._make_pools([(s.heads, s.value_dim) for s in self._shapes])

    def _make_pools(self, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Layers of one shape are slices of one tensor: moving tokens in all of them is then one operation."""
        slices: dict[tuple[int, int], Iterator[torch.Tensor]] = {}
        for (heads, dim), layers in Counter(shapes).items():
            pool = torch.empty(layers, heads, self.slots, dim, dtype=self._dtype, device=self.device)
            self._pools.append(pool)
            slices[heads, dim] = iter([pool[layer] for layer in range(layers)])
        return [next(slices[shape]) for shape in shapes]

    def release(self) -> None:
        """Free the pool's memory; what rows held is lost, so they must be truncated to 0."""
        self.keys, self.values, self._pools = [], [], []

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots in all layers; the ranges must not overlap."""
        for pool in self._pools:
            pool[:, :, target : target + count] = pool[:, :, source : source + count]

    @property
    def slots(self) -> int:
        return self.allocator.total

    def slots_for(self, tokens: int) -> int:
        """Slots a row of this many tokens takes (rounded up to the growth step)."""
        return -(-tokens // _GROWTH) * _GROWTH

    def open(self, tokens: int) -> CacheRow | None:
        """A row with room for `tokens` tokens, or None when the pool has no region for it."""
        capacity = self.slots_for(max(tokens, 1))
        offset = self.allocator.take(capacity)
        return None if offset is None else CacheRow(self, offset, capacity)


class CacheRow:
    """One row's region: `length` tokens are valid, `capacity` fit."""

    def __init__(self, cache: RaggedCache, offset: int, capacity: int) -> None:
        self._cache = cache
        self.offset = offset
        self.capacity = capacity
        self.length = 0

    def reserve(self, tokens: int) -> bool:
        """Make room for `tokens` tokens in all, moving the row if need be. False: the pool has no such region."""
        if tokens <= self.capacity:
            return True
        capacity = self._cache.slots_for(tokens)
        if self._cache.allocator.extend(self.offset, self.capacity, capacity - self.capacity):
            self.capacity = capacity
            return True
        capacity = self._cache.slots_for(max(tokens, min(2 * self.capacity, tokens + 8 * _GROWTH)))
        offset = self._cache.allocator.take(capacity)
        if offset is None:
            capacity = self._cache.slots_for(tokens)
            offset = self._cache.allocator.take(capacity)
        if offset is None:
            return False
        self._cache.copy(self.offset, offset, self.length)
        self.free()
        self.offset, self.capacity = offset, capacity
        return True

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens."""
        if length > self.length:
            raise ValueError(f"cannot roll forward from {self.length} to {length} tokens")
        self.length = length

    def free(self) -> None:
        """Give the region back; the row has no room until `reserve` finds it another."""
        if self.capacity:
            self._cache.allocator.free(self.offset, self.capacity)
            self.capacity = 0
