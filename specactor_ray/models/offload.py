"""Tensors of a model and its optimizer in host memory, while others use the device."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn


def held_by(*models: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[torch.Tensor]:
    """The tensors of models and of an optimizer's state; numbers of the latter stay on their device."""
    for model in models:
        yield from model.parameters()
        yield from model.buffers()
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


@torch.no_grad()
def offload(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors to host memory, in place, and return the device's to its driver: other processes can have it then.
    The host's memory is page-locked, which makes copies several times faster."""
    for tensor in tensors:
        if tensor.is_cuda:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            tensor.data = host.copy_(tensor, non_blocking=True)
    return_memory()


@torch.no_grad()
def reload(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move tensors to a device, in place."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize()


def return_memory() -> None:
    """Return the memory of dropped tensors from torch to the GPU's driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
