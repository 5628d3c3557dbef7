"""A scenario that takes a second to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specactor_ray.simulation.comparison import Result, choose_variants, run_jobs

SMALL = """
description: Two verifiers and a drafter
hardware: h100
seed: 3
machines: [{nodes: 1, gpus: 4, cpus: 32}]
workload: {requests: 16, group: 4, prompt_tokens: 32, median_tokens: 40, sigma: 0.5, max_tokens: 120}
skills:
  - {method: draft_model, mean: 0.8}
load_s: 1.0
config:
  target: {model: qwen2.5-7b, gpus: 1, replicas: 2, max_batch: 4}
  drafters: [{method: draft_model, model: qwen2.5-0.5b, gpus: 1}]
variants:
  plain: [config.mode=plain, config.target.replicas=3]
  coupled: [config.mode=coupled]
  decoupled: [config.mode=decoupled]
"""


def write_scenario(folder: Path, text: str = SMALL) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def results_of(path: Path, overrides: Sequence[str] = (), names: Sequence[str] | None = None) -> list[Result]:
    """Results of variants (default: all), in this process."""
    return run_jobs([(path, overrides, name) for name in choose_variants(path, overrides, names)], processes=1)
