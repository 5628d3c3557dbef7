"""Index arithmetic for ragged arrays (the values of all rows one after the other, beside an array of lengths), common
prefixes, and arrays that grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def common_prefix(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """Length of the longest common prefix of two lists of tokens."""
    length = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(different[0]) if len(different) else length


def enlarged(array: np.ndarray, axis: int, size: int, fill: int = 0) -> np.ndarray:
    """A copy with length `size` in one axis; new elements are `fill`."""
    larger = np.zeros((*array.shape[:axis], size, *array.shape[axis + 1 :]), array.dtype)
    if fill:  # else pages that are not written take no memory
        larger[...] = fill
    larger[tuple(map(slice, array.shape))] = array
    return larger


def grow(owner: object, names: Iterable[str], size: int, axis: int = 0, fill: int = 0) -> None:
    """Replace arrays of `owner` that are shorter than `size` in one axis; see `enlarged`."""
    for name in names:
        array = getattr(owner, name)
        if array.shape[axis] < size:
            setattr(owner, name, enlarged(array, axis, size, fill))


def padded(count: int, size: int = 16) -> int:
    """The next multiple of `size`."""
    return -(-count // size) * size
