"""Attention over several sequences in one row without padding, registered with transformers' AttentionInterface: the
trainer's. Linear layers, norms and embeddings see real tokens only, and attention is the causal fast path of each
sequence. What it does not compute (windows, soft caps, sinks) it refuses by a ValueError, never leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PACKED_NAME = "specactor_packed"
_NOT_COMPUTED = ("sliding_window", "softcap", "s_aux", "position_bias")
_HALVES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
"""Widest head, in numbers, of the kernel of flash attention."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The sequences of one row; passed to the model as `packed_row`, which every layer hands to `packed_attention`."""

    lengths: list[int]
    """Tokens of each sequence."""
    starts: torch.Tensor
    """int32 `(n + 1,)` on the device: begin of each sequence, and the end of the last one."""

    @classmethod
    def of(cls, lengths: torch.Tensor) -> PackedRow:
        """`lengths`: int64 `(n,)`."""
        starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(lengths.tolist(), starts)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_row: PackedRow | None = None,
    **rules: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence. `query` `(1, heads, N, dim)`, `key`/`value` `(1, kv_heads, N, dim)`.

    Returns:
        `(1, N, heads, value_dim)` and None.

    Raises:
        ValueError: The layer has a rule that this function does not compute, or gets no `packed_row`.
    """
    asked = [name for name in _NOT_COMPUTED if rules.get(name) is not None]
    if packed_row is None or attention_mask is not None or asked:
        raise ValueError(f"{type(module).__name__} cannot attend in packed rows {asked}")
    grouped, lengths = query.shape[1] != key.shape[1], packed_row.lengths
    if (kind := _kind_of_kernel(query, value)) is not None:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x[0].transpose(0, 1).to(kind) for x in (query, key, value))
        starts, longest = packed_row.starts, max(lengths)
        found: Any = varlen_attn(
            q, k, v, starts, starts, longest, longest, window_size=(-1, 0), scale=scaling, enable_gqa=grouped
        )
        return found[None], None
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    attend: Any = nn.functional.scaled_dot_product_attention
    outputs = [attend(*one, is_causal=True, scale=scaling, enable_gqa=grouped) for one in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _kind_of_kernel(query: torch.Tensor, value: torch.Tensor) -> torch.dtype | None:
    """Data type in which one kernel computes all sequences; None: only one sequence after the other."""
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    width = query.shape[3]
    fits = width == value.shape[3] and width % 8 == 0 and width <= _WIDEST_HEAD
    return kind if query.is_cuda and kind in _HALVES and fits else None


def _no_mask(local_size: int | None = None, use_vmap: bool = False, **_: Any) -> None:
    """The mask of layers that see all tokens before their own, by transformers' AttentionMaskInterface."""
    if local_size is not None or use_vmap:
        raise ValueError("packed rows have no masks of windows or chunks")


def register() -> None:
    """Register `packed_attention` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_NAME, packed_attention)
    AttentionMaskInterface.register(PACKED_NAME, _no_mask)
