"""Stages of the check that measure single kernels: `hardware`, `triton`, `attention`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specactor_ray.bench.gpu_check.stage import Settings, Stage
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention
from specactor_ray.sampling.candidates import MOST
from specactor_ray.sampling.keyed import sample_rows, warm_up
from specactor_ray.sampling.rules import Rules

_ATTENTION_KERNELS = ("attend", "merge")
"""Names of the attention kernels on GPUs."""
_RULES = {"T=1": SamplingParams(), "T=0": SamplingParams(0.0), "top-p 0.95": SamplingParams(top_p=0.95)}
_DTYPES = ("float32", "bfloat16", "float16")
_RANKS = {"tokens": 1, "margins": 2, "candidates": MOST}


def measure_hardware(stage: Stage) -> None:
    """Machine and software; GB/s of a copy on the device (bytes read plus bytes written), TFLOP/s of a dense matrix
    product, and microseconds of one small kernel from launch to completion and of a small copy to the host."""
    settings, figures = stage.settings, stage.entry["figures"]
    device, size = settings.device, settings.matmul_size
    figures |= {"host": hardware(), "versions": versions() | {"cuda": torch.version.cuda or "none"}}
    source = torch.empty(settings.copy_bytes, dtype=torch.uint8, device=device).random_()
    target, small = torch.empty_like(source), torch.zeros(64, device=device)
    left, right = torch.randn(2, size, size, device=device).to(getattr(torch, settings.dtype))
    figures["copy_gb_per_s"] = 2e-9 * settings.copy_bytes / stage.median_s(lambda: target.copy_(source))
    figures["matmul_tflop_per_s"] = 2e-12 * size**3 / stage.median_s(lambda: left @ right)
    figures["launch_us"] = 1e6 * stage.median_s(lambda: small.add_(1.0))
    figures["to_host_us"] = 1e6 * stage.median_s(small.tolist)


def measure_triton(stage: Stage) -> None:
    """Fill `different`: per vocabulary, dtype and results how 64 rows of all temperatures and filters differ from
    numba's, empty if they do not. Then a point per number of rows: ms of the kernels alone by rule, and with candidates
    at T=1, and GB/s of logits that they read; of the package's call at T=1, with tokens to the host; and of the host
    form. Raises RuntimeError where a token or a margin differs."""
    from specactor_ray.sampling.fused import difference

    settings, different = stage.settings, dict[str, str]()
    stage.entry["figures"]["different"] = different
    warm_up()

    def compare(vocab: int, dtype: str, results: str) -> str:
        asked, found = (torch.device(settings.device), getattr(torch, dtype), _RANKS[results], vocab), list[str]()
        stage.seconds(lambda: found.append(difference(*asked)))
        different[f"{vocab} {dtype} {results}"] = found[0]
        return found[0] or "equal"

    def measure(rows: int, form: str) -> str:
        logits = 3.0 * torch.randn(rows, settings.sampler_vocabs[-1], device=settings.device)
        logits = logits.to(getattr(torch, settings.dtype))
        seconds = stage.median_s(_sampler_call(logits, form))
        columns = {f"{form} ms": 1e3 * seconds}
        if form == "T=1":
            columns["gb_per_s"] = 1e-9 * logits.nbytes / seconds
        stage.point({"rows": rows}, **columns)
        return f"{1e3 * seconds:.3g} ms"

    stage.each(itertools.product(settings.sampler_vocabs, _DTYPES, _RANKS), compare)
    stage.each(itertools.product(settings.sampler_rows, (*_RULES, "candidates", "product", "host")), measure)
    if wrong := [f"{name}: {found}" for name, found in different.items() if found]:
        raise RuntimeError("; ".join(wrong))


def _sampler_call(logits: Tensor, form: str) -> Callable[[], object]:
    n = len(logits)
    if form in ("product", "host"):
        params = [SamplingParams(seed=row) for row in range(n)]
        return lambda: sample_rows(logits, params, range(n), backend="numba" if form == "host" else "auto")
    from specactor_ray.sampling.fused import verify

    rules, index = Rules(n, logits.device), torch.arange(n, device=logits.device)
    rules.write(range(n), [_RULES.get(form, SamplingParams())] * n, [0] * n)
    none = torch.zeros(n + 1, dtype=torch.int64, device=logits.device)
    return lambda: verify(logits, index, none, none, 0, index, index, rules, _RANKS.get(form, 1))


def measure_attention(stage: Stage) -> None:
    """One layer of the attention of the `hf` engine, over a cache with random keys and values. A point per cell: ms of
    a layer once a step's arrays are made, the host's part included; of its kernels alone, with GB/s of keys and values
    (on a CPU: of the layer) and their share of a copy's; and how far a row's outputs are from those of the row alone,
    and of its queries one by one, relative to the largest (0: the same bits)."""
    settings, layer = stage.settings, AttentionLayer(stage.settings)
    source = torch.zeros(settings.copy_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    copy_s = list[float]()

    def measure(rows: int, queries: int, keys: int) -> str:
        copy_s[:] = copy_s or [stage.median_s(lambda: target.copy_(source))]
        attend = functools.partial(layer.attend, layer.batch(rows, keys, queries), queries)
        layer_s = stage.median_s(attend)
        kernels_s = stage.kernels(attend).seconds
        kernel_s = sum(seconds for name, seconds in kernels_s.items() if name in _ATTENTION_KERNELS)
        rate = 1e-9 * rows * keys * layer.cache.bytes_per_token / (kernel_s or layer_s)
        point = {
            "layer ms": 1e3 * layer_s,
            "kernel ms": 1e3 * kernel_s,
            "gb_per_s": rate,
            "of a copy %": 100 * rate * copy_s[0] / (2e-9 * settings.copy_bytes),
            "row alone": layer.difference(rows, queries, keys, [queries]),
            "one by one": layer.difference(rows, queries, keys, [1] * queries),
            "kernel": max(kernels_s, key=kernels_s.__getitem__) if kernels_s else "own",
        }
        stage.point({"rows": rows, "queries": queries, "keys": keys}, **point)
        return f"layer {1e3 * layer_s:.3g} ms, kernels {1e3 * kernel_s:.3g} ms"

    stage.each(settings.attention_cells, measure)


class AttentionLayer:
    """The package's attention in one layer, with queries, keys and values that are functions of row and position."""

    def __init__(self, settings: Settings) -> None:
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        rows, queries, _ = np.max(settings.attention_cells, axis=0).tolist()
        tokens = [
            max(new + keys for count, new, keys in settings.attention_cells if count > row) for row in range(rows)
        ]
        heads, kv_heads, dim = settings.attention_heads
        layer = LayerShape(kv_heads, dim, dim)
        self.cache = PagedCache([layer], (sum(tokens) + 256 * rows) * layer.bytes(dtype), dtype, device)
        for pool in (*self.cache.keys, *self.cache.values):
            pool.normal_()
        self._rows = np.array([self.cache.open(one) for one in tokens])
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

    def difference(self, rows: int, queries: int, keys: int, parts: list[int]) -> float:
        """Difference of the first row's outputs in a batch from those of the row alone, its queries in these parts."""
        together, alone, begin = self.attend(self.batch(rows, keys, queries), queries)[0].clone(), [], 0
        for count in parts:
            alone.append(self.attend(self.batch(1, keys + begin, count), count, begin)[0].clone())
            begin += count
        return float((torch.cat(alone) - together).abs().max() / together.abs().max())
