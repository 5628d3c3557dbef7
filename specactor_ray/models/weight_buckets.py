"""Transport of weights from the trainer to actors: a few large byte arrays instead of hundreds of tensors.

An object store passes byte arrays without a copy, in any dtype. numpy has no bfloat16, so its bits are sent as int16.
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
    """Several tensors in one array."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """Data type of all tensors, such as `float32`."""
    offsets: tuple[int, ...]
    """Offset of each tensor in bytes."""
    data: np.ndarray
    """uint8 `(bytes,)`: the tensors."""


def plan_buckets(sizes: Sequence[int], max_bytes: int) -> list[range]:
    """Ranges of consecutive tensors (by their sizes in bytes) of at most `max_bytes`; a larger tensor stands alone."""
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
    """Buckets by the rule of `plan_buckets`, for tensors in one dtype whose sizes are not known beforehand. At most one
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
    """The named tensors as read-only views of the bucket's array."""
    dtype = getattr(torch, bucket.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the array is read-only, which is intended
        data = torch.from_numpy(bucket.data)
    for name, shape, offset in zip(bucket.names, bucket.shapes, bucket.offsets, strict=True):
        count = int(np.prod(shape, dtype=np.int64))
        yield name, data[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """`(n, width)` float32, float16 or bfloat16, on any device → a new array."""
    tensor = tensor.detach().to("cpu").contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_wire(array: np.ndarray) -> torch.Tensor:
    """The tensor of an array, read-only if the array is."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
