"""Operators of `layers.py` on CPUs: norms and gates, each in one compiled call."""

from __future__ import annotations

import struct

import torch

from specactor_ray.core.errors import InputError
from specactor_ray.models.cpu_attention import compiled
from specactor_ray.models.threads import KINDS, run

GATES = ("silu",)
_NUMBERS_PER_THREAD = 100_000
"""Numbers per thread from which another thread pays: some 10 us."""
_NORM, _GATE = struct.Struct("=8qdq"), struct.Struct("=5q")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: int) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension. InputError: it is no multiple of 16."""
    dim = x.shape[-1]
    if dim % 16 or weight.shape != x.shape[-1:]:
        raise InputError(f"a norm of {dim} numbers is not compiled")
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    call = _NORM.pack(
        0, count // dim, dim, x.data_ptr(), weight.data_ptr(), out.data_ptr(), KINDS[x.dtype], KINDS[weight.dtype],
        eps, offset,
    )  # fmt: skip
    run(compiled().layers.rms_norm, call, _threads(count))
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """`silu(gate) * up` in the memory of `gate`. InputError: the last dimension is no multiple of 16."""
    count = gate.numel()
    if gate.shape[-1] % 16:
        raise InputError(f"a gate of {gate.shape[-1]} numbers is not compiled")
    call = _GATE.pack(0, count // 16, gate.data_ptr(), up.data_ptr(), KINDS[gate.dtype])
    run(compiled().layers.silu_gate, call, _threads(count))
    return gate


def _threads(numbers: int) -> int:
    return min(torch.get_num_threads(), 1 + numbers // _NUMBERS_PER_THREAD)
