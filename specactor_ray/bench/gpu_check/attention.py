"""Stage `attention`: one layer of the attention that the `hf` engine uses, over a cache with random keys and values.

A kernel that plans by exact shape pays for every new length, and an engine's longest row has a new length at every
step.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile

from specactor_ray.bench.gpu_check.settings import Settings
from specactor_ray.bench.gpu_check.stages import Stage, synchronize
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention

_PROFILED = 10
"""Number of calls under the profiler."""
_KERNELS = ("attend", "merge")
"""Names of the attention kernels on GPUs."""


def measure_attention(stage: Stage) -> None:
    """Fill a point per cell: ms of the first call at each of some new lengths (the longest) and of the second (median);
    of a layer once a step's arrays are made, the host's part included; of its kernels alone, with GB/s of keys and
    values (on a CPU: of the layer) and their share of what a copy moves; and how far a row's outputs are from those of
    the row alone, and of its queries one by one, relative to the largest (0: the same bits)."""
    settings, task = stage.settings, Attention(stage.settings)
    copy_s = list[float]()

    def measure(rows: int, queries: int, keys: int) -> str:
        if not copy_s:
            source = torch.zeros(settings.copy_bytes, dtype=torch.uint8, device=settings.device)
            target = torch.empty_like(source)
            copy_s.append(stage.median_s(lambda: target.copy_(source)))
        first, again = [], []
        stage.seconds(functools.partial(task.step, rows, keys - 1, queries))  # loads kernels
        for index in range(settings.attention_lengths):
            call = functools.partial(task.step, rows, keys + index, queries)
            first.append(stage.seconds(call))
            again.append(stage.step(call, index, settings.attention_lengths))
        layer = functools.partial(task.attend, task.batch(rows, keys, queries), queries)
        layer_s = stage.median_s(layer)
        kernels_s = kernel_seconds(layer, settings.device)
        kernel_s = sum(seconds for name, seconds in kernels_s.items() if name in _KERNELS)
        rate = 1e-9 * rows * keys * task.cache.bytes_per_token / (kernel_s or layer_s)
        point = {
            "new length ms": 1e3 * max(first),
            "again ms": 1e3 * statistics.median(again),
            "layer ms": 1e3 * layer_s,
            "kernel ms": 1e3 * kernel_s,
            "gb_per_s": rate,
            "of a copy %": 100 * rate * copy_s[0] / (2e-9 * settings.copy_bytes),
            "GB": stage.peak_gb(layer),
            "row alone": task.difference(rows, queries, keys, [queries]),
            "one by one": task.difference(rows, queries, keys, [1] * queries),
            "kernel": max(kernels_s, key=kernels_s.__getitem__) if kernels_s else "own",
        }
        stage.point({"rows": rows, "queries": queries, "keys": keys}, **point)
        return f"a new length {1e3 * max(first):.3g} ms, layer {1e3 * layer_s:.3g} ms, kernels {1e3 * kernel_s:.3g} ms"

    stage.each(settings.attention_cells, measure)


class Attention:
    """The package's attention in one layer, with queries, keys and values that are functions of row and position."""

    def __init__(self, settings: Settings) -> None:
        device, dtype, shape = torch.device(settings.device), getattr(torch, settings.dtype), settings.shapes[0]
        rows, queries = (max(cell[i] for cell in settings.attention_cells) for i in range(2))
        longest = np.zeros(rows, np.int64)
        for count, new, keys in settings.attention_cells:
            longest[:count] = np.maximum(longest[:count], keys + settings.attention_lengths + new)
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        layer = LayerShape(kv_heads, dim, dim)
        self.cache = PagedCache([layer], int((longest + 256).sum()) * layer.bytes(dtype), dtype, device)
        for pool in (*self.cache.keys, *self.cache.values):
            pool.normal_()
        self._rows = np.array([self.cache.open(tokens) for tokens in longest.tolist()])
        self._new: list[Tensor] = [
            torch.randn(count, rows, queries, dim, device=device, dtype=dtype) for count in (heads, kv_heads, kv_heads)
        ]

    def batch(self, rows: int, length: int, queries: int) -> RaggedBatch:
        """The arrays of a step in which the first `rows` rows, of `length` tokens each, take `queries` more."""
        self.cache.lengths[self._rows[:rows]] = length
        return RaggedBatch(self.cache, self._rows[:rows], np.full(rows, queries, np.int64), ())

    def attend(self, batch: RaggedBatch, queries: int, begin: int = 0) -> Tensor:
        """Outputs (rows, queries, heads, D) of queries `begin` to `begin + queries` of the batch's rows."""
        rows, end = len(batch.counts), begin + queries
        query, key, value = (one[:, :rows, begin:end].flatten(1, 2)[None] for one in self._new)
        module: Any = SimpleNamespace(layer_idx=0)
        return ragged_attention(module, query, key, value, None, ragged_batch=batch)[0][0].unflatten(0, (rows, queries))

    def step(self, rows: int, length: int, queries: int) -> Tensor:
        """Make the arrays of a step, and run one layer."""
        return self.attend(self.batch(rows, length, queries), queries)

    def difference(self, rows: int, queries: int, keys: int, parts: list[int]) -> float:
        """Difference of the first row's outputs in a batch from those of the row alone, its queries in these parts."""
        together, alone, begin = self.step(rows, keys, queries)[0].clone(), [], 0
        for count in parts:
            alone.append(self.attend(self.batch(1, keys + begin, count), count, begin)[0].clone())
            begin += count
        return float((torch.cat(alone) - together).abs().max() / together.abs().max())


def kernel_seconds(call: Callable[[], object], device: str) -> dict[str, float]:
    """GPU kernel → seconds of a call in it."""
    with profile() as seen:
        for _ in range(_PROFILED):
            call()
        synchronize(device)
    times = {event.key[:60]: 1e-6 * event.self_device_time_total / _PROFILED for event in seen.key_averages()}
    return {name: seconds for name, seconds in times.items() if seconds}
