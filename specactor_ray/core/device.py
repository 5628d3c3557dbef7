"""Copies from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.core.ragged import begins

if TYPE_CHECKING:  # lookups draw noise without torch
    import torch


def to_device(
    arrays: Sequence[np.ndarray], device: torch.device, buffer: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Copy arrays to a device at once, without a wait. The results are parts of one buffer, each at a multiple of 8
    bytes. `buffer`: int64 there, as long as they need or longer; None: a new one."""
    import torch

    words = begins(np.array([-(-array.nbytes // 8) for array in arrays]))
    packed = torch.empty(int(words[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    spans = list(zip(arrays, words[:-1].tolist(), words[1:].tolist(), strict=True))
    for array, begin, end in spans:
        packed.numpy()[begin:end].view(array.dtype)[: array.size] = array.ravel()
    if buffer is None:
        packed = packed.to(device, non_blocking=True)
    else:
        packed = buffer[: len(packed)].copy_(packed, non_blocking=True)
    return [
        packed[begin:end].view(getattr(torch, array.dtype.name))[: array.size].view(array.shape)
        for array, begin, end in spans
    ]
