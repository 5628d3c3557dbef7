"""Stages of whole models: `forwards`, `drafting` and `flips`, with transformers models of random weights."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specactor_ray.bench.gpu_check.stage import ModelShape, Stage
from specactor_ray.core.environment import fallbacks
from specactor_ray.core.ragged import places
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.burst import LONGEST, CudaCapturer
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.sampling.keyed import sample_rows

_WINDOW = 200
"""Draft tokens of a window: more than the timed calls draft."""
_PREFILLED_AT_ONCE = 4
TEMPERATURES = (1.0, 0.0)


def random_model(shape: ModelShape, dtype: str, device: str) -> Any:
    """A `Qwen2ForCausalLM` with transformers' initial weights, its logits spread like those of a trained model."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {name: value for name, value in shape._asdict().items() if name != "name"}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen2Config(**sizes, rope_parameters=rope, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.eval().requires_grad_(False)
    with torch.inference_mode():
        tokens = torch.randint(shape.vocab_size, (4, 16), device=device)
        spread_head(model.lm_head.weight, model(input_ids=tokens, use_cache=False).logits)
    return model


@torch.inference_mode()
def spread_head(weight: Tensor, logits: Tensor) -> None:
    """Scale an output layer (V, H) in place, by logits (..., V) that it gives for a few contexts: ordinary tokens get a
    standard deviation of 3, some hundred candidates one of 9, and few of these nearly all of the mass (an entropy of
    about 1 nat). Gaussian logits alike would need top logits of 45 for that, and rounding errors grow with them."""
    weight.mul_(3.0 / float(logits.float().std()))
    weight[:: max(len(weight) // 512, 8)] *= 3.0


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


def measure_flips(stage: Stage) -> None:
    """Fill a point per batch and length (positions): sampled tokens per 1,000 that differ from those of batch 1 and
    length 1. All forwards are those of the `hf` engine on the same contexts and next tokens. The first way is the
    reference again: its flips are the device's noise."""
    s, vocab_size = stage.settings, stage.settings.shapes[-1].vocab_size
    rows, longest = max(s.flip_rows, *s.flip_batches), s.flip_context + s.flip_tokens
    model = ragged_model(s.shapes[-1], s.dtype, s.device, rows * (longest + 256))
    cached = np.array([model.cache.open(longest) for _ in range(rows)])
    tokens = np.random.default_rng(1).integers(vocab_size, size=(rows, longest))
    reference = dict[float, np.ndarray]()

    def forward(some: slice, begin: int, count: int) -> Tensor:
        counts = np.full(len(cached[some]), count, np.int64)
        given = tokens[some, begin : begin + count].ravel()
        return model.forward(cached[some], counts, given, counts if begin else 0 * counts).logits

    def sample(some: slice, position: int, length: int, found: dict[float, np.ndarray]) -> None:
        logits = forward(some, s.flip_context + position, length)
        span, seeds = slice(position, position + length), range(s.flip_rows)[some]
        at = [*range(position, position + length)] * len(seeds)
        for temperature, out in found.items():
            params = [SamplingParams(temperature, seed=row) for row in seeds for _ in range(length)]
            out[some, span] = np.reshape(sample_rows(logits[: len(at)], params, at).tokens, (-1, length))

    def sample_all(batch: int, length: int) -> dict[float, np.ndarray]:
        """Temperature → tokens `(flip_rows, flip_tokens)`."""
        found = {temperature: np.zeros((s.flip_rows, s.flip_tokens), np.int64) for temperature in TEMPERATURES}
        model.cache.truncate(cached, s.flip_context)
        for row, position in itertools.product(range(0, s.flip_rows, batch), range(0, s.flip_tokens, length)):
            stage.seconds(functools.partial(sample, slice(row, row + batch), position, length, found))
        return found

    def measure(length: int, batch: int) -> str:
        if not reference:
            reference.update(sample_all(1, 1))
        for temperature, sampled in sample_all(batch, length).items():
            rate = 1e3 * float((sampled != reference[temperature]).mean())
            stage.point({"batch": batch, "length": length}, **{f"T={temperature:g} flips": rate})
        return f"{rate:.2f} flips per 1,000 at T=0"

    for begin in range(0, rows, _PREFILLED_AT_ONCE):
        forward(slice(begin, begin + _PREFILLED_AT_ONCE), 0, s.flip_context)
    stage.each(itertools.product(s.flip_lengths, s.flip_batches), measure)
