"""Stages of the check: single kernels (`hardware`, `triton`, `attention`), and whole models with random weights
(`forwards`, `drafting`)."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import profile

from specactor_ray.bench.gpu_check.stage import ModelShape, Settings, Stage
from specactor_ray.core.environment import fallbacks, hardware, versions
from specactor_ray.core.ragged import places
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.burst import LONGEST, CudaCapturer
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.sampling.candidates import MOST
from specactor_ray.sampling.keyed import sample_rows, warm_up
from specactor_ray.sampling.rules import Rules

_WINDOW = 200
"""Draft tokens of a window: more than the timed calls draft."""
_PROFILED = 10
"""Number of calls under the profiler."""
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
        kernels_s = kernel_seconds(attend) if settings.device == "cuda" else {}
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
        device, dtype, shape = torch.device(settings.device), getattr(torch, settings.dtype), settings.shapes[0]
        rows, queries, _ = np.max(settings.attention_cells, axis=0).tolist()
        tokens = [
            max(new + keys for count, new, keys in settings.attention_cells if count > row) for row in range(rows)
        ]
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
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


def kernel_seconds(call: Callable[[], object]) -> dict[str, float]:
    """GPU kernel → seconds of a call in it."""
    with profile() as seen:
        for _ in range(_PROFILED):
            call()
        torch.cuda.synchronize()
    times = {event.key[:60]: 1e-6 * event.self_device_time_total / _PROFILED for event in seen.key_averages()}
    return {name: seconds for name, seconds in times.items() if seconds}


# ---- whole models ----


def random_model(shape: ModelShape, dtype: str, device: str) -> Any:
    """A `Qwen2ForCausalLM` with transformers' initial weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {name: value for name, value in shape._asdict().items() if name != "name"}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen2Config(**sizes, rope_parameters=rope, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


def ragged_model(shape: ModelShape, dtype: str, device: str, tokens: int) -> RaggedModel:
    """A random model as the `hf` engine runs it, with a cache of `tokens` tokens."""
    cache_bytes = shape.cache_bytes(tokens, getattr(torch, dtype).itemsize)
    return RaggedModel(random_model(shape, dtype, device), cache_bytes)


def measure_forwards(stage: Stage) -> None:
    """V of the cost model; with one position a row also D, the cost of a drafter's token. A forward is that of the `hf`
    engine without the arrays that the host makes for it, and ends with the logits of all its positions. Fill a point
    per shape, context (tokens of each row in the cache before) and rows, in ms by new positions of a row; and per shape
    `[rows, positions, context, seconds]` of `eager` and, on a GPU, `graph`."""
    settings, models = stage.settings, dict[ModelShape, RaggedModel]()

    def measure(context: int, shape: ModelShape, rows: int) -> str:
        if shape not in models:
            models[shape] = ragged_model(shape, settings.dtype, settings.device, 256)
        figures = stage.entry["figures"].setdefault(shape.name, {"graph": [], "eager": []})
        for made in models.values():  # frees its memory before the next cache is allocated
            made.cache.release()
        static = StaticForward(models[shape], rows, context + max(settings.forward_positions))
        for positions in settings.forward_positions:
            eager = static.forward(torch.randint(shape.vocab_size, (rows, positions)), context)
            calls: dict[str, Callable[[], object]] = {"eager": eager}
            if settings.device == "cuda":
                calls["graph"] = CudaCapturer().capture(eager)
            for kind, call in calls.items():
                seconds = stage.median_s(call)
                figures[kind].append([rows, positions, context, seconds])
            key = {"shape": shape.name, "context": context, "rows": rows}
            stage.point(key, **{f"{positions} new": 1e3 * seconds})
        return f"{positions} new {1e3 * seconds:.2f} ms"

    stage.each(itertools.product(settings.forward_contexts, settings.shapes, settings.forward_rows), measure)


class StaticForward:
    """Forwards of the `hf` engine's model for `rows` rows with room for `capacity` tokens each, whose arrays are on the
    device before: a CUDA graph can hold one. The cache begins with random keys and values. On a GPU the norms of the
    model, of eight kernels each, become torch's.

    Args:
        model: Its cache is replaced.
    """

    def __init__(self, model: RaggedModel, rows: int, capacity: int) -> None:
        self._model, config = model, model.model.config
        dim = model.model.model.layers[0].self_attn.head_dim
        layers = [LayerShape(config.num_key_value_heads, dim, dim)] * config.num_hidden_layers
        if model.device.type == "cuda":
            for module in model.model.modules():
                if type(module).__name__ == "Qwen2RMSNorm":
                    size, eps = module.weight.shape, module.variance_epsilon
                    module.forward = functools.partial(F.rms_norm, normalized_shape=size, weight=module.weight, eps=eps)
        budget = rows * (capacity + 256) * sum(layer.bytes(model.dtype) for layer in layers)
        self.cache = model.cache = PagedCache(layers, budget, model.dtype, model.device)
        for pool in (*self.cache.keys, *self.cache.values):
            pool.normal_()
        self._rows = np.array([self.cache.open(capacity) for _ in range(rows)])

    def forward(self, tokens: Tensor, context: int) -> Callable[[], Tensor]:
        """A function that computes the logits (rows, positions, V) of tokens (rows, positions) after `context` others,
        and stores their keys and values."""
        (rows, count), cache = tokens.shape, self.cache
        cache.lengths[self._rows] = context
        counts = np.full(rows, count, np.int64)
        arrays = (tokens.numpy().ravel(), places(cache.lengths[self._rows], counts), np.arange(rows * count))
        batch = RaggedBatch(cache, self._rows, counts, arrays)

        def run() -> Tensor:
            with torch.inference_mode():
                return self._model._run(batch, *batch.arrays).unflatten(0, (rows, count))

        return run


def measure_drafting(stage: Stage) -> None:
    """Fill a point per number of rows: ms of a token of all rows, one in an `extend` and `LONGEST`, eager and (on a
    GPU) as a captured step. `fallbacks`: why there is no graph, as in the log."""
    settings, shape = stage.settings, stage.settings.shapes[-1]
    tokens = max(settings.drafting_rows) * (settings.drafting_prompt + 2 * _WINDOW + 512)
    model = ragged_model(shape, settings.dtype, settings.device, tokens)
    ways = ("eager", "graph") if settings.device == "cuda" else ("eager",)

    def measure(rows: int, way: str) -> str:
        drafter = DraftModelProposer(model, max_batch=rows)
        if way == "eager":
            drafter._bursts = None
        columns = {f"{way} x{most} ms": _token_ms(stage, drafter, rows, most) for most in (1, LONGEST)}
        for slot in range(rows):
            drafter.close(slot, False)
        stage.point({"shape": shape.name, "rows": rows}, **columns)
        stage.entry["figures"]["fallbacks"] = fallbacks()
        return ", ".join(f"{name} {value:.3g}" for name, value in columns.items())

    stage.each(itertools.product(settings.drafting_rows, ways), measure)


def _token_ms(stage: Stage, drafter: DraftModelProposer, rows: int, most: int) -> float:
    """Median ms of a token of every row, after random prompts."""
    rng, prompt, vocab_size = random.Random(7), stage.settings.drafting_prompt, stage.settings.shapes[-1].vocab_size
    for slot in range(rows):
        ids = [rng.randrange(vocab_size) for _ in range(prompt)]
        drafter.open(slot, f"r{slot}", ids, (), SamplingParams(1.0, max_tokens=4 * _WINDOW, seed=slot), _WINDOW)
    drafter.burst = 1
    while (drafter.mirrors.ends[:rows] == prompt).any():  # compiles, and captures graphs
        drafter.extend()
    drafter.burst = most
    return 1e3 * stage.median_s(drafter.extend) / most
