"""Stage 6: a step of the product's `hf` engine on the device, split into forward, sampling and our Python.

Every figure comes from two runs: `ms` from the engine as it is; the split from one that waits for the device after the
forward, without which the forward's time on a GPU would be that of its launches.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.models import SynchronizedModel, random_model
from specactor_ray.benchmarks.gpu_check.settings import EngineGrid, ModelShape
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.messages import SamplingParams
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.target.base import Drafts, StepResult, TargetRequest
from specactor_ray.target.hf import HfEngine

_PREFILL_TOKENS = 4096
_UNTIMED_STEPS = 2


def measure_engine_steps(stage: Stage) -> None:
    """Fill `steps`: per shape, rows and drafts a row, medians in milliseconds. All drafts are wrong, so that steps are
    alike; rejected ones cost what accepted ones do."""
    settings, grid = stage.settings, stage.settings.engine
    stage.figures |= {"dtype": settings.dtype, "prompt": grid.prompt, "steps": []}
    for shape in grid.shapes:
        stage.check(shape.name)
        model = random_model(shape, settings.dtype, settings.device)
        longest = max(grid.rows) * (grid.prompt + _tokens(grid) + 256)
        cache_bytes = shape.cache_bytes(longest, getattr(torch, settings.dtype).itemsize)
        stage.check(f"{shape.name}: the engine")
        synchronized = SynchronizedModel(model, cache_bytes)
        for rows in grid.rows:
            stage.check(f"{shape.name}: {rows} rows")
            split = _steps(_engine(synchronized, rows, grid), rows, shape, stage)
            point = [{"shape": shape.name, "rows": rows, "drafts": d, **_split(steps)} for d, steps in split.items()]
            stage.figures["steps"] += point
            stage.note(f"{shape.name}, {rows} rows: " + "; ".join(map(_line, point)))
        del synchronized
        whole = RaggedModel(model, cache_bytes)
        for rows in grid.rows:
            stage.check(f"{shape.name}: {rows} rows, unsplit")
            for drafts, steps in _steps(_engine(whole, rows, grid), rows, shape, stage).items():
                for point_ in stage.figures["steps"]:
                    if (point_["shape"], point_["rows"], point_["drafts"]) == (shape.name, rows, drafts):
                        point_["ms"] = 1e3 * statistics.median(seconds for seconds, _ in steps)
        stage.note(f"{shape.name}: without waiting for the device in the middle of a step")
        del whole, model


def _tokens(grid: EngineGrid) -> int:
    """Most output tokens of a row: one a step, since all drafts are wrong but for chance."""
    return (grid.steps + _UNTIMED_STEPS) * len(grid.drafts) * 2 + max(grid.drafts)


def _engine(model: RaggedModel, rows: int, grid: EngineGrid) -> HfEngine:
    step_tokens = max(_PREFILL_TOKENS, rows * (1 + max(grid.drafts)))
    return HfEngine(model, max_batch=rows, max_step_tokens=step_tokens)


def _steps(engine: HfEngine, rows: int, shape: ModelShape, stage: Stage) -> dict[int, list[tuple[float, StepResult]]]:
    """Drafts a row → (seconds, result) of each timed step; the draft counts take turns."""
    grid, rng = stage.settings.engine, random.Random(0)
    for i in range(rows):
        prompt = tuple(rng.randrange(shape.vocab) for _ in range(grid.prompt))
        engine.add(i, TargetRequest(str(i), prompt, SamplingParams(max_tokens=_tokens(grid), seed=i, ignore_eos=True)))
    while len(engine.decoding()) < rows:
        stage.check(f"{shape.name}: the prompts of {rows} rows")
        engine.step()
    timed: dict[int, list[tuple[float, StepResult]]] = {drafts: [] for drafts in grid.drafts}
    for step in range((grid.steps + _UNTIMED_STEPS) * len(grid.drafts)):
        stage.check(f"{shape.name}: steps of {rows} rows")
        drafts = grid.drafts[step % len(grid.drafts)]
        wrong = Drafts.of(dict.fromkeys(range(rows), [1] * drafts))
        begin = time.perf_counter()
        result = engine.step(wrong)
        if step >= _UNTIMED_STEPS * len(grid.drafts):
            timed[drafts].append((time.perf_counter() - begin, result))
    for i in range(rows):
        engine.remove(i)
    return timed


def _split(steps: Sequence[tuple[float, StepResult]]) -> dict[str, Any]:
    """Medians in milliseconds; `python` is what the engine does around the two others."""
    parts = {
        "synchronized_ms": [seconds for seconds, _ in steps],
        "forward_ms": [result.forward_s for _, result in steps],
        "sampling_ms": [result.sampling_s for _, result in steps],
        "python_ms": [seconds - result.forward_s - result.sampling_s for seconds, result in steps],
    }
    return {name: 1e3 * statistics.median(values) for name, values in parts.items()}


def _line(point: dict[str, Any]) -> str:
    parts = " + ".join(f"{name} {point[f'{name}_ms']:.2f}" for name in ("forward", "sampling", "python"))
    return f"{point['drafts']} drafts {point['synchronized_ms']:.2f} ms = {parts}"
