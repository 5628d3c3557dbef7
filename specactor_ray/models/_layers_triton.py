"""Operators of `layers.py` on GPUs, in Triton: norms with the sum before them, gates, and keys and values on their way
into pages, with norms and rotation of heads.

A row, or a token's heads that share keys, has a program of its own, compiled for the sizes of the model alone: its bits
do not depend on the number of rows. Numbers are computed in float32 and rounded once.

Importing this module imports triton. With TRITON_INTERPRET=1 the kernels run on tensors of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specactor_ray.core.errors import InputError
from specactor_ray.models.cpu_attention import HeadNorms, Rotary

GATES = ("silu", "gelu_tanh", "gelu")
_WIDEST_NORM, _GATE_BLOCK = 1 << 16, 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: int, more: torch.Tensor | None = None) -> Any:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension; with `more` the sum `x + more`, and the
    norm of that. InputError: the dimension is too wide, or not that of the weight."""
    columns = x.shape[-1]
    if columns > _WIDEST_NORM or weight.shape != x.shape[-1:]:
        raise InputError(f"a norm of {columns} numbers is not compiled")
    x, block = x.contiguous(), triton.next_power_of_2(columns)
    out, total = torch.empty_like(x), None if more is None else torch.empty_like(x)
    options = {"num_warps": min(max(block // 256, 1), 16), "enable_fp_fusion": False}
    with torch.cuda.device_of(x):
        norm_rows[x.numel() // columns,](
            x, more if more is None else more.contiguous(), weight, total, out, columns, eps, OFFSET=offset,
            BLOCK=block, **options,
        )  # fmt: skip
    return out if more is None else (total, out)


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """`silu(gate) * up`, or with another function of `GATES`; the last dimension has stride 1."""
    columns = gate.shape[-1]
    (gate, up), out = (x.flatten(0, -2) for x in (gate, up)), gate.new_empty(gate.shape)
    with torch.cuda.device_of(gate):
        gate_rows[len(gate), triton.cdiv(columns, _GATE_BLOCK)](
            gate, up, out, columns, gate.stride(0), up.stride(0), KIND=GATES.index(kind), BLOCK=_GATE_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def store_pages(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    slots: torch.Tensor, rotary: Rotary, norms: HeadNorms | None = None,
) -> torch.Tensor:  # fmt: skip
    """`cpu_attention.store_pages` for numbers of stride 1. Returns the queries `(N, heads, dim)`, normed and rotated as
    the keys are; undefined after the last slot."""
    (kv_heads, dim), value_dim, group = key.shape[1:], value.shape[2], query.shape[1] // key.shape[1]
    q_weight, k_weight, eps, offset = (None, None, 0.0, 0) if norms is None else norms
    turned = query.new_empty(query.shape)
    pads = {"GROUP_PAD": group, "PAD": dim, "VALUE_PAD": value_dim}
    with torch.cuda.device_of(key):
        store_heads[len(slots), kv_heads](
            query, key, value, *rotary, q_weight, k_weight, slots, turned, keys, values,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], rotary[0].stride(0), eps,
            GROUP=group, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim, ANGLES=rotary[0].shape[1], OFFSET=offset,
            **{name: triton.next_power_of_2(size) for name, size in pads.items()}, enable_fp_fusion=False,
        )  # fmt: skip
    return turned


@triton.jit
def norm_rows(x, more, weight, total, out, columns, eps, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    c = tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * columns + c, c < columns
    row = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if more is not None:
        row = (row + tl.load(more + at, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, row, mask=mask)
        row = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / columns + eps)
    row = row * scale * (tl.load(weight + c, mask=mask, other=0.0).to(tl.float32) + OFFSET)
    tl.store(out + at, row.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_rows(gate, up, out, columns, gate_row, up_row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns)."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < columns
    x = tl.load(gate + row * gate_row + c, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 sqrt(2 / pi)
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    x = x * tl.load(up + row * up_row + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * columns + c, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _heads(
    source, at, exists, cos, sin, weight, eps,
    DIM: tl.constexpr, PAD: tl.constexpr, ANGLES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """float32 `[heads, PAD]`: heads that begin at `at`, normed if there is a weight, then rotated."""
    HALF: tl.constexpr = ANGLES // 2
    d = tl.arange(0, PAD)
    x = tl.load(source + at[:, None] + d[None, :], mask=exists[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * scale * (tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32) + OFFSET)[None, :]
    mate, turns = tl.where(d < HALF, d + HALF, d - HALF), d < ANGLES
    y = tl.load(source + at[:, None] + mate[None, :], mask=exists[:, None] & turns[None, :], other=0.0).to(tl.float32)
    if weight is not None:
        y = y * scale * (tl.load(weight + mate, mask=turns, other=0.0).to(tl.float32) + OFFSET)[None, :]
    cosine = tl.load(cos + d, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sin + d, mask=turns, other=0.0).to(tl.float32)
    return x * cosine[None, :] + y * tl.where(d < HALF, -sine, sine)[None, :]


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_heads(
    query, key, value, cos, sin, q_weight, k_weight, slots, turned, keys, values,
    q_token, q_head, k_token, k_head, v_token, v_head, angle_token, eps,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_PAD: tl.constexpr,
    PAD: tl.constexpr, VALUE_PAD: tl.constexpr, ANGLES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads of keys)."""
    token, head, one = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, 1)
    slot = tl.load(slots + token) * KV_HEADS + head
    g, d, v = tl.arange(0, GROUP_PAD), tl.arange(0, PAD), tl.arange(0, VALUE_PAD)
    cos += token * angle_token
    sin += token * angle_token
    exists, at = g < GROUP, head * GROUP + g
    x = _heads(query, token * q_token + at * q_head, exists, cos, sin, q_weight, eps, DIM, PAD, ANGLES, OFFSET)
    to = turned + ((token * KV_HEADS * GROUP + at) * DIM)[:, None] + d[None, :]
    tl.store(to, x.to(turned.dtype.element_ty), mask=exists[:, None] & (d < DIM)[None, :])
    at = token * k_token + (head + one) * k_head
    x = _heads(key, at, one == 0, cos, sin, k_weight, eps, DIM, PAD, ANGLES, OFFSET)
    tl.store(keys + slot * DIM + d[None, :], x.to(keys.dtype.element_ty), mask=(d < DIM)[None, :])
    x = tl.load(value + token * v_token + head * v_head + v, mask=v < VALUE_DIM, other=0.0)
    tl.store(values + slot * VALUE_DIM + v, x.to(values.dtype.element_ty), mask=v < VALUE_DIM)
