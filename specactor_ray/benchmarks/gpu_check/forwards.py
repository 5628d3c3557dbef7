"""Stage `forwards`: seconds of a forward over rows x positions x context, eager and as a captured graph.

V of the cost model; with one position a row also D, the cost of a drafter's token. A forward ends with the logits of
all its positions, in the dtype of the model. Keys and values are static, and there is no mask: the
static cache of transformers makes one, which rules out the flash kernel and repeats the keys of grouped heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from specactor_ray.benchmarks.gpu_check.models import random_model
from specactor_ray.benchmarks.gpu_check.settings import ModelShape
from specactor_ray.benchmarks.gpu_check.stages import Stage


def measure_forwards(stage: Stage) -> None:
    """Fill a point per shape, context (tokens of each row in the cache before) and rows, in ms by new positions of a
    row; and per shape `[rows, positions, context, seconds]` of `eager` and `graph`, and why there is none of these."""
    settings, device = stage.settings, stage.settings.device
    models, forwards = dict[ModelShape, Any](), list[StaticForward]()

    def measure(context: int, shape: ModelShape, rows: int, positions: int) -> str:
        if shape not in models:
            models[shape] = random_model(shape, settings.dtype, device)
            reason = "" if device == "cuda" else "CUDA graphs need a CUDA device"
            stage.entry["figures"][shape.name] = {"graph": [], "eager": [], "not_captured": reason}
        size, entry = (
            (models[shape], rows, context + max(settings.forward_positions)),
            stage.entry["figures"][shape.name],
        )
        if not forwards or forwards[0].size != size:
            forwards.clear()
            forwards.append(StaticForward(*size))
        tokens = torch.randint(shape.vocab_size, (rows, positions), device=device)
        eager = functools.partial(forwards[0], tokens, context)
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
    """Forwards of a transformers model over keys and values of fixed size, `capacity` tokens for each of `rows` rows,
    without a wait for the device: a CUDA graph can hold one. The model's attention is replaced, and its norms of eight
    kernels each by torch's. All rows have the same number of tokens in the cache, which begins with random ones."""

    def __init__(self, model: Any, rows: int, capacity: int) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("specactor_static", _static_attention)
        model.set_attn_implementation("specactor_static")
        for module in model.modules():
            if type(module).__name__ == "Qwen2RMSNorm":
                size, eps = module.weight.shape, module.variance_epsilon
                module.forward = functools.partial(F.rms_norm, normalized_shape=size, weight=module.weight, eps=eps)
        self.size, layers = (model, rows, capacity), model.model.layers
        shape = (2, len(layers), rows, model.config.num_key_value_heads, capacity, layers[0].self_attn.head_dim)
        self.cache = torch.empty(shape, dtype=model.dtype, device=model.device).normal_()

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, context: int) -> Tensor:
        """Logits (rows, positions, V) of tokens (rows, positions) that follow `context` ones."""
        positions = torch.arange(context, context + tokens.shape[1], device=tokens.device).expand_as(tokens)
        static = (*self.cache, context)
        logits: Tensor = self.size[0](tokens, position_ids=positions, use_cache=False, static=static).logits
        return logits


def _static_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, static: tuple[Tensor, Tensor, int], **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of the newest positions: (rows, heads, positions, D)."""
    begin, end, grouped = static[2], static[2] + q.shape[2], q.shape[1] != k.shape[1]
    keys, values = (cache[module.layer_idx][:, :, :end] for cache in static[:2])
    keys[:, :, begin:], values[:, :, begin:] = k, v
    if q.shape[2] == 1:  # the heads that share keys become query positions: one read of the keys serves them all
        folded = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(folded, keys, values).reshape(q.shape).transpose(1, 2), None
    bias = causal_lower_right(q.shape[2], end)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=grouped)
    return out.transpose(1, 2), None


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
