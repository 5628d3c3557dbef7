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
from specactor_ray.core.signals import signals_deferred
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
Sampled = dict[float, np.ndarray]
"""Temperature → float64 `(2, rows, tokens)`: tokens, and their perturbed top-2 margins in nats."""


def random_model(shape: ModelShape, dtype: str, device: str) -> Any:
    """A `Qwen2ForCausalLM` with transformers' initial weights, its logits spread like those of a trained model."""
    with signals_deferred():
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
    `[rows, positions, context, seconds]` of `eager` and `graph`, and why there is no graph."""
    settings, device = stage.settings, stage.settings.device
    models, forwards = dict[ModelShape, RaggedModel](), list[StaticForward]()

    def measure(context: int, shape: ModelShape, rows: int, positions: int) -> str:
        if shape not in models:
            models[shape] = ragged_model(shape, settings.dtype, device, 256)
            reason = "" if device == "cuda" else "CUDA graphs need a CUDA device"
            stage.entry["figures"].setdefault(shape.name, {"graph": [], "eager": [], "not_captured": reason})
        entry = stage.entry["figures"][shape.name]
        size = (models[shape], rows, context + max(settings.forward_positions))
        if not forwards or forwards[0].size != size:
            for made in models.values():  # frees its memory before the next cache is allocated
                made.cache.release()
            forwards[:] = [StaticForward(*size)]
        eager = forwards[0].forward(torch.randint(shape.vocab_size, (rows, positions)), context)
        calls: dict[str, Callable[[], object]] = {"eager": eager}
        if not entry["not_captured"]:
            try:
                calls["graph"] = captured(eager).replay
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                entry["not_captured"] = str(error).partition("\n")[0]
        seconds = {kind: stage.median_s(call) for kind, call in calls.items()}
        for kind, one in seconds.items():
            entry[kind].append([rows, positions, context, one])
        key = {"shape": shape.name, "context": context, "rows": rows}
        stage.point(key, **{f"{positions} new": 1e3 * seconds.get("graph", seconds["eager"])})
        return ", ".join(f"{kind} {1e3 * one:.2f} ms" for kind, one in seconds.items())

    axes = (settings.forward_contexts, settings.shapes, settings.forward_rows, settings.forward_positions)
    stage.each(itertools.product(*axes), measure)


class StaticForward:
    """Forwards of the `hf` engine's model for `rows` rows with room for `capacity` tokens each, whose arrays are on the
    device before: a CUDA graph can hold one. The cache begins with random keys and values. On a GPU the norms of the
    model, of eight kernels each, become torch's.

    Args:
        model: Its cache is replaced.
    """

    def __init__(self, model: RaggedModel, rows: int, capacity: int) -> None:
        self.size, self._model, config = (model, rows, capacity), model, model.model.config
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


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, which has to use the same tensors every time. Raises RuntimeError where something in it
    cannot be captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # libraries allocate their workspaces outside of the capture
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph


def measure_drafting(stage: Stage) -> None:
    """Fill a point per number of rows: ms of a token of all rows, one in an `extend` and `LONGEST`, eager and (on a
    GPU) as a captured step. `fallbacks`: why there is no graph, as in the log."""
    settings, shape = stage.settings, stage.settings.shapes[-1]
    tokens = max(settings.drafting_rows) * (settings.drafting_prompt + 2 * _WINDOW + 512)
    model = ragged_model(shape, settings.dtype, settings.device, tokens)
    ways = ("eager", "graph") if settings.device == "cuda" else ("eager",)

    def measure(rows: int, way: str) -> str:
        capturer = CudaCapturer() if way == "graph" else None
        drafter = DraftModelProposer(model, max_batch=rows, capturer=capturer)
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
    length 1, and the largest margin of the reference there. All forwards are those of the `hf` engine on the same
    contexts and next tokens. The first way is the reference again: its flips are the device's noise."""
    settings, reference = stage.settings, Sampled()
    task = _FlipTask(stage)

    def measure(length: int, batch: int) -> str:
        if not reference:
            reference.update(task.sample(1, 1))
        sampled = task.sample(batch, length)
        for temperature in TEMPERATURES:
            rate, margin = flips(reference[temperature], sampled[temperature])
            columns = {f"T={temperature:g} flips": rate, f"T={temperature:g} margin": margin}
            stage.point({"batch": batch, "length": length}, **columns)
        return f"{rate:.2f} flips per 1,000 at T=0"

    stage.each(itertools.product(settings.flip_lengths, settings.flip_batches), measure)


def flips(reference: np.ndarray, sampled: np.ndarray) -> tuple[float, float | None]:
    """Flips per 1,000 tokens, and the largest margin of the reference where the tokens differ."""
    flipped = reference[1][reference[0] != sampled[0]]
    return 1e3 * flipped.size / reference[0].size, float(flipped.max()) if flipped.size else None


class _FlipTask:
    """Contexts, next tokens and seeds that all ways share."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._settings, s = stage, stage.settings, stage.settings
        rows, longest = max(s.flip_rows, *s.flip_batches), s.flip_context + s.flip_tokens
        self._model = ragged_model(s.shapes[-1], s.dtype, s.device, rows * (longest + 256))
        self._rows = np.array([self._model.cache.open(longest) for _ in range(rows)])
        self._tokens = np.random.default_rng(1).integers(s.shapes[-1].vocab_size, size=(rows, longest))
        for begin in range(0, rows, _PREFILLED_AT_ONCE):
            self._forward(slice(begin, begin + _PREFILLED_AT_ONCE), 0, s.flip_context)

    def sample(self, batch: int, length: int) -> Sampled:
        """Tokens of all compared rows and positions."""
        s = self._settings
        found: Sampled = {t: np.zeros((2, s.flip_rows, s.flip_tokens)) for t in TEMPERATURES}
        self._model.cache.truncate(self._rows, s.flip_context)
        for row, position in itertools.product(range(0, s.flip_rows, batch), range(0, s.flip_tokens, length)):
            rows = slice(row, row + batch)
            self._stage.seconds(functools.partial(self._sample, rows, position, length, found))
        return found

    def _sample(self, rows: slice, position: int, length: int, found: Sampled) -> None:
        logits = self._forward(rows, self._settings.flip_context + position, length)
        span, seeds = slice(position, position + length), range(self._settings.flip_rows)[rows]
        at = [*range(position, position + length)] * len(seeds)
        for temperature, out in found.items():
            params = [SamplingParams(temperature, seed=row) for row in seeds for _ in range(length)]
            sampled = sample_rows(logits[: len(at)], params, at, record_margins=True)
            out[:, rows, span] = np.array([sampled.token_ids, sampled.margins]).reshape(2, -1, length)

    def _forward(self, rows: slice, begin: int, count: int) -> Tensor:
        tokens, n = self._tokens[rows, begin : begin + count], len(self._rows[rows])
        counts = np.full(n, count, np.int64)
        return self._model.forward(self._rows[rows], counts, tokens.ravel(), counts if begin else 0 * counts).logits
