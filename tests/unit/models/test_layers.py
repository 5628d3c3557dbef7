"""Compiled norms, gates and rotary attention: what they stand for, and when they do."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from specactor_ray.models import cpu_attention, sources
from specactor_ray.models.cpu_attention import store_pages
from specactor_ray.models.layers import _GatedMlp, _RmsNorm
from specactor_ray.models.packed_linear import PackedLinear, cheapest_row_counts
from specactor_ray.models.ragged_model import RaggedModel
from tests.families import make_model

DTYPES = (torch.float32, torch.bfloat16)


def rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`(N, heads, dim)` with its pairs (i, i + angles / 2) rotated."""
    cos, sin = (angle[:, None] for angle in rotary)
    whole, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = whole.chunk(2, dim=-1)
    return torch.cat([whole * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected.double(), atol=2 * eps, rtol=2 * eps)


@pytest.fixture(params=[1, 3])
def threads(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cpu_attention, "_NUMBERS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_norm(dtype: torch.dtype, offset: int, threads: None) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(48).to(dtype), requires_grad=False)
    x = (torch.randn(2, 50, 48) * 3).to(dtype)
    norm = _RmsNorm(module, cpu_attention, 1e-5, offset)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (module.weight.double() + offset)
    close(norm(x), expected)
    assert torch.equal(norm(x[:, 7:8]), norm(x)[:, 7:8]), "a row alone"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype, threads: None) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.gate_proj, module.up_proj, module.down_proj = (nn.Identity() for _ in range(3))
    mlp = _GatedMlp(module, cpu_attention, "silu")
    x = torch.cat([torch.randn(60, 48) * 4, torch.tensor([[-1e4, -90, -88, -5, 0, 88, 90, 1e4] * 6])]).to(dtype)
    wide = x.double()
    expected = wide * torch.sigmoid(wide) * wide
    found = mlp(x.clone())
    fits = expected.abs() < torch.finfo(dtype).max
    close(found[fits], expected[fits])
    assert all(torch.equal(mlp(x[i : i + 1].clone()), found[i : i + 1]) for i in range(61))
    assert mlp(torch.full((1, 16), torch.nan, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "angles"), [(64, 64), (64, 32), (24, 24), (16, 8)])
def test_keys_and_values_on_their_way_into_pages(dtype: torch.dtype, dim: int, angles: int) -> None:
    torch.manual_seed(0)
    tokens = 6
    key, value = torch.randn(tokens + 2, 2, dim).to(dtype), torch.randn(tokens + 2, 2, 40).to(dtype)
    angle = torch.randn(tokens + 2, angles)
    rotary = angle.cos(), angle.sin()
    slots = torch.tensor([3, 17, 4, 40, 41, 0])
    keys, values = torch.zeros(3, 16, 2, dim, dtype=dtype), torch.zeros(3, 16, 2, 40, dtype=dtype)
    store_pages(key, value, keys, values, slots, rotary)
    close(keys.flatten(0, 1)[slots], rotated(key.double(), rotary)[:tokens])
    assert torch.equal(values.flatten(0, 1)[slots], value[:tokens])
    assert values.flatten(0, 1).count_nonzero() == value[:tokens].count_nonzero(), "nothing elsewhere"
    store_pages(key, value, keys, values, slots)
    assert torch.equal(keys.flatten(0, 1)[slots], key[:tokens])


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [
        ("llama", {"_RmsNorm": 5, "_GatedMlp": 2, "_Attention": 2}),
        ("qwen2", {"_RmsNorm": 5, "_GatedMlp": 2, "_Attention": 2}),
        ("qwen3", {"_RmsNorm": 9, "_GatedMlp": 2, "_Attention": 2}),
        ("gemma2", {"_RmsNorm": 9, "_Attention": 2}),  # its gate is no SiLU
        ("cohere", {"_GatedMlp": 2}),  # rotates neighbours, norms without a mean of squares
        ("ministral3", {"_RmsNorm": 5, "_GatedMlp": 2}),  # scales queries by their position
        ("olmo", {"_GatedMlp": 2}),  # clips queries, keys and values
        ("gpt2", {}),
    ],
)
def test_what_agrees_is_replaced_and_nothing_else(kind: str, replaced: dict[str, int]) -> None:
    """That they compute the same is in `test_families.py`."""
    forms = [vars(one).get("forward") for one in RaggedModel(make_model(kind), 4 << 20).model.modules()]
    assert Counter(type(form).__name__ for form in forms if form is not None) == replaced


@pytest.mark.parametrize(
    ("kind", "weight", "offset"), [("gemma2", 100.0, 1), ("gemma2", 0.0, 1), ("llama", 1.0, 0), ("qwen3", 1.0, 0)]
)
def test_the_form_of_a_norm_does_not_depend_on_its_weights(kind: str, weight: float, offset: int) -> None:
    """With weights of about 100, `weight` and `1 + weight` differ by less than roundings of bfloat16."""
    model = make_model(kind).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.constant_(parameter.data, weight)
    forms = [vars(one).get("forward") for one in RaggedModel(model, 4 << 20).model.modules()]
    norms = [form for form in forms if isinstance(form, _RmsNorm)]
    assert norms and {form.offset for form in norms} == {offset}


@pytest.mark.parametrize("table", [sources.NORMS, sources.GATED_MLPS, sources.ATTENTIONS, sources.LAYERS])
def test_sources_are_those_of_the_installed_transformers(table: dict[str, str]) -> None:
    """Another source must be read before its compiled form may stand for it."""
    for digest, name in table.items():
        family, _, kind = name.partition(".")
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert sources.source_of(getattr(module, kind)) == digest, name


def test_what_a_forward_calls_is_part_of_its_source() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

    class Same(LlamaRMSNorm):
        """Adds nothing to the computation."""

    class Clipped(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states).clamp(-8.0, 8.0)

    assert sources.source_of(Same) == sources.source_of(LlamaRMSNorm) in sources.NORMS
    assert sources.source_of(Clipped) not in sources.NORMS
    assert sources.source_of(LlamaAttention) in sources.ATTENTIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_counts_whose_bits_differ_are_padded(dtype: torch.dtype) -> None:
    """A sum of 1536 numbers that cancel shows the order of additions; one row alone has another with some kernels."""
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has no AVX512_BF16: bfloat16 is not packed for oneDNN")
    layer = PackedLinear(torch.ones(576, 1536, dtype=dtype), None)
    half = torch.randn(64, 768, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-12, 12).repeat(32)
    x = torch.cat([half, -half.flip(1)], dim=1).to(dtype)
    together = layer(x)
    for rows, count in enumerate(cheapest_row_counts([layer])):
        padded = torch.cat([x[:rows], torch.zeros(count - rows, 1536, dtype=dtype)])
        assert torch.equal(layer(padded)[:rows], together[:rows])
