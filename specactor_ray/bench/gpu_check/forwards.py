"""Stage `forwards`: seconds of a forward over rows x positions x context, eager and as a captured graph.

V of the cost model; with one position a row also D, the cost of a drafter's token. A forward is that of the `hf` engine
without the arrays that the host makes for it, and ends with the logits of all its positions, in the dtype of the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specactor_ray.bench.gpu_check.models import ragged_model
from specactor_ray.bench.gpu_check.settings import ModelShape
from specactor_ray.bench.gpu_check.stages import Stage
from specactor_ray.core.ragged import places
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.ragged_model import RaggedModel


def measure_forwards(stage: Stage) -> None:
    """Fill a point per shape, context (tokens of each row in the cache before) and rows, in ms by new positions of a
    row; and per shape `[rows, positions, context, seconds]` of `eager` and `graph`, and why there is no graph."""
    settings, device = stage.settings, stage.settings.device
    models, forwards = dict[ModelShape, RaggedModel](), list[StaticForward]()

    def measure(context: int, shape: ModelShape, rows: int, positions: int) -> str:
        if shape not in models:
            for made in models.values():
                made.cache.release()
            with stage.uncounted():
                models[shape] = ragged_model(shape, settings.dtype, device, 256)
            reason = "" if device == "cuda" else "CUDA graphs need a CUDA device"
            stage.entry["figures"].setdefault(shape.name, {"graph": [], "eager": [], "not_captured": reason})
        entry = stage.entry["figures"][shape.name]
        size = (models[shape], rows, context + max(settings.forward_positions))
        if not forwards or forwards[0].size != size:
            for made in models.values():  # frees its memory before the next cache is allocated
                made.cache.release()
            forwards[:] = [StaticForward(*size)]
        tokens = torch.randint(shape.vocab_size, (rows, positions))
        eager = forwards[0].forward(tokens, context)
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
