"""The stages of `scripts/gpu-check` on a GPU with tiny shapes: CUDA graphs, kernels, peak memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from gpu_check.command import STAGES, run_check
from tests.fakes.tiny_check import TINY_CHECK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_check_captures_graphs_and_measures_every_stage(tmp_path: Path) -> None:
    settings = TINY_CHECK._replace(device="cuda", dtype="bfloat16")
    names = [name for name in STAGES if name != "vllm"]
    stages = run_check(settings, names, tmp_path / "check.json", time.perf_counter() + 1000.0)["stages"]
    statuses = {name: entry["status"] for name, entry in stages.items()}
    assert statuses.pop("sleep") in ("complete", "partial"), stages  # partial without vLLM
    assert set(statuses.values()) == {"complete"}, stages
    for point in stages["sleep"]["points"]:
        assert max(point["asleep GiB"], point["without weights GiB"]) <= point["awake GiB"]
    points = stages["drafting"]["points"]
    assert len(points) == 2 and all(point["eager x1 ms"] > 0 and point["graph turn ms"] > 0 for point in points)
    assert len(stages["target"]["points"]) == len(stages["flips"]["points"]) == 4
    assert not any(point["invariant flips"] for point in stages["flips"]["points"])
    for point in stages["target"]["points"]:
        assert point["forward ms"] > 0 and point["graph exposed ms"] is not None and point["eager ms"] > 0
        assert point["graph attention ms"] > 0 and point["graph sampler ms"] > 0
