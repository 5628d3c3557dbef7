"""Stage `target`: decode steps of the `hf` engine with random weights, beside the forwards that they contain."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch

from gpu_check.models import STEP_TOKENS, random_model, random_prompts
from gpu_check.stage import Settings, Stage, shown
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.ragged import places
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.captured import CudaCapturer
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import NO_DRAFTS, Drafts, TargetEngine
from specactor_ray.target.hf import HfEngine

KERNELS = {"attention": ("attend", "merge"), "sampler": ("scan", "filter_rows", "commit")}
"""Names of kernels by what they do in a step."""
_OUTPUT = 256
"""Most tokens of a request: more than the timed steps commit."""


def measure_target(stage: Stage) -> None:
    """Fill a point per number of rows and of random draft tokens: ms of a forward alone (on a GPU as a CUDA graph); of
    a step of the engine, captured (on a GPU) and eager, and of it with an idle GPU; how many times as long as the
    forward a step is; and on a GPU ms of its attention and of its sampler. `fallbacks`: why there is no graph, or no
    sampler on the GPU, as in the log."""
    settings = stage.settings
    model = target_model(settings)
    engine = hf_engine(settings, model)
    ways = ("eager",) if engine._decode is None else ("graph", "eager")
    stage.entry["figures"]["fallbacks"] = fallbacks()

    def measure(rows: int, drafts: int, what: str) -> str:
        figures: dict[str, float | None] = {}
        if what == "forward":
            figures["forward ms"] = 1e3 * forward_s(stage, model, rows, 1 + drafts)
        else:
            figures |= step_figures(stage, engine, rows, drafts, what)
        point = stage.point({"rows": rows, "drafts": drafts}, **figures)
        if what == ways[0] and "forward ms" in point:
            point["x forward"] = point[f"{what} ms"] / point["forward ms"]
        return shown(figures)

    stage.each(itertools.product(settings.rows, settings.drafts, ("forward", *ways)), measure)


def target_model(settings: Settings) -> RaggedModel:
    """The target, with a cache for the largest number of rows."""
    tokens = max(settings.rows) * (settings.target_prompt + _OUTPUT + 512)
    return random_model(settings.target, settings.dtype, settings.device, tokens)


def hf_engine(settings: Settings, model: RaggedModel) -> HfEngine:
    """The product's engine over it."""
    return HfEngine(model, (), settings.target_prompt + _OUTPUT, max(settings.rows), STEP_TOKENS)


def step_figures(stage: Stage, engine: HfEngine, rows: int, drafts: int, way: str) -> dict[str, float | None]:
    """Milliseconds of a step in which `rows` requests decode, of these exposed ones (the GPU is idle), and those of
    kernels in `KERNELS`."""
    step = functools.partial(step_at_random, engine, drafts, np.random.default_rng(rows))
    captured = engine._decode
    if way == "eager":
        engine._decode = None
    try:
        begin_decoding(engine, stage.settings, rows)
        ms, seen = 1e3 * stage.median_s(step), stage.kernels(step)
    finally:
        engine._decode = captured
        end_all(engine)
        engine.reset_prefix_cache()
    figures = {f"{way} ms": ms, f"{way} exposed ms": None if seen.busy_s is None else ms - 1e3 * seen.busy_s}
    for part, names in KERNELS.items():
        figures[f"{way} {part} ms"] = 1e3 * sum(seen.seconds.get(name, 0.0) for name in names) if seen.seconds else None
    return figures


def begin_decoding(engine: TargetEngine, settings: Settings, rows: int) -> None:
    """Add `rows` requests with random prompts to an engine without requests, and run them until all of them decode."""
    for row, prompt in enumerate(random_prompts(settings, rows)):
        sampling = SamplingParams(seed=row, max_tokens=_OUTPUT, ignore_eos=True)
        engine.add(engine.table.open(TargetRequest(f"r{row}", tuple(prompt), sampling)))
    while len(engine.decoding()) < rows:
        if not engine.has_work():
            raise RuntimeError(f"the engine does not decode {rows} requests at once")
        engine.step()


def end_all(engine: TargetEngine) -> None:
    """Remove all requests."""
    for row in engine.table.requests:
        engine.remove(row)
    engine.table.clear()


def step_at_random(engine: TargetEngine, drafts: int, rng: np.random.Generator) -> None:
    """Run a step with this number of random draft tokens for each row."""
    rows = engine.decoding()
    tokens = rng.integers(0, engine.vocab_size, len(rows) * drafts).astype(np.int32)
    engine.step(Drafts(rows, np.full(len(rows), drafts, np.int32), tokens) if drafts else NO_DRAFTS, drafts)


def forward_s(stage: Stage, model: RaggedModel, rows: int, queries: int) -> float:
    """Median seconds of a forward of `queries` tokens of each row, after as many tokens as a prompt has."""
    cache, keys, n = model.cache, stage.settings.target_prompt, rows * queries
    at = np.array([cache.open(keys + queries) for _ in range(rows)])
    try:
        cache.lengths[at] = keys
        counts = np.full(rows, queries, np.int64)
        arrays = np.zeros(n, np.int64), places(cache.lengths[at], counts), np.arange(n)
        batch = RaggedBatch(cache, at, counts, arrays)
        with torch.inference_mode():
            call: Callable[[], object] = functools.partial(model._run, batch, *batch.arrays)
            return stage.median_s(CudaCapturer().capture(call) if stage.settings.device == "cuda" else call)
    finally:
        cache.free_rows(at)
