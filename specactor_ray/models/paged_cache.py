"""Key/value cache in pages for rows of different lengths, with rollback and forks, inside one memory budget.

Every layer has a pool of pages. A row is a list of pages, the same in every layer; it takes more from a free list as it
grows and never moves. A rollback sets its length: entries past it are overwritten later. A fork shares the pages of its
source until one of the two writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.ragged import enlarged, padded, places
from specactor_ray.models import _paged_cache_numba as kernels
from specactor_ray.models.shapes import ROW_BYTES

_CPU_PAGE, _GPU_PAGE = 16, 256
"""Tokens per page."""
_FIRST_ROWS, _FIRST_PAGES = 32, 8


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key and value shape of one token in one layer."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes(self, dtype: torch.dtype, row: int = 1) -> int:
        """Bytes of one token, where a head's numbers begin at a multiple of `row` bytes."""
        return self.heads * sum(padded(dim * dtype.itemsize, row) for dim in (self.key_dim, self.value_dim))


class PagedCache:
    """Paged cache; rows are integers that `open` and `fork` return.

    Args:
        shapes: Key and value shapes of each layer.
        budget_bytes: Memory of the pools.
        dtype: Data type of keys and values.
        device: Device of the pools.
        page_size: Tokens of a page; None takes 16 on CPUs and 256 on GPUs.
        state_size: Numbers of each token beside its keys and values (`states`).

    Raises:
        ModelLoadError: The budget is too small for one page.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        budget_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int | None = None,
        state_size: int = 0,
    ) -> None:
        self._shapes, self._dtype, self.device, self._state_size = shapes, dtype, device, state_size
        self.page_size = page_size or (_CPU_PAGE if device.type == "cpu" else _GPU_PAGE)
        self._row_bytes = ROW_BYTES if device.type == "cpu" else 1
        self.bytes_per_token = sum(shape.bytes(dtype, self._row_bytes) for shape in shapes)
        self.bytes_per_token += state_size * dtype.itemsize
        self.pages = budget_bytes // (self.bytes_per_token * self.page_size)
        if self.pages == 0:
            raise ModelLoadError(
                f"a key/value cache of {budget_bytes} bytes holds no page of this model ({self.page_size} tokens of "
                f"{self.bytes_per_token} bytes); give it more memory (kv_cache_gb)"
            )
        lengths, held, shared = np.zeros((3, _FIRST_ROWS), np.int64)
        table, holders = np.zeros((_FIRST_ROWS, _FIRST_PAGES), np.int32), np.zeros(self.pages, np.int32)
        free = np.arange(self.pages, dtype=np.int32)[::-1].copy()
        self._state = kernels.Pages(lengths, held, shared, table, holders, free, np.array([self.pages]))
        self._free_rows = list(range(_FIRST_ROWS))[::-1]
        self.allocate()
        none = np.zeros(0, np.int64)  # compiles the kernels now, not in a step
        self.free_rows(self.fork(none[self.reserve_rows(none, none)], none))

    def allocate(self) -> None:
        """Make the pools, after `release`. Layer l: `keys[l]` and `values[l]` `(pages, page_size, heads, dim)`; hidden
        states: `states` `(slots, state_size)`."""
        shapes = [(s.heads, s.key_dim) for s in self._shapes] + [(s.heads, s.value_dim) for s in self._shapes]
        size = (self.pages, self.page_size)
        pools: dict[tuple[int, int], torch.Tensor] = {}
        for (heads, dim), count in Counter(shapes).items():
            width = padded(dim, max(self._row_bytes // self._dtype.itemsize, 1))
            pools[heads, dim] = torch.empty(count, *size, heads, width, dtype=self._dtype, device=self.device)
        tensors = {shape: iter(pool[..., : shape[1]]) for shape, pool in pools.items()}
        made = [next(tensors[shape]) for shape in shapes]
        self.keys, self.values, self._pools = made[: len(self._shapes)], made[len(self._shapes) :], list(pools.values())
        states = torch.empty(1, *size, self._state_size, dtype=self._dtype, device=self.device)
        self._pools += [states] if self._state_size else []
        self.states = states.view(self.slots, self._state_size)

    def release(self) -> None:
        """Free the pools' memory; every row must be free."""
        self.keys, self.values, self._pools, self.states = [], [], [], torch.empty(0)

    @property
    def lengths(self) -> np.ndarray:
        """int64 `(rows,)`: tokens of each row. Forwards increase it; `truncate` decreases it."""
        return self._state.lengths

    @property
    def slots(self) -> int:
        """Number of tokens of all pages."""
        return self.pages * self.page_size

    @property
    def free_slots(self) -> int:
        """Number of tokens of the free pages."""
        return int(self._state.num_free[0]) * self.page_size

    def slots_beside(self, rows: np.ndarray) -> int:
        """Number of tokens of the pages that are not in `rows`, int64 `(n,)`."""
        pages, held = self._state.table[rows], self._state.held[rows]
        mine = np.unique(pages[np.arange(pages.shape[1]) < held[:, None]])
        return (self.pages - len(mine)) * self.page_size

    def open(self, tokens: int) -> int | None:
        """An empty row with room for `tokens` tokens; None if there are too few free pages."""
        row = self.new_row()
        if self.reserve(row, max(tokens, 1)):
            return row
        self.free(row)
        return None

    def new_row(self) -> int:
        """An empty row without a page."""
        return int(self._new_rows(1)[0])

    def fork(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """New rows, int64 `(n,)`, with the first `lengths` tokens of `rows`, int64 `(n,)` each. They take no page
        before one of the two writes."""
        forks = self._new_rows(len(rows))
        kernels.fork(self._state, self.page_size, rows, lengths, forks)
        return forks

    def free(self, row: int) -> None:
        """`free_rows` of one row."""
        self.free_rows(np.array([row]))

    def free_rows(self, rows: np.ndarray) -> None:
        """Free rows, int64 `(n,)`, and their pages."""
        kernels.free(self._state, rows)
        self._free_rows += rows.tolist()

    def truncate(self, rows: np.ndarray, lengths: np.ndarray | int) -> None:
        """Roll rows back to their first `lengths` tokens, of which they have as many."""
        self.lengths[rows] = lengths

    def room(self, rows: np.ndarray) -> np.ndarray:
        """int64 `(n,)`: number of tokens up to which rows may grow before the next `reserve`."""
        shared = self._state.shared[rows] * self.page_size > self.lengths[rows]
        return np.where(shared, 0, self._state.held[rows] * self.page_size)

    def reserve(self, row: int, tokens: int) -> bool:
        """`reserve_rows` of one row."""
        return bool(self.reserve_rows(np.array([row]), np.array([tokens]))[0])

    def reserve_rows(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Make room in rows for `tokens` tokens in all, int64 `(n,)` each, one after the other. Returns bool `(n,)`:
        False where there are too few free pages; such a row keeps its tokens."""
        pages, table = min(self._pages_of(int(tokens.max(initial=0))), self.pages), self._state.table
        if pages > table.shape[1]:
            self._state = self._state._replace(table=enlarged(table, 1, max(pages, 2 * table.shape[1])))
        fits: np.ndarray
        fits, copies = kernels.reserve(self._state, self.page_size, rows, tokens)
        if copies.size:
            source, target = torch.from_numpy(copies).to(self.device)
            for pool in self._pools:
                pool[:, target] = pool[:, source]
        return fits

    def page_table(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 `(n, most pages)`: pages of rows that have room for these lengths. Entries after a row's last page are
        arbitrary pages."""
        return np.ascontiguousarray(self._state.table[rows, : self._pages_of(int(lengths.max(initial=0)))])

    def slots_of(self, pages: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """int64 `(sum(counts),)`: slots of `counts` tokens of each row from `firsts` on, by its `pages`, see
        `page_table`."""
        positions, size = places(firsts, counts), self.page_size
        return pages[np.repeat(np.arange(len(pages)), counts), positions // size] * np.int64(size) + positions % size

    def _new_rows(self, count: int) -> np.ndarray:
        while len(self._free_rows) < count:
            rows = len(self.lengths)
            larger = (enlarged(array, 0, 2 * rows) for array in self._state[:4])
            self._state = kernels.Pages._make((*larger, *self._state[4:]))
            self._free_rows += list(range(rows, 2 * rows))[::-1]
        taken = self._free_rows[len(self._free_rows) - count :]
        del self._free_rows[len(self._free_rows) - count :]
        return np.array(taken[::-1], np.int64)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
