"""Stage `attention`: one layer of the attention that the `hf` engine uses, over a cache with random keys and values.

A kernel that plans by exact shape pays for every new length, and an engine's longest row has one at every step.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile

from specactor_ray.benchmarks.gpu_check.settings import Settings
from specactor_ray.benchmarks.gpu_check.stages import Stage, synchronize
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention


def measure_attention(stage: Stage) -> None:
    """Fill a point per number of rows and of queries, the new tokens of each: ms of the first call at each of some new
    lengths (the longest) and of the second (median); of a layer once a step's arrays are made, with GB/s of keys and
    values; and how far a row's outputs are from those of the row alone, and of its queries one by one, relative to the
    largest (0: the same bits)."""
    settings, task = stage.settings, Attention(stage.settings)
    lengths = settings.attention_lengths

    def measure(rows: int, queries: int) -> str:
        first, again = [], []
        stage.seconds(functools.partial(task.step, rows, lengths[0] - 1, queries))  # loads kernels
        for index, length in enumerate(lengths):
            call = functools.partial(task.step, rows, length, queries)
            first.append(stage.seconds(call))
            again.append(stage.step(call, index, len(lengths)))
        layer = functools.partial(task.attend, task.batch(rows, lengths[0], queries), queries)
        layer_s = stage.median_s(layer)
        point = {
            "new length ms": 1e3 * max(first),
            "again ms": 1e3 * statistics.median(again),
            "layer ms": 1e3 * layer_s,
            "gb_per_s": 1e-9 * rows * lengths[0] * task.cache.bytes_per_token / layer_s,
            "GB": stage.peak_gb(layer),
            "row alone": task.difference(rows, queries, [queries]),
            "one by one": task.difference(rows, queries, [1] * queries),
            "kernel": kernel_of(layer, settings.device),
        }
        stage.point({"rows": rows, "queries": queries}, **point)
        return f"a new length {1e3 * max(first):.3g} ms, again {point['again ms']:.3g} ms, {point['kernel']}"

    stage.each(itertools.product(settings.attention_rows, settings.attention_queries), measure)


class Attention:
    """The product's attention in one layer, with queries, keys and values that are functions of row and position."""

    def __init__(self, settings: Settings) -> None:
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        shape, rows, queries = settings.shapes[0], max(settings.attention_rows), max(settings.attention_queries)
        self._tokens, longest = settings.attention_lengths[0], settings.attention_lengths[-1] + queries
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        layer = LayerShape(kv_heads, dim, dim)
        self.cache = PagedCache([layer], rows * layer.bytes(dtype) * (longest + 256), dtype, device)
        for pool in (*self.cache.keys, *self.cache.values):
            pool.normal_()
        self._rows = np.array([self.cache.open(longest) for _ in range(rows)])
        self._new: list[Tensor] = [
            torch.randn(count, rows, queries, dim, device=device, dtype=dtype) for count in (heads, kv_heads, kv_heads)
        ]

    def batch(self, rows: int, length: int, queries: int) -> RaggedBatch:
        """The arrays of a step in which the first `rows` rows, of `length` tokens each, take `queries` more."""
        self.cache.lengths[self._rows] = length
        return RaggedBatch(self.cache, self._rows[:rows], np.full(rows, queries, np.int64), ())

    def attend(self, batch: RaggedBatch, queries: int, begin: int = 0) -> Tensor:
        """(rows, queries, heads, D) of queries `begin` to `begin + queries` of the batch's rows."""
        rows, end = len(batch.counts), begin + queries
        query, key, value = (one[:, :rows, begin:end].flatten(1, 2)[None] for one in self._new)
        module: Any = SimpleNamespace(layer_idx=0)
        return ragged_attention(module, query, key, value, None, ragged_batch=batch)[0][0].unflatten(0, (rows, queries))

    def step(self, rows: int, length: int, queries: int) -> Tensor:
        """A step's arrays, and one layer."""
        return self.attend(self.batch(rows, length, queries), queries)

    def difference(self, rows: int, queries: int, parts: list[int]) -> float:
        """How far outputs of the first row in a batch are from those of the row alone, its queries in these parts."""
        together, alone, begin = self.step(rows, self._tokens, queries)[0].clone(), [], 0
        for count in parts:
            alone.append(self.attend(self.batch(1, self._tokens + begin, count), count, begin)[0].clone())
            begin += count
        return float((torch.cat(alone) - together).abs().max() / together.abs().max())


def kernel_of(call: Callable[[], object], device: str) -> str:
    """The kernel that takes a GPU longest; `own` on a CPU."""
    with profile() as seen:
        call()
        synchronize(device)
    longest = max(seen.key_averages(), key=lambda event: event.self_device_time_total)
    return longest.key[:60] if longest.self_device_time_total else "own"
