"""Attention over packed rows of different lengths, registered with transformers' AttentionInterface.

The positions of all rows are concatenated into one sequence `(1, N)`: linear layers, norms and embeddings see no
padding. Only attention has to know where a row begins: the model is called with `ragged_batch=RaggedBatch(...)`,
which transformers hands through to this function in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from specactor_ray.errors import ModelLoadError
from specactor_ray.models.ragged_cache import CacheRow, LayerShape, RaggedCache
from specactor_ray.ragged import begins, places

ATTENTION_NAME = "specactor_ragged"
_BATCHED_MAX_QUERY = 64
"""Rows with more new positions than this (prefill chunks) are attended to one by one even on a GPU."""


class RaggedBatch:
    """The rows of one forward: which packed positions and which cache slots belong to which row.

    Args:
        cache: The pool; None in the probing forward that finds out the shapes.
        rows: The cache row of each row, with room reserved for its new tokens.
        counts: New positions of each row, in packed order.
        padding: Packed positions at the end that belong to no row.
        batched: Attend to all short rows in one padded call (few launches, for GPUs) instead of one call per row.
    """

    def __init__(
        self,
        cache: RaggedCache | None,
        rows: Sequence[CacheRow],
        counts: Sequence[int],
        padding: int,
        device: torch.device,
        batched: bool,
    ) -> None:
        self.cache, self.rows, self.counts, self.padding = cache, rows, counts, padding
        self.device = device
        self.batched = batched
        self.seen_shapes: dict[int, LayerShape] = {}
        *self.starts, self.num_tokens = begins(np.array(counts, np.int64)).tolist()
        ends = np.array([row.offset + row.length for row in rows], np.int64)
        self.slots = torch.from_numpy(places(ends, np.array(counts, np.int64))).to(device)
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self._gathers: dict[int | None, _Gather] = {}

    def mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask `(count, length)` of one row, None where causality alone says it; made once per forward."""
        key = (index, window)
        if key not in self._masks:
            count, total = self.counts[index], self.rows[index].length + self.counts[index]
            self._masks[key] = _causal_mask(count, total, window, dtype, self.device)
        return self._masks[key]

    def gather(self, window: int | None, dtype: torch.dtype) -> _Gather:
        """Index tensors of the batched path; made once per forward."""
        if window not in self._gathers:
            self._gathers[window] = _Gather(self, window, dtype)
        return self._gathers[window]


def _causal_mask(
    count: int, total: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Additive mask of the last `count` of `total` positions: each sees itself and what is before, in its window."""
    if count == 1 and (window is None or total <= window):
        return None
    query = torch.arange(total - count, total, device=device).unsqueeze(1)
    key = torch.arange(total, device=device).unsqueeze(0)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(count, total, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


class _Gather:
    """Padded index tensors over the short rows: one attention call for all of them."""

    def __init__(self, batch: RaggedBatch, window: int | None, dtype: torch.dtype) -> None:
        self.indices = [i for i, count in enumerate(batch.counts) if count <= _BATCHED_MAX_QUERY]
        if not self.indices:
            return
        device = batch.device
        lengths = [batch.rows[i].length + batch.counts[i] for i in self.indices]
        longest, queries = max(lengths), max(batch.counts[i] for i in self.indices)
        offsets = torch.tensor([batch.rows[i].offset for i in self.indices], device=device).unsqueeze(1)
        total = torch.tensor(lengths, device=device).unsqueeze(1)
        key = torch.arange(longest, device=device).unsqueeze(0)
        self.slots = offsets + torch.minimum(key, total - 1)
        starts = torch.tensor([batch.starts[i] for i in self.indices], device=device).unsqueeze(1)
        counts = torch.tensor([batch.counts[i] for i in self.indices], device=device).unsqueeze(1)
        query = torch.arange(queries, device=device).unsqueeze(0)
        self.queries = starts + torch.minimum(query, counts - 1)
        self.valid = query < counts
        position = (total - counts + query).unsqueeze(2)
        hidden = (key.unsqueeze(1) > position) | (key.unsqueeze(1) >= total.unsqueeze(2))
        if window is not None:
            hidden |= key.unsqueeze(1) <= position - window
        hidden &= self.valid.unsqueeze(2)
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        self.targets = self.queries[self.valid]


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    ragged_batch: RaggedBatch | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows. `query` `(1, heads, N, dim)`, `key`/`value` `(1, kv_heads, N, dim)`.

    Returns:
        `(1, N, heads, value_dim)` and None.

    Raises:
        ModelLoadError: The model does not hand its keyword arguments through to attention.
    """
    if ragged_batch is None:
        raise ModelLoadError(
            f"{type(module).__name__} does not pass keyword arguments to its attention, so this engine cannot serve it"
        )
    batch, layer = ragged_batch, int(module.layer_idx)  # type: ignore[arg-type]
    attend = _Attend(scaling, sliding_window, softcap, s_aux)
    if batch.cache is None:
        batch.seen_shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        mask = _causal_mask(key.shape[2], key.shape[2], sliding_window, query.dtype, query.device)
        return attend(query, key, value, mask).transpose(1, 2), None
    used = batch.num_tokens
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys.index_copy_(1, batch.slots, key[0, :, :used])
    values.index_copy_(1, batch.slots, value[0, :, :used])
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    singles: Sequence[int] = range(len(batch.rows))
    if batch.batched:
        _attend_batched(attend, batch, query, keys, values, output)
        singles = [i for i, count in enumerate(batch.counts) if count > _BATCHED_MAX_QUERY]
    for i in singles:
        _attend_row(attend, batch, i, query, keys, values, output)
    return output, None


def _attend_row(
    attend: _Attend,
    batch: RaggedBatch,
    index: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
) -> None:
    row, count, start = batch.rows[index], batch.counts[index], batch.starts[index]
    begin, end = row.offset, row.offset + row.length + count
    mask = batch.mask(index, attend.window, query.dtype)
    q = query[:, :, start : start + count]
    attended = attend(q, keys[None, :, begin:end], values[None, :, begin:end], mask)
    output[0, start : start + count] = attended[0].transpose(0, 1)


def _attend_batched(
    attend: _Attend,
    batch: RaggedBatch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
) -> None:
    gather = batch.gather(attend.window, query.dtype)
    if not gather.indices:
        return
    q = query[0][:, gather.queries].transpose(0, 1)
    k = keys[:, gather.slots].transpose(0, 1)
    v = values[:, gather.slots].transpose(0, 1)
    attended = attend(q, k, v, gather.mask.unsqueeze(1)).transpose(1, 2)
    output[0, gather.targets] = attended[gather.valid]


class _Attend:
    """Scaled dot-product attention with the extras some models ask for.

    Takes `(rows, heads, queries, dim)` queries, `(rows, kv_heads, keys, dim)` keys and values, and an additive mask
    broadcastable to `(rows, heads, queries, keys)`; returns `(rows, heads, queries, value_dim)`.
    """

    def __init__(
        self, scaling: float | None, window: int | None, softcap: float | None, sinks: torch.Tensor | None
    ) -> None:
        self.scaling, self.window, self.softcap, self.sinks = scaling, window, softcap, sinks

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.softcap is not None or self.sinks is not None:
            return self._explicit(q, k, v, mask)
        rows, heads, queries, dim = q.shape
        kv_heads = k.shape[1]
        if queries == 1 and heads != kv_heads and mask is None:
            # The heads that share keys become query positions: one read of the keys serves the whole group.
            folded = q.view(rows, kv_heads, heads // kv_heads, dim)
            out = F.scaled_dot_product_attention(folded, k, v, scale=self.scaling)
            return out.reshape(rows, heads, 1, v.shape[3])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, enable_gqa=heads != kv_heads)

    def _explicit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Written out: with tanh soft-capping (Gemma 2) and attention sinks (one extra logit per head)."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[3] ** -0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores + mask
        if self.sinks is not None:
            sink = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
            scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        return torch.matmul(weights[..., : k.shape[2]], v)


def register() -> str:
    """Make `ragged_attention` known to transformers; returns its name. Harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, ragged_attention)
    return ATTENTION_NAME
