"""Copies from the host to a device, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # lookups draw noise without torch
    import torch


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device at once, without a wait. The results are parts of one buffer."""
    packed, inputs = staging(arrays, device)
    for target, array in zip(inputs, arrays, strict=True):
        target[...] = array
    return parts(packed.to(device, non_blocking=True), arrays)


def staging(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, list[np.ndarray]]:
    """A buffer of the host, int64, from which a copy to the device does not wait, and its parts for such arrays."""
    import torch

    words = sum(-(-array.nbytes // 8) for array in arrays)
    packed = torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")
    return packed, parts(packed.numpy(), arrays)


def parts(packed: Any, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Parts of an int64 buffer with the shapes and data types of `arrays`, each at a multiple of 8 bytes."""
    import torch

    found, end = [], 0
    for array in arrays:
        begin, end = end, end - (-array.nbytes // 8)
        dtype = array.dtype if isinstance(packed, np.ndarray) else getattr(torch, array.dtype.name)
        found.append(packed[begin:end].view(dtype)[: array.size].reshape(array.shape))
    return found


def device_bytes() -> float:
    """Memory of the first visible GPU."""
    import torch

    return float(torch.cuda.get_device_properties("cuda").total_memory)
