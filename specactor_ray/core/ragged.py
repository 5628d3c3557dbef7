"""Index arithmetic for ragged arrays: the values of all rows one after the other, beside an array of lengths."""

from __future__ import annotations

import numpy as np


def begins(lengths: np.ndarray) -> np.ndarray:
    """int64 `(n + 1,)`: index of the beginning of each row, and of the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def places(firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 `(sum(lengths),)`: `firsts[i], ..., firsts[i] + lengths[i] - 1` of one row after the other."""
    offsets = begins(lengths)
    places: np.ndarray = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], lengths)
    return places


def enlarged(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """A copy with length `size` in one axis; new elements are 0."""
    larger = np.zeros((*array.shape[:axis], size, *array.shape[axis + 1 :]), array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
