"""Stage `vllm`: batches as in `rollouts` on the package's vllm engine, and the same requests on `vllm.LLM`.

vLLM keeps its first model, so every engine has its own process. Weights are vLLM's dummy weights, which make all
logits nearly equal: the keyed noise decides.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specactor_ray.bench.gpu_check.models import qwen_config
from specactor_ray.bench.gpu_check.rollouts import STEP_TOKENS, WINDOW, CellRequests, requests
from specactor_ray.bench.gpu_check.settings import Cell, Settings
from specactor_ray.bench.gpu_check.stages import OutOfTime, Stage
from specactor_ray.bench.peers import PeerWork
from specactor_ray.bench.vllm_peer import measure_peer
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.core.child import Report, run_in_child
from specactor_ray.core.errors import ConfigError
from specactor_ray.target.vllm_version import require_vllm

_ENGINES = {"speculative": WINDOW, "vllm.LLM": 0, "plain": 0}
"""Engine → most drafts of a row."""


def measure_vllm(stage: Stage) -> None:
    """Fill a point per engine (`speculative`, `vllm.LLM`, or `plain`: without speculation configured), cell and way;
    `graphs`: how many steps took which kind of CUDA graph."""
    try:
        stage.entry["figures"]["version"] = require_vllm()
    except ConfigError as error:
        stage.entry["not_measured"].append(str(error))
        return

    def measure(cell: Cell, engine: str) -> str:
        begin = stage.now()
        try:
            with tempfile.TemporaryDirectory() as folder:
                run = _measure_peer if engine == "vllm.LLM" else _measure_ours
                run(stage, engine, cell, _target(stage.settings, cell, folder))
        except TimeoutError:
            raise OutOfTime from None
        return f"{stage.now() - begin:.0f} s with its start"

    stage.each(itertools.product(stage.settings.vllm_cells, _ENGINES), measure)


def _target(settings: Settings, cell: Cell, folder: str) -> TargetConfig:
    """Make a checkpoint without weights in this folder."""
    qwen_config(cell.shape).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, Path(folder, "model.safetensors"))
    tokens = settings.prompt + settings.tokens + WINDOW + 1
    return TargetConfig(
        model=folder, dtype=cell.dtype, compiled=settings.device == "cuda", max_model_len=tokens, max_batch=cell.rows,
        max_step_tokens=max(STEP_TOKENS, cell.rows * (1 + WINDOW)),
        kv_cache_gb=2 * cell.shape.cache_bytes(cell.rows * (tokens + 256), 4) / 2**30,
        # The parent process holds some of the GPU's memory, too.
        engine_arguments={"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.85},
    )  # fmt: skip


def _measure_peer(stage: Stage, engine: str, cell: Cell, target: TargetConfig) -> None:
    asked = requests(stage.settings, cell)
    load = ("plain", tuple(one.prompt_token_ids for one in asked), tuple(one.sampling for one in asked))
    work = PeerWork(engine, None, tuple(os.sched_getaffinity(0)), cell.rows, Config(target=target), (load,))
    [found] = run_in_child(measure_peer, work, engine, lambda line: None, stage.deadline - stage.now())
    speed = {"tokens/s": found.tokens / found.seconds, "acc. length": found.tokens / found.row_steps}
    stage.point({"engine": engine, **cell.columns, "way": "plain"}, **speed)


def _measure_ours(stage: Stage, engine: str, cell: Cell, target: TargetConfig) -> None:
    work = (engine, cell, target, stage.settings, stage.deadline - stage.now())
    entry = run_in_child(_in_child, work, f"vllm {engine}", stage.changed, stage.deadline - stage.now())
    for name in ("points", "not_measured"):
        stage.entry[name] += entry[name]


def _in_child(work: tuple[str, Cell, TargetConfig, Settings, float], report: Report) -> dict[str, Any]:
    """Measure one engine in a child process, within the given seconds."""
    from specactor_ray.target.vllm import VllmEngine

    name, cell, target, settings, seconds = work
    stage, graphs = Stage(f"vllm, {name}", settings, 0.0, report), dict[str, int]()
    stage.deadline = stage.now() + seconds
    engine = VllmEngine.from_config(target, _ENGINES[name])
    engine.count_graphs(graphs)
    batch = CellRequests(stage, engine, cell, {"engine": name})

    def measure(way: str) -> str:
        graphs.clear()
        line = batch.run(way)
        stage.entry["points"][-1]["graphs"] = ", ".join(f"{kind} {count}" for kind, count in graphs.items())
        return line

    stage.each([(way,) for way in settings.ways if way == "plain" or _ENGINES[name]], measure)
    engine.close()
    return stage.entry
