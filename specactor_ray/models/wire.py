"""Tensors as numpy arrays, which Ray passes without a copy. numpy has no bfloat16, so its bits are sent as int16."""

from __future__ import annotations

import numpy as np
import torch


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """`(n, width)` float32, float16 or bfloat16, on any device → a new array."""
    tensor = tensor.detach().to("cpu").contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_wire(array: np.ndarray) -> torch.Tensor:
    """The tensor of an array, read-only if the array is."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
