"""The stage `vllm` of `scripts/gpu-check` on vLLM's CPU build."""

from __future__ import annotations

import math

import pytest

from specactor_ray.bench.gpu_check import vllm
from specactor_ray.bench.gpu_check.settings import DRY_RUN
from specactor_ray.bench.gpu_check.stages import Stage
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.slow, pytest.mark.timeout(500)]


def test_our_engine_is_measured_beside_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_ENGINES", {"speculative": 8, "vllm.LLM": 0})
    stage = Stage("vllm", DRY_RUN._replace(limit_s=math.inf), math.inf)
    stage.deadline = stage.now() + 1e5
    vllm.measure_vllm(stage)
    assert not stage.entry["not_measured"]
    points = stage.entry["points"]
    assert [(point["engine"], point["way"]) for point in points] == [
        *(("speculative", way) for way in DRY_RUN.ways),
        ("vllm.LLM", "plain"),
    ]
    assert all(point["tokens/s"] > 0 and point["rows"] == 4 for point in points)
    assert points[1]["acc. length"] > 1.0 == points[0]["acc. length"]
    for point in points[:-1]:
        assert point["differ"] == 0 and point["graphs"].startswith("NONE ")
