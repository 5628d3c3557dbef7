"""Stage `attention`: one layer of the attention that the `hf` engine uses, over a cache with random keys and values.

A kernel that plans by exact shape pays for every new length, and the longest row of an engine has one at every step.
"""

from __future__ import annotations

import itertools
import statistics
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specactor_ray.benchmarks.gpu_check.settings import ModelShape
from specactor_ray.benchmarks.gpu_check.stages import Stage, peak_gb
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention
from specactor_ray.models.ragged_cache import LayerShape, RaggedCache

_KERNELS = {
    "_flash_attention_forward": "flash",
    "_scaled_dot_product_flash": "flash",
    "_scaled_dot_product_cudnn": "cudnn",
    "_scaled_dot_product_efficient": "efficient",
    "_scaled_dot_product_attention_math": "math",
}
"""Part of the name of torch's operator → the kernel it stands for."""


def measure_attention(stage: Stage) -> None:
    """Fill a point per rows and new tokens (queries) of each: the kernel that torch took; the first call at each of some
    new lengths (the longest, ms) and the second (median); one layer once the arrays of the step are made, and GB/s of
    keys and values there; peak GB; and the largest difference of the outputs from those of a row alone, and of its
    queries one by one, relative to the largest output (0: bitwise equal)."""
    grid = stage.settings.attention
    task = Attention(grid.shape, max(grid.rows), grid.tokens + grid.lengths, max(grid.queries), stage.settings)

    def measure(rows: int, queries: int) -> str:
        first, again = [], []
        for index in range(grid.lengths):
            length = grid.tokens + index
            first.append(stage.seconds(lambda n=length: task.attend(task.batch(rows, n, queries), queries)))
            again.append(
                stage.step(lambda n=length: task.attend(task.batch(rows, n, queries), queries), index, grid.lengths)
            )
        batch = task.batch(rows, grid.tokens, queries)
        layer_s = stage.median_s(lambda: task.attend(batch, queries))
        point = {
            "kernel": kernel_of(lambda: task.attend(batch, queries)),
            "new length ms": 1e3 * max(first),
            "again ms": 1e3 * statistics.median(again),
            "layer ms": 1e3 * layer_s,
            "gb_per_s": 1e-9 * rows * task.row_bytes / layer_s,
            **peak_gb(lambda: task.attend(batch, queries), stage),
            "row alone": task.difference(rows, queries, [queries]),
            "one by one": task.difference(rows, queries, [1] * queries),
        }
        stage.point(rows=rows, queries=queries, **point)
        return ", ".join(
            f"{name} {value if isinstance(value, str) else f'{value:.3g}'}" for name, value in point.items()
        )

    stage.each(itertools.product(grid.rows, grid.queries), measure)


class Attention:
    """The product's attention in one layer.

    Args:
        shape: Heads.
        rows: Rows in the cache.
        tokens: Most tokens of a row before its queries.
        queries: Most queries of a row.
        settings: Device and dtype.
    """

    def __init__(self, shape: ModelShape, rows: int, tokens: int, queries: int, settings: Any) -> None:
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        layer = LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim)
        self.row_bytes = layer.bytes(dtype.itemsize) * tokens
        self._tokens = tokens
        self._cache = RaggedCache(
            [layer], 2 * rows * layer.bytes(dtype.itemsize) * (tokens + queries + 256), dtype, device
        )
        for pool in (*self._cache.keys, *self._cache.values):
            pool.normal_()
        self._rows: list[Any] = [self._cache.open(tokens + queries) for _ in range(rows)]

        def normal(heads: int) -> Tensor:
            return torch.randn(heads, rows, queries, shape.head_dim, device=device, dtype=dtype)

        self._query, self._key, self._value = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)

    def batch(self, rows: int, length: int, queries: int) -> RaggedBatch:
        """The arrays of a step in which the first `rows` rows, of `length` tokens each, take `queries` more."""
        for row in self._rows[:rows]:
            row.length = length
        device = self._query.device
        return RaggedBatch(self._cache, self._rows[:rows], [queries] * rows, 0, device, device.type != "cpu")

    def attend(self, batch: RaggedBatch, queries: int, begin: int = 0) -> Tensor:
        """(rows, queries, heads, D) of queries `begin` to `begin + queries` of its rows."""
        rows = len(batch.rows)
        q, k, v = (
            one[:, :rows, begin : begin + queries].flatten(1, 2)[None] for one in (self._query, self._key, self._value)
        )
        out = ragged_attention(SimpleNamespace(layer_idx=0), q, k, v, None, ragged_batch=batch)[0]  # type: ignore[arg-type]
        return out[0].unflatten(0, (rows, queries))

    def difference(self, rows: int, queries: int, parts: list[int]) -> float:
        """How far outputs of the first row in a batch are from those of the row alone, its queries in these parts."""
        together = self.attend(self.batch(rows, self._tokens, queries), queries)[0].clone()
        begins = [0, *itertools.accumulate(parts)]
        alone = [
            self.attend(self.batch(1, self._tokens + begin, count), count, begin)[0].clone()
            for begin, count in zip(begins, parts, strict=False)
        ]
        return float((torch.cat(alone) - together).abs().max() / together.abs().max())


def kernel_of(call: Any) -> str:
    """`flash`, `cudnn`, `efficient` or `math` by the operators that ran, else `own`; on a GPU with its longest kernel."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = seen.key_averages()
    found = dict.fromkeys(kernel for event in events for part, kernel in _KERNELS.items() if part in event.key)
    longest = max(events, key=lambda event: event.self_device_time_total, default=None)
    name = f" ({longest.key[:60]})" if longest is not None and longest.self_device_time_total else ""
    return ("+".join(found) or "own") + name
