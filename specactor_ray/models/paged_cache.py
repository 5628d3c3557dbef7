"""Key/value cache in pages for rows of different lengths, with rollback and forks, inside one memory budget.

Every layer has a pool of pages. A row is a list of pages, the same ones in every layer; it takes more from a free list
as it grows and never moves. Rolling back sets its length: what lies behind it is overwritten later. A fork shares the
pages of its source until one of the two writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specactor_ray.ragged import enlarged

_CPU_PAGE, _GPU_PAGE = 16, 256
"""Tokens of a page. FlashAttention 2 reads pages of a multiple of 256 tokens."""
_FIRST_ROWS, _FIRST_PAGES = 32, 8


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key and value shape of one token in one layer."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Of one token."""
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


class PagedCache:
    """Rows are integers, handed out by `open` and `fork`.

    Args:
        shapes: Of each layer.
        budget_bytes: Memory of the pools.
        dtype: Of keys and values.
        device: Of the pools.
        page_size: Tokens of a page; None takes 16 on CPUs and 256 on GPUs.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        budget_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int | None = None,
    ) -> None:
        self._shapes, self._dtype, self.device = shapes, dtype, device
        self.page_size = page_size or (_CPU_PAGE if device.type == "cpu" else _GPU_PAGE)
        self.bytes_per_token = sum(shape.bytes(dtype) for shape in shapes)
        self.pages = budget_bytes // (self.bytes_per_token * self.page_size)
        self.lengths = np.zeros(_FIRST_ROWS, np.int64)
        """int64 `(rows,)`: tokens of each row. Forwards add to it; `truncate` takes away."""
        self._held, self._shared = np.zeros((2, _FIRST_ROWS), np.int64)
        """`(rows,)`: pages of each row, and how many of them, the first ones, other rows may hold, too."""
        self._table = np.zeros((_FIRST_ROWS, _FIRST_PAGES), np.int32)
        """`(rows, most pages)`."""
        self._holders = np.zeros(self.pages, np.int32)
        """`(pages,)`: rows that hold each page."""
        self._free = list(range(self.pages))[::-1]
        self._free_rows = list(range(_FIRST_ROWS))[::-1]
        self.allocate()

    def allocate(self) -> None:
        """Make the pools, after `release`. Layer l: `keys[l]` and `values[l]` `(pages, page_size, heads, dim)`."""
        shapes = [(s.heads, s.key_dim) for s in self._shapes] + [(s.heads, s.value_dim) for s in self._shapes]
        size = (self.pages, self.page_size)
        pools = {
            shape: torch.empty(count, *size, *shape, dtype=self._dtype, device=self.device)
            for shape, count in Counter(shapes).items()
        }
        tensors = {shape: iter(pool) for shape, pool in pools.items()}
        made = [next(tensors[shape]) for shape in shapes]
        self.keys, self.values, self._pools = made[: len(self._shapes)], made[len(self._shapes) :], list(pools.values())

    def release(self) -> None:
        """Free the pools' memory; every row must be free."""
        self.keys, self.values, self._pools = [], [], []

    @property
    def slots(self) -> int:
        """Tokens that all pages hold."""
        return self.pages * self.page_size

    @property
    def free_slots(self) -> int:
        """Tokens that the free pages hold."""
        return len(self._free) * self.page_size

    def open(self, tokens: int) -> int | None:
        """An empty row with room for `tokens` tokens, or None where there are too few free pages."""
        row = self._new_row()
        if self.reserve(row, max(tokens, 1)):
            return row
        self.free(row)
        return None

    def fork(self, row: int, tokens: int | None = None) -> int:
        """A row of the same tokens, or of the first `tokens`. It takes no page before one of the two writes."""
        length = int(self.lengths[row]) if tokens is None else tokens
        fork, shared = self._new_row(), self._pages_of(length)
        self.lengths[fork] = length
        self._table[fork, :shared] = self._table[row, :shared]
        self._holders[self._table[row, :shared]] += 1
        self._held[fork] = self._shared[fork] = shared
        self._shared[row] = max(shared, self._shared[row])
        return fork

    def free(self, row: int) -> None:
        """Give a row and its pages back."""
        self._keep(row, 0)
        self.lengths[row] = self._shared[row] = 0
        self._free_rows.append(row)

    def truncate(self, rows: np.ndarray, lengths: np.ndarray | int) -> None:
        """Roll rows back to their first `lengths` tokens.

        Raises:
            ValueError: A row has fewer; nothing was changed.
        """
        if (self.lengths[rows] < lengths).any():
            raise ValueError(f"cannot roll forward from {self.lengths[rows]} to {lengths} tokens")
        self.lengths[rows] = lengths

    def room(self, rows: np.ndarray) -> np.ndarray:
        """int64 `(n,)`: tokens up to which rows may grow before the next `reserve`."""
        shared = self._shared[rows] * self.page_size > self.lengths[rows]
        return np.where(shared, 0, self._held[rows] * self.page_size)

    def reserve(self, row: int, tokens: int) -> bool:
        """Make room in a row for `tokens` tokens in all.

        Returns:
            False where there are too few free pages; the row keeps its tokens.
        """
        length = int(self.lengths[row])
        if self._shared[row] * self.page_size > length and not self._own(row, length):
            return False
        held, needed = int(self._held[row]), self._pages_of(tokens)
        if needed - held > len(self._free):
            return False
        if needed > held:
            if needed > self._table.shape[1]:
                self._table = enlarged(self._table, 1, max(needed, 2 * self._table.shape[1]))
            taken = self._free[held - needed :]
            del self._free[held - needed :]
            self._table[row, held:needed], self._holders[taken], self._held[row] = taken, 1, needed
        return True

    def page_table(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 `(n, most pages)`: pages of rows that have room for these lengths. What is behind a row's last one is
        any page."""
        return np.ascontiguousarray(self._table[rows, : self._pages_of(int(lengths.max(initial=0)))])

    def _own(self, row: int, length: int) -> bool:
        """Make the pages behind `length` the row's own: only the one that holds its last tokens is copied."""
        kept, whole = self._pages_of(length), length // self.page_size
        self._keep(row, kept)
        if kept > whole and self._holders[shared := self._table[row, whole]] > 1:
            if not self._free:
                return False
            self._table[row, whole] = page = self._free.pop()
            self._holders[[shared, page]] += np.array([-1, 1], np.int32)
            for pool in self._pools:
                pool[:, page] = pool[:, int(shared)]
        self._shared[row] = whole
        return True

    def _keep(self, row: int, pages: int) -> None:
        """Give back all but the first pages of a row."""
        rest = self._table[row, pages : self._held[row]]
        self._holders[rest] -= 1
        self._free += rest[self._holders[rest] == 0].tolist()
        self._held[row] = min(pages, int(self._held[row]))

    def _new_row(self) -> int:
        if not self._free_rows:
            rows = len(self.lengths)
            for name in ("lengths", "_held", "_shared", "_table"):
                setattr(self, name, enlarged(getattr(self, name), 0, 2 * rows))
            self._free_rows = list(range(rows, 2 * rows))[::-1]
        return self._free_rows.pop()

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
