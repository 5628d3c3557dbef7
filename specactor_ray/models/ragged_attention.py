"""Attention over packed rows of different lengths, registered with transformers' AttentionInterface.

The positions of all rows are concatenated into one sequence `(1, N)`: linear layers, norms and embeddings see no
padding. Only attention has to tell rows apart: the model is called with `ragged_batch=RaggedBatch(...)`, which
transformers hands through to this function in every layer. Nothing here waits for the device.

All rows are one call that reads the pages in place: compiled by us on CPUs, FlashAttention on GPUs
(`torch.nn.attention.varlen`). What FlashAttention refuses is a masked call over gathered keys.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from specactor_ray.errors import ModelLoadError
from specactor_ray.fallbacks import fall_back
from specactor_ray.models.cpu_attention import PageRows, Rotary, attend_pages, store_pages
from specactor_ray.models.paged_cache import Groups, LayerShape, PagedCache
from specactor_ray.ragged import begins, places

logger = logging.getLogger(__name__)

ATTENTION_NAME = "specactor_ragged"
_LENGTH_STEP = 128
"""Masked calls are this many keys long, or a multiple: backends that plan per shape then rarely meet a new one."""
_LEAST_QUERIES = 64
"""Rows with up to so many new positions share a masked call; longer ones one with rows of up to twice their length."""

_LEAST_SAVED = 64 << 20
"""Bytes of keys and values in a layer that have to be saved by reading common pages once: they take a GPU about as long
as the launches of gathering and merging. An estimate."""


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """How a layer attends, beside causality."""

    scaling: float
    """Factor of the products of queries and keys."""
    window: int | None
    """Newest positions that are seen, the own one included; None sees all."""
    softcap: float | None
    """Bound of the scores, by a hyperbolic tangent (Gemma 2)."""
    sinks: torch.Tensor | None
    """`(heads,)`: scores of a key without a value (GPT-OSS)."""


class RaggedBatch:
    """The rows of one forward. Its arrays are made once, and reach the device in one copy.

    Args:
        cache: Of the model.
        rows: int `(n,)`, each with room for its new tokens.
        counts: int64 `(n,)` new tokens of each row, at least 1.
        arrays: Whatever else the forward needs on the device.

    Raises:
        ValueError: A row has no room, so that it would write into pages of others.
    """

    def __init__(self, cache: PagedCache, rows: np.ndarray, counts: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        self.cache, self.counts = cache, counts
        cached, size = cache.lengths[rows], cache.page_size
        self.starts = begins(counts)
        """int64 `(n + 1,)`: where the queries of each row begin."""
        self.lengths = cached + counts
        """int64 `(n,)`: keys of each row."""
        if (self.lengths > cache.room(rows)).any():
            raise ValueError("a row has no room for its new tokens; reserve it first")
        self.pages = cache.page_table(rows, self.lengths)
        """int32 `(n, most pages)`."""
        self.shared = cache.groups(rows)
        """Rows that are forks of each other; None where there are none."""
        self.num_tokens = int(self.starts[-1])
        self.most_queries, self.most_keys = int(counts.max()), int(self.lengths.max())
        positions = places(cached, counts)
        slots = self.pages[np.repeat(np.arange(len(rows)), counts), positions // size] * np.int64(size)
        per_row = (self.starts, begins(self.lengths), self.lengths, self.pages)
        on_device = to_device(
            (slots + positions % size, *arrays, *(array.astype(np.int32) for array in per_row)), cache.device
        )
        self.slots, self.arrays = on_device[0], on_device[1 : 1 + len(arrays)]
        self.device_starts, self.device_key_starts, self.device_lengths, self.device_pages = on_device[-4:]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Store new keys and values, and attend. Shapes as in `ragged_attention`.

        Args:
            rotary: Cosines and sines `(N, angles)` by which queries and keys are still to be rotated; on CPUs alone.
        """
        cache, used = self.cache, self.num_tokens
        attention = attention_for(cache, query.shape[1], LayerShape(key.shape[1], key.shape[3], value.shape[3]), rules)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if attention is attend_on_cpu:
            store_pages(key, value, cache.keys[layer], cache.values[layer], self.slots, rotary)
            return attend_on_cpu(self, layer, query, rules, rotary)[None]
        for pool, new in ((cache.keys[layer], key), (cache.values[layer], value)):
            pool.flatten(0, 1).index_copy_(0, self.slots, new[:used])
        return attention(self, layer, query, rules)[None]

    @functools.cached_property
    def page_rows(self) -> PageRows:
        """What attention on CPUs reads."""
        return PageRows(self.pages, self.starts, self.lengths, self.shared)

    @functools.cached_property
    def common(self) -> CommonPages | None:
        """What attention on GPUs reads where rows have pages in common and reading them once pays."""
        common = None if self.shared is None else CommonPages(self, self.shared)
        least = _LEAST_SAVED * len(self.cache.keys)
        return common if common is not None and common.saved * self.cache.bytes_per_token >= least else None

    @functools.cached_property
    def groups(self) -> list[_Group]:
        """Rows of like counts, which share a masked call."""
        sizes = np.frexp(np.maximum(self.counts - 1, _LEAST_QUERIES - 1))[1]
        return [_Group(self, np.flatnonzero(sizes == size)) for size in np.unique(sizes)]


class ShapeProbe:
    """Takes the place of a batch in a forward that finds out the shapes of all layers."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays on a device, in one copy that nothing waits for."""
    words = begins(np.array([-(-array.nbytes // 8) for array in arrays]))
    packed = torch.empty(int(words[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    spans = list(zip(arrays, words[:-1].tolist(), words[1:].tolist(), strict=True))
    for array, begin, end in spans:
        packed.numpy()[begin:end].view(array.dtype)[: array.size] = array.ravel()
    packed = packed.to(device, non_blocking=True)
    return [
        packed[begin:end].view(getattr(torch, array.dtype.name))[: array.size].view(array.shape)
        for array, begin, end in spans
    ]


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    ragged_batch: RaggedBatch | ShapeProbe | None = None,
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
    rules = AttentionRules(
        1 / math.sqrt(query.shape[3]) if scaling is None else scaling, sliding_window, softcap, s_aux
    )
    return ragged_batch.attend(int(module.layer_idx), query, key, value, rules), None  # type: ignore[arg-type]


Attention = Callable[[RaggedBatch, int, torch.Tensor, AttentionRules], torch.Tensor]
"""(batch, layer, queries `(N, heads, dim)`, rules) → `(N, heads, value_dim)`. N counts the padding behind the last row,
where anything may come out."""


def attention_for(cache: PagedCache, heads: int, shape: LayerShape, rules: AttentionRules) -> Attention:
    """What serves a layer."""
    if cache.device.type == "cpu":
        return attend_on_cpu
    extras = "soft-capped scores" if rules.softcap else "attention sinks" if rules.sinks is not None else ""
    refused = why_masked(cache.device, cache.keys[0].dtype, cache.page_size, heads, shape, extras)
    return attend_masked if refused else attend_varlen


def attend_on_cpu(
    batch: RaggedBatch, layer: int, query: torch.Tensor, rules: AttentionRules, rotary: Rotary | None = None
) -> torch.Tensor:
    """An `Attention` of all models on CPUs."""
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    return attend_pages(
        query, keys, values, batch.page_rows,
        scaling=rules.scaling, window=rules.window, softcap=rules.softcap, sinks=rules.sinks, rotary=rotary,
    )  # fmt: skip


# ---- FlashAttention over pages ----


def attend_varlen(batch: RaggedBatch, layer: int, query: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """An `Attention` of models in half precision. Where that saves enough, pages that rows have in common are read
    once."""
    cache, common = batch.cache, batch.common
    if common is not None and rules.window is None:
        keys, values = cache.keys[layer], cache.values[layer]
        shape = LayerShape(keys.shape[2], keys.shape[3], values.shape[3])
        if reads_common_pages_once(cache.device, keys.dtype, cache.page_size, query.shape[1], shape):
            return attend_common(batch, layer, query, rules, common)
    return _attend_whole_rows(batch, layer, query, rules)


def _attend_whole_rows(batch: RaggedBatch, layer: int, query: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    window = (-1 if rules.window is None else rules.window - 1, 0)
    arrays = batch.device_starts, batch.device_key_starts, batch.device_lengths, batch.device_pages
    return _varlen(batch, layer, query, rules, arrays, batch.most_queries, batch.most_keys, window)[0]


def attend_common(
    batch: RaggedBatch, layer: int, query: torch.Tensor, rules: AttentionRules, common: CommonPages
) -> torch.Tensor:
    """The sequences of `common` in one call, then both parts of each grouped query merged."""
    (order, back, *arrays), n = common.on_device, common.num_grouped
    gathered = query.index_select(0, order)
    output, lse = _varlen(batch, layer, gathered, rules, arrays, common.most_queries, common.most_keys, (-1, -1))
    merge(output[n : 2 * n], lse[:, n : 2 * n], output[:n], lse[:, :n])
    return output[n:].index_select(0, back)


def merge(own: torch.Tensor, own_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Attention of the same queries over two sets of keys becomes that over both, in `own`.

    Args:
        own, other: `(N, heads, dim)`.
        own_lse, other_lse: float32 `(heads, N)`: logarithms of the sums of exp(score).
    """
    share = torch.sigmoid(own_lse - other_lse).T[..., None]
    torch.addcmul(own * share, other, 1 - share, out=own)


def _varlen(
    batch: RaggedBatch,
    layer: int,
    query: torch.Tensor,
    rules: AttentionRules,
    arrays: Sequence[torch.Tensor],
    most_queries: int,
    most_keys: int,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and logarithms `(heads, N)` of the sums of exp(score). `arrays`: int32: where the queries and the keys
    of each sequence begin, its keys, its pages. One split of the keys makes a row independent of the others; more give
    wrong results over pages (pytorch issue 194167)."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    starts, key_starts, lengths, pages = arrays
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    output, lse = varlen_attn(
        query,
        keys,
        values,
        starts,
        key_starts,
        most_queries,
        most_keys,
        return_aux=AuxRequest(lse=True),
        scale=rules.scaling,
        window_size=window,
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=lengths,
        block_table=pages,
        num_splits=1,
    )
    return output, lse


class CommonPages:
    """Sequences of a call that reads common pages once: the queries of each group over its common pages, then each
    query over the other pages that it sees. None of them needs causality. Made on the host.

    Args:
        batch: The forward.
        groups: Its rows.
    """

    def __init__(self, batch: RaggedBatch, groups: Groups) -> None:
        size, table, cached = batch.cache.page_size, batch.pages, batch.lengths - batch.counts
        common = np.repeat(groups.pages, np.diff(groups.starts))
        order = np.argsort(common == 0, kind="stable")  # rows with common pages come first
        rows, common = groups.rows[order], common[order]
        counts, sharing = batch.counts[rows], np.flatnonzero(groups.pages)
        queries = places(batch.starts[rows], counts)
        query_rows, skipped = np.repeat(rows, counts), np.repeat(common, counts)
        group_queries = np.add.reduceat(batch.counts[groups.rows], groups.starts[:-1])[sharing]
        lengths = np.concatenate([groups.pages[sharing], places(cached[rows], counts) + 1 - skipped * size])
        lengths[: len(sharing)] *= size
        columns = np.minimum(skipped[:, None] + np.arange(table.shape[1]), table.shape[1] - 1)
        self.num_grouped = int(group_queries.sum())
        self.most_queries, self.most_keys = int(group_queries.max(initial=1)), int(lengths.max())
        self.saved = int(batch.lengths.sum() - lengths.sum())
        """Keys that a call over whole rows reads beyond those of this call."""
        self._device = batch.cache.device
        sequences = (
            begins(np.concatenate([group_queries, np.ones(len(queries), np.int64)])), begins(lengths), lengths,
            np.concatenate([table[groups.rows[groups.starts[sharing]]], table[query_rows[:, None], columns]]),
        )  # fmt: skip
        self._host = (
            np.concatenate([queries[: self.num_grouped], queries]),
            np.argsort(queries),
            *(array.astype(np.int32) for array in sequences),
        )

    @functools.cached_property
    def on_device(self) -> list[torch.Tensor]:
        """int64 `(grouped + queries,)`: query of each place of the call; int64 `(queries,)`: place of each query,
        counted behind the grouped ones; the arrays of `_varlen`."""
        return to_device(self._host, self._device)


@functools.cache
def reads_common_pages_once(
    device: torch.device, dtype: torch.dtype, page_size: int, heads: int, shape: LayerShape
) -> bool:
    """Whether `attend_common` gives what a call over whole rows gives, by trying it."""
    cache = PagedCache([shape], 4 * shape.bytes(dtype) * page_size, dtype, device, page_size)
    row = cache.open(page_size + 2)
    assert row is not None
    first = int(cache.page_table(np.array([row]), np.array([1]))[0, 0])
    for pool, stored in ((cache.keys[0], 0.125), (cache.values[0], 128.0)):  # few keys with large values
        pool.fill_(stored)
        pool[first] = 0.0
    cache.lengths[row] = page_size + 1
    rows = np.array([row, *cache.fork(np.array([row]), np.array([page_size])).tolist()])
    cache.reserve_rows(rows, np.array([page_size + 2, page_size + 3]))
    batch = RaggedBatch(cache, rows, np.array([1, 3]), ())
    assert batch.shared is not None
    query, rules = torch.randn(4, heads, shape.key_dim, device=device).to(dtype), AttentionRules(1.0, None, None, None)
    try:
        together = attend_common(batch, 0, query, rules, CommonPages(batch, batch.shared))
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    else:
        close = torch.allclose(together, _attend_whole_rows(batch, 0, query, rules), atol=0.05, rtol=0.05)
        reason = "" if close else "it gives other results"
    if reason:
        fall_back(logger, f"Attention of {heads} heads reads the common pages of branches for each: {reason}")
    return not reason


@functools.cache
def why_masked(
    device: torch.device, dtype: torch.dtype, page_size: int, heads: int, shape: LayerShape, extras: str
) -> str:
    """Why `attend_varlen` cannot serve such layers, by trying it; empty where it can. The log has it once."""
    reason = extras or _refusal(device, dtype, page_size, heads, shape)
    if reason:
        what = f"Attention of {heads} heads of {shape.key_dim} takes a mask over gathered keys"
        fall_back(logger, f"{what}: {reason}")
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every shape
    return reason


def _refusal(device: torch.device, dtype: torch.dtype, page_size: int, heads: int, shape: LayerShape) -> str:
    """What `attend_varlen` answers to a row of one token. What lies behind that token in its page must not matter."""
    cache = PagedCache([shape], shape.bytes(dtype) * page_size, dtype, device, page_size)
    row = cache.open(1)
    assert row is not None
    for pool, stored in ((cache.keys[0], 0), (cache.values[0], 1)):
        pool.fill_(math.nan)
        pool[0, 0] = stored
    batch = RaggedBatch(cache, np.array([row]), np.ones(1, np.int64), ())
    query = torch.zeros(1, heads, shape.key_dim, dtype=dtype, device=device)
    try:
        result = attend_varlen(batch, 0, query, AttentionRules(1.0, None, None, None))
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return "" if bool((result == 1).all()) else "it reads behind the end of a row"


# ---- a mask over gathered keys ----


class _Group:
    """Rows that share a masked call, padded to the longest of them: its index lists, made on the host.

    Args:
        batch: The forward.
        rows: int `(rows,)`, by their places in the batch.
    """

    def __init__(self, batch: RaggedBatch, rows: np.ndarray) -> None:
        counts, lengths = batch.counts[rows, None], batch.lengths[rows, None]
        queries, keys = int(counts.max()), -(-int(lengths.max()) // _LENGTH_STEP) * _LENGTH_STEP
        self.rows, self.num_queries, self.num_keys = len(rows), queries, keys
        query, key = np.minimum(np.arange(queries), counts - 1), np.minimum(np.arange(keys), lengths - 1)
        size = batch.cache.page_size
        slots = np.take_along_axis(batch.pages[rows], key // size, axis=1) * np.int64(size) + key % size
        packed, valid = batch.starts[rows, None] + query, np.arange(queries) < counts
        self.slots, self.queries, self.positions, self.sources, self.targets = to_device(
            (slots.ravel(), packed.ravel(), lengths - counts + query, np.flatnonzero(valid), packed[valid]),
            batch.cache.device,
        )
        self._masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = {}

    def mask(self, window: int | None, shared: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `(rows, 1, shared * queries, keys)` for `shared` heads with the same keys."""
        if (window, shared, dtype) not in self._masks:
            key = torch.arange(self.num_keys, device=self.slots.device)
            hidden = key > self.positions[..., None]
            if window is not None:
                hidden |= key <= self.positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, float("-inf"))
            self._masks[window, shared, dtype] = mask.repeat(1, shared, 1)[:, None]
        return self._masks[window, shared, dtype]


def attend_masked(batch: RaggedBatch, layer: int, query: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """An `Attention` of all models. Heads that share keys become queries: keys are not repeated for them."""
    keys, values = batch.cache.keys[layer].flatten(0, 1), batch.cache.values[layer].flatten(0, 1)
    heads, kv_heads = query.shape[1], keys.shape[1]
    output = query.new_zeros(len(query), heads, values.shape[2])
    for group in batch.groups:
        k, v = (
            pool.index_select(0, group.slots).unflatten(0, (group.rows, group.num_keys)).transpose(1, 2)
            for pool in (keys, values)
        )
        q = query.index_select(0, group.queries).view(group.rows, group.num_queries, kv_heads, heads // kv_heads, -1)
        mask = group.mask(rules.window, heads // kv_heads, query.dtype)
        attended = _attend(q.permute(0, 2, 3, 1, 4).flatten(2, 3), k, v, mask, rules)
        attended = attended.unflatten(2, (-1, group.num_queries)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
        output.index_copy_(0, group.targets, attended.index_select(0, group.sources))
    return output


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rules: AttentionRules
) -> torch.Tensor:
    """Queries `(rows, kv_heads, shared * queries, dim)`, keys and values `(rows, kv_heads, keys, dim)`."""
    if rules.softcap is None and rules.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rules.scaling)
    scores = torch.matmul(q, k.transpose(2, 3)) * rules.scaling
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores + mask
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores.dtype).view(q.shape[1], -1, 1)
        sinks = sinks.expand(-1, -1, q.shape[2] // sinks.shape[1]).reshape(1, q.shape[1], q.shape[2], 1)
        scores = torch.cat([scores, sinks.expand(len(q), -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)


def register() -> str:
    """Make `ragged_attention` known to transformers; returns its name. Harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, ragged_attention)
    return ATTENTION_NAME
