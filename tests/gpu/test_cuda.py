"""The engine on a GPU: the conformance suite on CUDA, and the noise of CUDA against that of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.models.batch_invariance import Invariant
from specactor_ray.models.ragged_model import RaggedModel, read_in_parts
from specactor_ray.sampling.candidates import MOST
from specactor_ray.sampling.keyed import fitting, warm_up
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.hf import HfEngine
from tests.families import make_model
from tests.page_attention import attend, reference, same_bits, sequence
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


class TestConformanceOfBatchInvariance(ModelConformance):
    """In bfloat16: with the usual kernels drafted and plain runs differ."""

    @classmethod
    def make_engine(cls, **limits: Any) -> TargetEngine:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.bfloat16).to("cuda")
        eos = model.generation_config.eos_token_id
        return HfEngine(RaggedModel(model, 64 << 20, batch_invariant=True), [eos], **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_models_give_a_row_its_bits_in_every_batch(kind: str, dtype: torch.dtype) -> None:
    """By the proof at load, and beside hundreds of tokens."""
    model = RaggedModel(make_model(kind).to("cuda", dtype), 64 << 20, batch_invariant=True)
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=40).astype(np.int32)
    alone = read_in_parts(model, tokens, [40], 0)
    for parts, beside in (([1] * 40, 0), ([8, 4, 4, 24], 1), ([20, 20], 70), ([39, 1], 200)):
        assert torch.equal(read_in_parts(model, tokens, parts, beside), alone), (parts, beside)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_many_rows_have_the_bits_of_few(dtype: torch.dtype) -> None:
    """In the larger tile, which the comparison at the first product accepts."""
    from specactor_ray.models import _products_triton

    x, weight = (torch.randn(rows, 3584, device="cuda").to(dtype) for rows in (700, 4096))
    with Invariant():
        whole = torch.nn.functional.linear(x, weight)
        assert same_bits(torch.cat([torch.nn.functional.linear(part, weight) for part in x.split(100)]), whole)
    assert _products_triton._agree(x.device, dtype)


ROWS = [(1, 0), (1, 511), (1, 512), (5, 1020), (64, 0), (300, 700), (1, 2500), (2, 17_000)]
"""New tokens, and those before."""


def attend_paged(
    parts: list[Any], page_size: int, seed: int, programs: int | None = None, **options: Any
) -> list[torch.Tensor]:
    """`tests.page_attention.attend` on the GPU."""
    from specactor_ray.models._paged_attention_triton import paged_attention

    def run(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        keys, values, pages, starts, lengths, rules = arguments
        tensors = (one.cuda() for one in (query, keys, values))
        on_device = (torch.from_numpy(one).int().cuda() for one in (starts, lengths, pages))
        most = int(np.diff(starts).max()), int(lengths.max())
        output = paged_attention(*tensors, *on_device, *most, rules, programs).cpu()
        assert not output[starts[-1] :].any(), "padding sees nothing"
        return output

    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda()
    return attend(parts, page_size, seed=seed, run=run, **options)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "page_size", "options"),
    [
        (torch.bfloat16, (28, 4), (128, 128), 256, {}),
        (torch.bfloat16, (14, 2), (64, 64), 64, {"window": 100}),
        (torch.float16, (6, 2), (80, 80), 16, {"softcap": 30.0, "sinks": torch.linspace(-3, 3, 6)}),
        (torch.bfloat16, (8, 8), (192, 128), 64, {"window": 700, "sinks": torch.linspace(-3, 3, 8)}),
        (torch.bfloat16, (8, 4), (256, 256), 256, {"softcap": 0.7}),
        (torch.bfloat16, (71, 1), (64, 64), 256, {}),
        (torch.float32, (28, 4), (128, 128), 256, {}),
        (torch.float32, (6, 2), (24, 40), 16, {"window": 700, "softcap": 30.0, "sinks": torch.linspace(-3, 3, 6)}),
    ],
)
def test_attention_over_pages_is_right_and_its_bits_depend_on_the_row_alone(
    dtype: torch.dtype, heads: tuple[int, int], dim: tuple[int, int], page_size: int, options: dict[str, Any]
) -> None:
    parts = [
        (sequence(seed, before + count, *heads, *dim, dtype), before, before + count)
        for seed, (count, before) in enumerate(ROWS)
    ]
    together = attend_paged(parts, page_size, 0, padding=70, **options)
    tolerance = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for (one, begin, end), output in zip(parts, together, strict=True):
        expected = reference(one, begin, end, **options)
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
        for programs in (1, 3, None):
            (alone,) = attend_paged([(one, begin, end)], page_size, 1, programs=programs, **options)
            assert same_bits(output, alone), "alone, in other pages, by other programs"
        middle = (begin + end) // 2
        if begin < middle:
            cuts = (attend_paged([(one, *cut)], page_size, 2, **options) for cut in ((begin, middle), (middle, end)))
            assert same_bits(output, torch.cat([part for (part,) in cuts])), "its queries in two parts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [6016, 50_257, 151_936])
def test_triton_kernels_find_the_tokens_of_the_cpu(dtype: torch.dtype, vocab_size: int) -> None:
    from specactor_ray.sampling.keyed import difference

    assert not any(difference(torch.device("cuda"), dtype, ranks, vocab_size) for ranks in (1, 2, MOST))


def test_the_sampler_takes_its_kernels_on_this_gpu() -> None:
    warm_up(torch.device("cuda", 0), torch.bfloat16)
    assert fitting(torch.device("cuda", 0), torch.bfloat16, 1) == "triton"
