"""The stages of `scripts/gpu-check` that run vLLM, on the CPU with a tiny shape."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gpu_check.command import run_check
from tests.fakes.tiny_check import TINY_CHECK
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_our_engine_is_measured_beside_stock_vllm_and_both_engines_asleep(tmp_path: Path) -> None:
    settings = TINY_CHECK._replace(rows=(2,), accept=(0.0, 1.0), target_tokens=6)
    report = run_check(settings, ["vllm", "sleep"], tmp_path / "check.json", math.inf)
    assert report["status"] == "complete", report
    points = report["stages"]["vllm"]["points"]
    plain = [("stock", 0, None), ("ours", 0, None)]
    assert [(p["engine"], p["drafts"], p["accept"]) for p in points] == [*plain, ("ours", 2, 0.0), ("ours", 2, 1.0)]
    assert [p["tokens a step"] for p in points] == [1.0, 1.0, 1.0, 3.0]
    assert [p.get("same %") for p in points] == [None, 100.0, 100.0, 100.0]
    assert points[0]["x stock"] == 1.0 and all(0 < point["x stock"] < 10 for point in points[1:])
    for point in points:
        assert point["rounds"] == settings.rounds and point["ms"] * point["tokens/s"] > 0
        assert point["exposed ms"] is None and {name.partition(" ")[0] for name in point["graphs"]} == {"NONE"}
    assert [point["engine"] for point in report["stages"]["sleep"]["points"]] == ["hf", "vllm"]
    for point in report["stages"]["sleep"]["points"]:
        assert point["later step ms"] > 0 and point["load s"] > 0 and point["wake with new weights s"] > 0
