"""Weights on their way from the trainer to those that follow it: a few big byte arrays instead of hundreds of tensors.

Byte arrays go through an object store without a copy, in any dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some tensors in one array."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """Of all of them, such as `float32`."""
    offsets: tuple[int, ...]
    """Of each one, in bytes."""
    data: np.ndarray
    """`(bytes,)` uint8."""


def plan_buckets(sizes: Sequence[int], max_bytes: int) -> list[range]:
    """Consecutive tensors (by their sizes in bytes) in buckets of at most `max_bytes`; a bigger one stands alone."""
    plan: list[range] = []
    begin, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and filled + size > max_bytes:
            plan.append(range(begin, index))
            begin, filled = index, 0
        filled += size
    if begin < len(sizes):
        plan.append(range(begin, len(sizes)))
    return plan


def pack(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> WeightBucket:
    """Copy named tensors into one bucket, converted to `dtype`."""
    named = list(tensors)
    offsets, end = [], 0
    for _, tensor in named:
        offsets.append(end)
        size = tensor.numel() * dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    data = torch.empty(end, dtype=torch.uint8)
    for offset, (_, tensor) in zip(offsets, named, strict=True):
        flat = data[offset : offset + tensor.numel() * dtype.itemsize].view(dtype)
        flat.copy_(tensor.detach().reshape(-1))
    names = tuple(name for name, _ in named)
    shapes = tuple(tuple(tensor.shape) for _, tensor in named)
    return WeightBucket(names, shapes, str(dtype).removeprefix("torch."), tuple(offsets), data.numpy())


def pack_as_they_come(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[WeightBucket]:
    """Buckets as `plan_buckets` plans them, of tensors in one dtype whose sizes are not known beforehand. At most one
    bucket's tensors are held."""
    held: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        if held and filled + tensor.nbytes > max_bytes:
            yield pack(held, held[0][1].dtype)
            held, filled = [], 0
        held.append((name, tensor))
        filled += tensor.nbytes
    if held:
        yield pack(held, held[0][1].dtype)


def unpack(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors, as views of the bucket's array: read them, do not change them."""
    dtype = getattr(torch, bucket.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the array is read-only is the point
        data = torch.from_numpy(bucket.data)
    for name, shape, offset in zip(bucket.names, bucket.shapes, bucket.offsets, strict=True):
        count = int(np.prod(shape, dtype=np.int64))
        yield name, data[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)
