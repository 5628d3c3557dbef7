"""`scripts/gpu-check` on a GPU with tiny shapes: CUDA graphs, the flash kernel, peak memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specactor_ray.benchmarks.gpu_check import command
from specactor_ray.benchmarks.gpu_check.settings import DRY_RUN, TINY
from specactor_ray.benchmarks.gpu_check.static_model import KVCache, StaticModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_dry_run_on_the_gpu_captures_graphs_and_completes(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    assert command.main(["--dry-run", "cuda", "--output", str(path)]) == 0
    stages = json.loads(path.read_text())["stages"]
    assert {stage["status"] for stage in stages.values()} == {"complete"}
    grid = DRY_RUN.forwards
    for shape in stages["forwards"]["figures"]["shapes"].values():
        assert len(shape["graph"]) == len(grid.rows) * len(grid.positions) * len(grid.contexts)
        assert shape["attention"] == "flash" and not shape["skipped"]
    assert all(point["T=1"]["peak_gb"] > 0 for point in stages["sampler"]["figures"]["points"])


@pytest.mark.parametrize("positions", [1, 3])
def test_the_static_forward_on_a_gpu_is_that_of_the_cpu(positions: int) -> None:
    on_cpu = StaticModel.random(TINY, torch.float32, torch.device("cpu"))
    cache = KVCache.random(TINY, 2, 40, torch.float32, torch.device("cpu"))
    on_gpu = StaticModel.random(TINY, torch.bfloat16, torch.device("cuda"))
    for mine, theirs in zip(on_gpu.layers, on_cpu.layers, strict=True):
        for name, weight in vars(theirs).items():
            getattr(mine, name).copy_(weight)
    on_gpu.embedding.copy_(on_cpu.embedding)
    copied = KVCache(
        [keys.to("cuda", torch.bfloat16) for keys in cache.keys],
        [values.to("cuda", torch.bfloat16) for values in cache.values],
    )
    tokens = torch.randint(TINY.vocab, (2, positions))
    expected = on_cpu.hidden(tokens, cache, 37)
    got = on_gpu.hidden(tokens.cuda(), copied, 37).float().cpu()
    assert float((got - expected).norm() / expected.norm()) < 0.03
