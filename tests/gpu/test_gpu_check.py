"""The stages of `scripts/gpu-check` on a GPU with tiny shapes: CUDA graphs, kernels, peak memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from specactor_ray.bench.gpu_check.command import STAGES, run_check
from specactor_ray.bench.gpu_check.measurements import StaticForward, random_model
from specactor_ray.models.ragged_model import RaggedModel
from tests.fakes.tiny_check import TINY, TINY_CHECK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_check_captures_graphs_and_measures_every_stage(tmp_path: Path) -> None:
    settings = TINY_CHECK._replace(device="cuda", dtype="bfloat16")
    report = run_check(settings, list(STAGES), tmp_path / "check.json", time.perf_counter() + 1000.0)
    stages = report["stages"]
    assert report["status"] == "complete", report
    shape = stages["forwards"]["figures"][TINY.name]
    count = len(settings.forward_rows) * len(settings.forward_positions) * len(settings.forward_contexts)
    assert len(shape["graph"]) == count
    assert all(point["T=1 ms"] > 0 and point["gb_per_s"] > 0 for point in stages["triton"]["points"])
    for point in stages["attention"]["points"]:
        assert point["kernel"] == "attend" and point["kernel ms"] > 0
        assert point["row alone"] == 0.0
    points = stages["drafting"]["points"]
    assert len(points) == 2 and all(point["eager x1 ms"] > 0 and point["graph x8 ms"] > 0 for point in points)


@pytest.mark.parametrize("positions", [1, 3])
def test_the_static_forward_on_a_gpu_is_that_of_the_cpu(positions: int) -> None:
    on_cpu, on_gpu = random_model(TINY, "float32", "cpu"), random_model(TINY, "bfloat16", "cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    prompt, tokens = torch.randint(TINY.vocab_size, (2, 37)), torch.randint(TINY.vocab_size, (2, positions))
    expected, got = (
        [forward.forward(prompt, 0)(), forward.forward(tokens, 37)()][1].float().cpu()
        for forward in (StaticForward(RaggedModel(model, 1 << 20), 2, 40) for model in (on_cpu, on_gpu))
    )
    assert float((got - expected).norm() / expected.norm()) < 0.05
