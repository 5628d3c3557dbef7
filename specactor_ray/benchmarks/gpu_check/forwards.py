"""Stage 2: seconds of a forward over rows x positions x context, eager and as a captured graph.

V of the cost model; with one position a row also D, the cost of a drafter's token. A forward ends with the logits of
all its positions in the model's dtype; sampling is not part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.settings import ForwardGrid, ModelShape
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.benchmarks.gpu_check.static_model import KVCache, StaticModel, attention_kernel
from specactor_ray.benchmarks.gpu_check.timing import captured, median_s

_MEMORY_SHARE = 0.85
"""Of the free memory, what a cache may take; the rest is for activations, logits and graphs."""


def measure_forwards(stage: Stage) -> None:
    """Fill `shapes`: name → points `[rows, positions, context, seconds]`, `context` being the tokens of each row in the
    cache before the forward."""
    device, dtype = torch.device(stage.settings.device), getattr(torch, stage.settings.dtype)
    grid = stage.settings.forwards
    stage.figures |= {"columns": ["rows", "positions", "context", "seconds"], "shapes": {}}
    models: dict[str, _Measured] = {}
    for context in grid.contexts:
        for shape in grid.shapes:
            stage.check(f"{shape.name} at a context of {context}")
            if shape.name not in models:
                model = StaticModel.random(shape, dtype, device)
                models[shape.name] = _Measured(model, stage)
            models[shape.name].measure(grid, context)


class _Measured:
    """One model shape and its entry in the figures."""

    def __init__(self, model: StaticModel, stage: Stage) -> None:
        self._model, self._stage, shape = model, stage, model.shape
        self._depths = sorted(shape.sampled_layers or (shape.layers,))
        self.entry: dict[str, Any] = {
            "graph": [],
            "eager": [],
            "skipped": [],
            "attention": attention_kernel(shape, model.dtype, model.device),
        }
        if shape.sampled_layers:
            few, many = self._depths
            self.entry["scaled"] = f"{shape.name} from {few} and {many} layers to {shape.layers}"
            self.entry["by_layers"] = {str(depth): {"graph": [], "eager": []} for depth in self._depths}
        if model.device.type != "cuda":
            self.entry["graph_missing"] = "CUDA graphs need a CUDA device"
        stage.figures["shapes"][shape.name] = self.entry

    def measure(self, grid: ForwardGrid, context: int) -> None:
        """All rows and positions at one context."""
        shape, stage = self._model.shape, self._stage
        longest = max(grid.positions)
        fitting = [rows for rows in grid.rows if self._fits(rows * (context + longest))]
        for rows in grid.rows[len(fitting) :]:
            self._skip([rows, longest, context], "the cache does not fit into memory")
        if not fitting:
            return
        cache = KVCache.random(shape, max(fitting), context + longest, self._model.dtype, self._model.device)
        for rows in fitting:
            for positions in grid.positions:
                stage.check(f"{shape.name}: {rows} rows of {positions} positions at a context of {context}")
                try:
                    self._point(cache.rows(0, rows), rows, positions, context)
                except torch.OutOfMemoryError:
                    self._skip([rows, positions, context], "out of memory")
            stage.note(self._line(rows, context))

    def _fits(self, tokens: int) -> bool:
        if self._model.device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return self._model.shape.cache_bytes(tokens, self._model.dtype.itemsize) < _MEMORY_SHARE * free

    def _point(self, cache: KVCache, rows: int, positions: int, context: int) -> None:
        model = self._model
        tokens = torch.randint(model.shape.vocab, (rows, positions), device=model.device)
        by_kind: dict[str, list[float]] = {"eager": [], "graph": []}
        for depth in self._depths:
            call = functools.partial(self._forward, tokens, cache, context, depth)
            by_kind["eager"].append(median_s(call, model.device))
            if "graph_missing" not in self.entry:
                by_kind["graph"] += self._graph_s(call, [rows, positions, context])
        for kind, seconds in by_kind.items():
            if len(seconds) == len(self._depths):
                self._add(kind, [rows, positions, context], seconds)

    def _forward(self, tokens: torch.Tensor, cache: KVCache, context: int, depth: int) -> torch.Tensor:
        return self._model.logits(self._model.hidden(tokens, cache, context, depth))

    def _graph_s(self, call: Callable[[], object], point: list[int]) -> list[float]:
        """Seconds as a graph; none where it cannot be captured. If the first point cannot, no other one is tried."""
        try:
            return [median_s(captured(call).replay, self._model.device)]
        except RuntimeError as error:  # running out of memory in a capture is one, too
            self._skip(point, f"graph: {error}")
            if not self.entry["graph"]:
                self.entry["graph_missing"] = f"the forward could not be captured: {error}"
            return []

    def _skip(self, point: list[int], reason: str) -> None:
        self.entry["skipped"].append([*point, reason.partition("\n")[0]])

    def _add(self, kind: str, point: list[float], seconds: Sequence[float]) -> None:
        if len(seconds) == 1:
            self.entry[kind].append([*point, seconds[0]])
            return
        for depth, measured in zip(self._depths, seconds, strict=True):
            self.entry["by_layers"][str(depth)][kind].append([*point, measured])
        self.entry[kind].append([*point, whole_model_s(self._model.shape, self._depths, seconds)])

    def _line(self, rows: int, context: int) -> str:
        kind = "graph" if self.entry["graph"] else "eager"
        points = [point for point in self.entry[kind] if point[0] == rows and point[2] == context]
        costs = ", ".join(f"{point[1]}: {1e3 * point[3]:.2f}" for point in points)
        return f"{self._model.shape.name}, {rows} rows, context {context}, {kind}, ms by positions: {costs}"


def whole_model_s(shape: ModelShape, depths: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds with all layers, from those with a few and with some more: the difference is what layers cost, and noise
    never makes a layer cost less than nothing."""
    (few, many), (few_s, many_s) = depths, seconds
    return few_s + max(many_s - few_s, 0.0) / (many - few) * (shape.layers - few)
