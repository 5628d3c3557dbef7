"""Attention over pages on CPUs: all rows in one compiled call, each query alone in float32; and norms and gates.

A query reads its keys in blocks of 64 that begin at fixed positions of its row, and every sum has one order. So the
bits of an output depend on the query and its own keys alone: not on other rows, the number of queries, the place of
pages or the threads. Threads are those of PyTorch's OpenMP pool: a second pool would compete with it.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.core.ragged import padded
from specactor_ray.models.shapes import ROW_BYTES
from specactor_ray.models.threads import KINDS, run, workspace

_WORK_PER_THREAD = 200_000
"""Multiplications (queries x heads x keys x dim) per thread from which another thread pays: some 10 us."""
_NUMBERS_PER_THREAD = 100_000
"""The same for norms and gates, in numbers."""
_UNBOUNDED = 1 << 40
_STORE, _NORM, _GATE = struct.Struct("=28q"), struct.Struct("=8qdq"), struct.Struct("=5q")

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `(N, angles)` of one layout; they rotate the pairs (i, i + angles / 2) of a head's numbers."""
HeadNorms = tuple[torch.Tensor, torch.Tensor, float, int]
"""Weights of the norms of heads of queries and of keys, epsilon, and what is added to the weights."""


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """Rules of a layer's attention, beside causality."""

    scaling: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Number of newest positions that are seen, the query's own included; None: all."""
    softcap: float | None = None
    """Bound of the scores, by a hyperbolic tangent (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """`(heads,)`: scores of one more key, which has no value (GPT-OSS)."""


class PageRows:
    """The packed rows of a forward and their pages.

    Args:
        pages: int32 `(rows, most pages)`: the pages of each row in the order of its keys.
        starts: int64 `(rows + 1,)`: where each row's queries begin.
        lengths: int64 `(rows,)`: keys of each row, those of its queries included.
    """

    def __init__(self, pages: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._arrays = [np.ascontiguousarray(array) for array in (pages, starts, lengths)]
        self.pages, self.starts, self.lengths = (array.ctypes.data for array in self._arrays)
        self.rows, self.page_columns = pages.shape
        self.queries, self.longest = int(starts[-1]), int(lengths.max(initial=0))


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PageRows,
    rules: AttentionRules,
    rotary: Rotary | None = None,
) -> torch.Tensor:
    """Causal attention of packed rows over a paged cache; query j of n sees its row's keys [0, length - n + j].

    Args:
        query: `(N, heads, dim)` float32 or bfloat16; positions after the last row are padding.
        keys: `(num_pages, page_size, kv_heads, dim)`, one of these dtypes, as in a `PagedCache`: a head's numbers begin
            at a multiple of `ROW_BYTES`, memory up to the next one can be read, and a page has a multiple of 16 tokens.
        values: `(num_pages, page_size, kv_heads, value_dim)`, of the dtype of `keys`, likewise.
        rotary: Rotates the queries.

    Returns `(N, heads, value_dim)` in the dtype of `query`, zeros at padding.
    """
    attention = compiled()
    tokens, heads, dim = query.shape
    page_size, kv_heads, value_dim = values.shape[1:]
    if query.stride(2) != 1:
        query = query.contiguous()
    sinks = None if rules.sinks is None else rules.sinks.detach().to(torch.float32).contiguous()
    window = rules.window or _UNBOUNDED
    output = query.new_empty(tokens, heads, value_dim)
    if rows.queries < tokens:
        output[rows.queries :] = 0
    work = rows.queries * min(rows.longest, window) * heads * dim
    threads = min(torch.get_num_threads(), 1 + work // _WORK_PER_THREAD)
    size, kind = query.element_size(), keys.element_size()
    width, value_width = padded(dim, ROW_BYTES // kind), padded(value_dim)
    scratch_bytes = attention.scratch_bytes(width, value_width, heads // kv_heads)
    call = attention.PACKED.pack(
        0, 0, workspace(threads * scratch_bytes), scratch_bytes,
        query.data_ptr(), *(size * stride for stride in query.stride()[:2]),
        keys.data_ptr(), *(kind * stride for stride in keys.stride()[:3]),
        values.data_ptr(), *(kind * stride for stride in values.stride()[:3]),
        output.data_ptr(), KINDS[query.dtype], KINDS[keys.dtype],
        rows.pages, rows.page_columns, page_size, rows.rows, rows.starts, rows.lengths,
        heads, kv_heads, dim, value_dim, width, value_width,
        window, 0 if sinks is None else sinks.data_ptr(), *_angles(rotary),
        rules.scaling, rules.softcap or 0.0,
    )  # fmt: skip
    run(attention.attend, call, threads)
    return output


def store_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rotary: Rotary | None = None,
) -> None:
    """Write the first keys `(N, kv_heads, dim)`, rotated, and values `(N, kv_heads, value_dim)` of new tokens into
    pages; `slots`, int64 `(tokens,)`: page times page size plus place in the page."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    heads, dim = key.shape[1:]
    value_dim = value.shape[2]
    scratch = workspace(12 * padded(max(dim, value_dim)))
    size, kind = key.element_size(), keys.element_size()
    call = _STORE.pack(
        scratch, len(slots), slots.data_ptr(), keys.shape[1], heads, dim, value_dim,
        key.data_ptr(), *(size * stride for stride in key.stride()[:2]),
        value.data_ptr(), *(size * stride for stride in value.stride()[:2]), KINDS[key.dtype],
        keys.data_ptr(), *(kind * stride for stride in keys.stride()[:3]),
        values.data_ptr(), *(kind * stride for stride in values.stride()[:3]), KINDS[keys.dtype],
        *_angles(rotary),
    )  # fmt: skip
    run(compiled().layers.store_pages, call)


# ---- operators of `layers.py` ----

GATES = ("silu",)


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


@functools.cache
def compiled() -> Any:
    """The compiled attention and `layers` (norms, gates, storing), made at the first call."""
    from specactor_ray.models import _cpu_attention_numba

    return _cpu_attention_numba


def _angles(rotary: Rotary | None) -> tuple[int, int, int, int, int]:
    """Addresses, stride in bytes, kind and count."""
    if rotary is None:
        return 0, 0, 0, 0, 0
    cos, sin = rotary
    return cos.data_ptr(), sin.data_ptr(), cos.element_size() * cos.stride(0), KINDS[cos.dtype], cos.shape[1]
