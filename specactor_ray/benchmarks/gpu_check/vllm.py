"""Stage `vllm`: batches as in `rollouts` on the product's vllm engine, beside `vllm.LLM` on the same requests.

vLLM keeps its first model, so every engine has a process of its own. Weights are vLLM's dummies, which make all logits
nearly equal: the keyed noise decides.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specactor_ray.benchmarks.gpu_check.models import qwen_config
from specactor_ray.benchmarks.gpu_check.rollouts import STEP_TOKENS, WINDOW, Batch, requests
from specactor_ray.benchmarks.gpu_check.settings import ModelShape, Settings
from specactor_ray.benchmarks.gpu_check.stages import OutOfTime, Skipped, Stage
from specactor_ray.benchmarks.peers import PeerWork
from specactor_ray.benchmarks.vllm_peer import measure_peer
from specactor_ray.child import Report, run_in_child
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.errors import ConfigError
from specactor_ray.target.vllm_version import require_vllm

_ENGINES = {"speculative": WINDOW, "vllm.LLM": 0, "plain": 0}
"""Engine → most drafts of a row that it is made for."""


@dataclass(frozen=True)
class _Work:
    """What the product's engine does in a process of its own."""

    engine: str
    cell: tuple[ModelShape, str, int]
    target: TargetConfig
    settings: Settings
    seconds: float
    limit_s: float


def measure_vllm(stage: Stage) -> None:
    """Fill a point per shape, dtype, requests, engine (`speculative`, `vllm.LLM`, or `plain`: without speculation
    configured) and way; with the kinds of CUDA graphs that steps took, and how many each.

    Raises:
        Skipped: vLLM is not installed, or in another version.
    """
    try:
        stage.entry["figures"]["version"] = require_vllm()
    except ConfigError as error:
        raise Skipped(str(error)) from None

    def measure(shape: ModelShape, dtype: str, rows: int, engine: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            qwen_config(shape).save_pretrained(folder)
            Path(folder, "model.safetensors").touch()
            target = _target(stage.settings, shape, dtype, rows, folder)
            try:
                return (_llm if engine == "vllm.LLM" else _ours)(stage, (shape, dtype, rows), engine, target)
            except TimeoutError:
                raise OutOfTime from None

    stage.each([(*cell, engine) for cell in stage.settings.vllm.cells for engine in _ENGINES], measure)


def _target(settings: Settings, shape: ModelShape, dtype: str, rows: int, folder: str) -> TargetConfig:
    tokens = settings.vllm.prompt + settings.vllm.tokens + WINDOW + 1
    cache_bytes = 2 * shape.cache_bytes(rows * (tokens + 256), 4)
    return TargetConfig(
        model=folder,
        backend="vllm",
        dtype=dtype,
        max_model_len=tokens,
        max_batch=rows,
        max_step_tokens=max(STEP_TOKENS, rows * (1 + WINDOW)),
        kv_cache_gb=cache_bytes / 2**30,
        compiled=settings.device == "cuda",
        # The process that asks holds some of the GPU's memory, too.
        engine_arguments={"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.85},
    )


def _llm(stage: Stage, cell: tuple[ModelShape, str, int], engine: str, target: TargetConfig) -> str:
    asked = requests(stage.settings.vllm, cell[0], cell[2])
    workload = ("plain", tuple(one.prompt_token_ids for one in asked), tuple(one.sampling for one in asked))
    work = PeerWork(engine, None, tuple(os.sched_getaffinity(0)), cell[2], Config(target=target), (workload,))
    [found] = run_in_child(measure_peer, work, engine, stage.changed, stage.deadline - stage.now())
    speed = {"tokens/s": found.tokens / found.seconds, "tokens/row/step": found.tokens / found.row_steps}
    stage.point(engine=engine, shape=cell[0].name, dtype=cell[1], rows=cell[2], way="plain", **speed)
    return f"{speed['tokens/s']:.0f} tokens/s"


def _ours(stage: Stage, cell: tuple[ModelShape, str, int], engine: str, target: TargetConfig) -> str:
    left = stage.deadline - stage.now()
    work = _Work(engine, cell, target, stage.settings, left, stage.limit_s)
    entry = run_in_child(_measure_ours, work, f"vllm {engine}", stage.changed, left)
    for name in ("points", "not_measured"):
        stage.entry[name] += entry[name]
    return f"{len(entry['points'])} measured"


def _measure_ours(work: _Work, report: Report) -> dict[str, Any]:
    """In the child: a stage's entry."""
    from specactor_ray.target.vllm import VllmEngine

    stage = Stage("vllm", work.settings, 0.0, work.limit_s, report)
    stage.deadline = stage.now() + work.seconds
    engine = VllmEngine.from_config(work.target, _ENGINES[work.engine])
    report(f"vllm: {work.engine} started, {stage.deadline - stage.now():.0f} s are left")
    graphs = Counter[str]()
    engine.count_graphs(graphs)
    batch = Batch(stage, engine, work.settings.vllm, {"engine": work.engine}, *work.cell)

    def measure(way: str) -> str:
        graphs.clear()
        line = batch.run(way)
        stage.entry["points"][-1]["graphs"] = ", ".join(f"{name} {count}" for name, count in graphs.items())
        return line

    ways = work.settings.vllm.ways if _ENGINES[work.engine] else ("plain",)
    stage.each([(way,) for way in ways], measure)
    engine.close()
    return stage.entry
