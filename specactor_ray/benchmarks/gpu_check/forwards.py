"""Stage `forwards`: seconds of a forward over rows x positions x context, eager and as a captured graph.

V of the cost model; with one position a row also D, the cost of a drafter's token. A forward ends with the logits of
all its positions in the model's dtype; sampling is not part of it. Keys and values are static, and there is no mask:
transformers' own static cache makes one, which rules out the flash kernel and repeats the keys of grouped heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from specactor_ray.benchmarks.gpu_check.models import random_model
from specactor_ray.benchmarks.gpu_check.settings import ModelShape
from specactor_ray.benchmarks.gpu_check.stages import Stage

_NO_GPU = "CUDA graphs need a CUDA device"


def measure_forwards(stage: Stage) -> None:
    """Fill points, and per shape `[rows, positions, context, seconds]` of `eager` and `graph`; `context` is the tokens of
    each row in the cache before the forward. `not_captured`: why there is no graph."""
    grid, models = stage.settings.forwards, dict[ModelShape, Any]()
    forwards: list[StaticForward] = []

    def measure(shape: ModelShape, context: int, rows: int, positions: int) -> str:
        if shape not in models:
            models[shape] = random_model(shape, stage.settings.dtype, stage.settings.device)
            stage.entry["figures"][shape.name] = _entry(shape, stage.settings.device)
        size = (models[shape], rows, context + max(grid.positions))
        if not forwards or forwards[0].size != size:
            forwards.clear()
            forwards.append(StaticForward(*size))
        return _measure(stage, shape, forwards[0], positions, context)

    shapes = itertools.product(grid.contexts, grid.shapes)
    points = [(shape, c, *point) for c, shape in shapes for point in itertools.product(grid.rows, grid.positions)]
    stage.each(points, measure)


def _entry(shape: ModelShape, device: str) -> dict[str, Any]:
    entry = {"graph": [], "eager": [], "scaled": "", "not_captured": "" if device == "cuda" else _NO_GPU}
    if shape.sampled_layers:
        few, many = shape.sampled_layers
        entry["scaled"] = f"{shape.name} from {few} and {many} layers to {shape.layers}"
    return entry


def _measure(stage: Stage, shape: ModelShape, forward: StaticForward, positions: int, context: int) -> str:
    entry, rows = stage.entry["figures"][shape.name], forward.size[1]
    tokens = torch.randint(shape.vocab, (rows, positions), device=stage.settings.device)
    calls: dict[str, list[Callable[[], object]]] = {
        "eager": [
            functools.partial(forward, tokens, context, depth) for depth in shape.sampled_layers or (shape.layers,)
        ]
    }
    if not entry["not_captured"]:
        try:
            calls["graph"] = [captured(call).replay for call in calls["eager"]]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            entry["not_captured"] = str(error).partition("\n")[0]
    shown = {}
    for kind, timed in calls.items():
        seconds = whole_model_s(shape, [stage.median_s(call) for call in timed])
        entry[kind].append([rows, positions, context, seconds])
        shown[f"{kind}_ms"] = 1e3 * seconds
    best = {"ms": shown.get("graph_ms", shown["eager_ms"])}
    stage.point(shape=shape.name, context=context, rows=rows, positions=positions, **best, **shown)
    return ", ".join(f"{kind} {ms:.2f}" for kind, ms in shown.items())


def whole_model_s(shape: ModelShape, seconds: Sequence[float]) -> float:
    """Seconds with all layers. From those with a few and with some more: the difference is what layers cost, and noise
    never makes a layer cost less than nothing."""
    if shape.sampled_layers is None:
        return seconds[0]
    few, many = shape.sampled_layers
    return seconds[0] + max(seconds[1] - seconds[0], 0.0) / (many - few) * (shape.layers - few)


class StaticForward:
    """Forwards of a transformers model over keys and values of fixed size, without a wait for the device, so that a CUDA
    graph can hold one. All rows have the same number of tokens in the cache.

    Args:
        model: A `Qwen2ForCausalLM`; its attention is replaced, and its norms, of eight kernels each, by torch's.
        rows: Rows.
        capacity: Tokens of a row; the cache begins with standard normal values.
    """

    def __init__(self, model: Any, rows: int, capacity: int) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("specactor_static", _static_attention)
        model.set_attn_implementation("specactor_static")
        norms = [
            (m, name, norm) for m in model.modules() for name, norm in m.named_children() if "RMS" in repr(type(norm))
        ]
        for module, name, norm in norms:
            fused = nn.RMSNorm(norm.weight.shape, model.config.rms_norm_eps)
            fused.weight = norm.weight
            setattr(module, name, fused)
        self.size, self._model, layers = (model, rows, capacity), model, model.model.layers
        shape = (2, len(layers), rows, model.config.num_key_value_heads, capacity, layers[0].self_attn.head_dim)
        self.cache = torch.empty(shape, dtype=model.dtype, device=model.device).normal_()

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, context: int, layers: int) -> Tensor:
        """Logits (rows, positions, V) of tokens (rows, positions) that follow `context` ones, by the first layers."""
        positions = torch.arange(context, context + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._model.config.num_hidden_layers = layers
        static = (*self.cache, context)
        logits: Tensor = self._model(tokens, position_ids=positions, use_cache=False, static=static).logits
        return logits


def _static_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, static: tuple[Tensor, Tensor, int], **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of the newest positions: q (rows, heads, positions, D), k and v (rows, kv_heads, positions, D)."""
    begin, end, grouped = static[2], static[2] + q.shape[2], q.shape[1] != k.shape[1]
    keys, values = (cache[module.layer_idx][:, :, :end] for cache in static[:2])
    keys[:, :, begin:], values[:, :, begin:] = k, v
    if q.shape[2] == 1:  # the heads that share keys become query positions: one read of the keys serves them all
        folded = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        out = F.scaled_dot_product_attention(folded, keys, values).reshape(q.shape)
    else:
        bias = causal_lower_right(q.shape[2], end)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=grouped)
    return out.transpose(1, 2), None


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, which has to use the same tensors every time.

    Raises:
        RuntimeError: Something in it cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their workspaces outside of the capture
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
