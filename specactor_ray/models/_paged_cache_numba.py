"""Kernels of `paged_cache.py`, compiled by numba. They are in one file for the reason given in `table/_kernels.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel

_jit: Any = kernel()


class Pages(NamedTuple):
    """Arrays of a `PagedCache`."""

    lengths: np.ndarray
    """`(rows,)`: number of tokens of each row."""
    held: np.ndarray
    """`(rows,)`: number of pages of each row."""
    shared: np.ndarray
    """`(rows,)`: number of its first pages that other rows may hold, too."""
    table: np.ndarray
    """`(rows, most pages)`: pages of each row."""
    holders: np.ndarray
    """`(pages,)`: number of rows that hold each page."""
    free: np.ndarray
    """`(pages,)`: the first `num_free[0]` are the free pages."""
    num_free: np.ndarray


@_jit
def fork(cache: Any, page_size: int, rows: Any, lengths: Any, forks: Any) -> None:
    """Make `forks` hold the first `lengths` tokens of `rows`, `(n,)` each."""
    for i in range(len(rows)):
        row, new = rows[i], forks[i]
        shared = -(-lengths[i] // page_size)
        for place in range(shared):
            page = cache.table[row, place]
            cache.table[new, place] = page
            cache.holders[page] += 1
        cache.lengths[new], cache.held[new], cache.shared[new] = lengths[i], shared, shared
        cache.shared[row] = max(shared, cache.shared[row])


@_jit
def free(cache: Any, rows: Any) -> None:
    """Free all pages of rows."""
    for row in rows:
        _keep(cache, row, 0)
        cache.lengths[row] = cache.shared[row] = 0


@_jit
def reserve(cache: Any, page_size: int, rows: Any, tokens: Any) -> Any:
    """Make room in `rows` for `tokens` tokens in all, `(n,)` each, one row after the other.

    Returns:
        Whether each row has room, bool `(n,)`; int64 `(2, m)`: pages to copy at once, and their targets.
    """
    fits, copies, count = np.zeros(len(rows), np.bool_), np.empty((2, len(rows)), np.int64), 0
    for i in range(len(rows)):
        row = rows[i]
        length = cache.lengths[row]
        if cache.shared[row] * page_size > length:  # pages past `length` become its own
            kept, whole = -(-length // page_size), length // page_size
            _keep(cache, row, kept)
            if kept > whole and cache.holders[cache.table[row, whole]] > 1:
                if cache.num_free[0] == 0:
                    continue
                copies[0, count] = cache.table[row, whole]
                cache.holders[cache.table[row, whole]] -= 1
                cache.table[row, whole] = copies[1, count] = _take(cache)
                count += 1
            cache.shared[row] = whole
        needed = -(-tokens[i] // page_size)
        if needed - cache.held[row] > cache.num_free[0]:
            continue
        for place in range(cache.held[row], needed):
            cache.table[row, place] = _take(cache)
        cache.held[row], fits[i] = max(needed, cache.held[row]), True
    return fits, copies[:, :count]


@_jit
def _take(cache: Any) -> int:
    """Take a free page for one row."""
    cache.num_free[0] -= 1
    page = cache.free[cache.num_free[0]]
    cache.holders[page] = 1
    return page  # type: ignore[no-any-return]


@_jit
def _keep(cache: Any, row: int, pages: int) -> None:
    """Free all but the first pages of a row."""
    for place in range(pages, cache.held[row]):
        page = cache.table[row, place]
        cache.holders[page] -= 1
        if cache.holders[page] == 0:
            cache.free[cache.num_free[0]] = page
            cache.num_free[0] += 1
    cache.held[row] = min(pages, cache.held[row])
