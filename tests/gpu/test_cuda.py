"""The engine on a GPU: the conformance suite on CUDA, and the noise of CUDA against that of the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.benchmarks.gpu_check.attention import measure_attention
from specactor_ray.benchmarks.gpu_check.settings import ON_GPU
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.benchmarks.gpu_check.triton_kernels import measure_triton
from specactor_ray.messages import SamplingParams
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import (
    AttentionRules,
    CommonPages,
    RaggedBatch,
    attend_common,
    attend_masked,
    attend_varlen,
    reads_common_pages_once,
    why_masked,
)
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.sampling import keyed as sampling
from specactor_ray.sampling.candidates import candidates
from specactor_ray.sampling.keyed import Backend, sample_rows
from specactor_ray.sampling.rules import Rules
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.hf import HfEngine
from tests.tiny import tiny_target
from tests.unit.engine_conformance import ModelConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class TestConformanceOnCuda(ModelConformance):
    """fp32 with exact matmuls (no TF32), so that drafted and plain runs agree token for token."""

    @classmethod
    def make_engine(cls, **limits: Any) -> TargetEngine:
        from transformers import AutoModelForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = False
        model = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).to("cuda")
        return HfEngine(RaggedModel(model, 64 << 20), [model.generation_config.eos_token_id], **limits)


@pytest.mark.parametrize("window", [None, 100])
def test_half_precision_runs_flash_attention_over_pages(window: int | None) -> None:
    """Not refused, as exact as a masked call, and the same bits for a row alone and among others."""
    torch.manual_seed(0)
    device, shape, dtype = torch.device("cuda", 0), LayerShape(2, 64, 64), torch.bfloat16
    cache = PagedCache([shape], shape.bytes(dtype) * 256 * 64, dtype, device)
    assert why_masked(device, dtype, cache.page_size, 6, shape, "") == ""
    for pool in (cache.keys[0], cache.values[0]):
        pool.normal_()
    counts, lengths = np.array([1, 5, 300, 1, 64]), np.array([900, 700, 300, 1, 1000])
    rows = np.array([cache.open(int(length)) for length in lengths])
    cache.lengths[rows] = lengths - counts
    query = torch.randn(counts.sum(), 6, 64, dtype=dtype, device=device)
    rules = AttentionRules(64**-0.5, window, None, None)
    together = RaggedBatch(cache, rows, counts, ())
    flash = attend_varlen(together, 0, query, rules)
    torch.testing.assert_close(flash, attend_masked(together, 0, query, rules), atol=0.02, rtol=0.02)
    for i, begin in enumerate(together.starts[:-1].tolist()):
        part = slice(begin, begin + int(counts[i]))
        alone = attend_varlen(RaggedBatch(cache, rows[i : i + 1], counts[i : i + 1], ()), 0, query[part], rules)
        assert torch.equal(alone, flash[part])


def test_common_pages_of_branches_are_read_once_by_flash_attention() -> None:
    torch.manual_seed(0)
    device, shape, dtype = torch.device("cuda", 0), LayerShape(2, 64, 64), torch.bfloat16
    cache = PagedCache([shape], shape.bytes(dtype) * 256 * 64, dtype, device)
    for pool in (cache.keys[0], cache.values[0]):
        pool.normal_()
    mains = np.array([cache.open(1600) for _ in range(3)])
    cache.lengths[mains] = 1500, 200, 600
    rows = np.append(mains, cache.fork(mains[[0, 0, 0, 1, 1]], np.array([1500, 1495, 1490, 200, 190])))
    counts = np.array([1, 2, 4, 1, 1, 3, 1, 1])
    assert cache.reserve_rows(rows, cache.lengths[rows] + counts).all()
    query = torch.randn(counts.sum(), 6, 64, dtype=dtype, device=device)
    batch, rules = RaggedBatch(cache, rows, counts, ()), AttentionRules(64**-0.5, None, None, None)
    assert batch.shared is not None and reads_common_pages_once(device, dtype, cache.page_size, 6, shape)
    common = CommonPages(batch, batch.shared)
    assert common.saved > 3000
    once = attend_common(batch, 0, query, rules, common)
    torch.testing.assert_close(once, attend_masked(batch, 0, query, rules), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_cuda_samples_what_the_cpu_samples(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 5000) * 3
    params = [
        SamplingParams(temperature, seed=i, top_k=(0, 40)[i % 2], top_p=(1.0, 0.9)[i % 3 == 0]) for i in range(64)
    ]
    positions = list(range(64))
    on_cpu = sample_rows(logits, params, positions)
    for backend in ("torch", "triton"):
        on_gpu = sample_rows(logits.cuda(), params, positions, backend=backend)
        assert on_gpu.token_ids == on_cpu.token_ids
        assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
def test_cuda_has_the_candidates_of_the_cpu(backend: Backend) -> None:
    logits, rows = 3 * torch.randn(60, 5000, generator=torch.Generator().manual_seed(0)), np.arange(60)
    params = [SamplingParams((0.0, 0.6, 1.0)[i % 3], seed=i, top_k=(0, 2, 40)[i % 4 % 3]) for i in range(60)]
    on_cpu, on_gpu = Rules(60), Rules(60, torch.device("cuda", 0))
    for rules in (on_cpu, on_gpu):
        rules.write(range(60), params, [0] * 60)
    want, got = candidates(logits, rows, rows, on_cpu), candidates(logits.cuda(), rows, rows, on_gpu, backend=backend)
    assert got.tokens.tolist() == want.tokens.tolist() and got.gaps.tolist() == want.gaps.tolist()


def test_triton_kernels_are_exact_and_timed_on_this_gpu() -> None:
    stage = Stage("triton", ON_GPU._replace(sampler_rows=(1, 128)), math.inf)
    measure_triton(stage)
    different = stage.entry["figures"]["different"]
    assert len(different) == 9 * len(ON_GPU.sampler_vocabs) and not any(different.values())
    assert all(
        point[f"{name} ms"] > 0
        for point in stage.entry["points"]
        for name in ("T=1", "T=0", "top-p 0.95", "candidates")
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_on_this_gpu_does_not_depend_on_the_batch(dtype: str) -> None:
    """FlashAttention over pages in bf16; the masked call in float32, which it refuses."""
    stage = Stage("attention", ON_GPU._replace(dtype=dtype), math.inf)
    measure_attention(stage)
    for point in stage.entry["points"]:
        assert dtype == "float32" or point["row alone"] == 0.0, point
        assert point["one by one"] < (0.02 if dtype == "bfloat16" else 1e-4), point
        assert ("flash over pages" in point["kernel"]) is (dtype == "bfloat16"), point
    sampling.warm_up(torch.device("cuda", 0), torch.bfloat16)
    assert sampling._fused_is_exact(torch.device("cuda", 0), torch.bfloat16, 1), "auto takes them"
