"""Fused layers of GPUs in Triton's interpreter: operators right to float64, a row's bits in any company, and models
that give the logits of transformers in few kernels.

`test_triton_interpreter.py` runs this file in a process of its own: TRITON_INTERPRET=1 counts when triton is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from specactor_ray.models import _layers_triton as kernels
from specactor_ray.models import layers, paged_cache, ragged_model
from specactor_ray.models.batch_invariance import Invariant
from specactor_ray.models.ragged_model import RaggedModel, read_in_parts
from tests.attention import attending_on_gpu
from tests.families import make_model
from tests.page_attention import same_bits
from tests.unit.interpreted_kernels import exact_dots, quick_interpreter  # noqa: F401
from tests.unit.models.test_layers import close, rotated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 16, 128)


def made(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, offset: int) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "offset"), [(48, 0), (100, 1)])
def test_norms_and_the_sums_before_them(columns: int, offset: int, dtype: torch.dtype) -> None:
    x, more, weight = (
        made(seed, *shape, dtype=dtype) for seed, shape in enumerate([(128, columns)] * 2 + [(columns,)])
    )
    close(kernels.rms_norm(x, weight, 1e-5, offset), normed(x, weight, offset))
    total, found = kernels.rms_norm(x, weight, 1e-5, offset, more)
    close(total, x.double() + more.double())  # the interpreter cuts bits off where a GPU rounds to bfloat16
    close(found, normed(total, weight, offset))
    for rows in ROWS[:-1]:
        part = kernels.rms_norm(x[None, -rows:], weight, 1e-5, offset, more[None, -rows:])
        assert same_bits(part[0][0], total[-rows:]) and same_bits(part[1][0], found[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kernels.GATES)
def test_gates(kind: str, dtype: torch.dtype) -> None:
    """Of two tensors, and of two parts of one."""
    gate, up = (made(0, 128, 2 * 1100, dtype=dtype) * 4).split(1100, dim=-1)
    gate[0, :8] = torch.tensor([-1e4, -100, -88, -5, 0, 88, 100, 1e4])
    act: Any = functional.silu if kind == "silu" else functional.gelu
    options = {"approximate": "tanh"} if kind == "gelu_tanh" else {}
    exact, found = act(gate.double(), **options) * up.double(), kernels.gated(gate, up, kind)
    fits, eps = exact.abs() < torch.finfo(dtype).max, torch.finfo(dtype).eps
    torch.testing.assert_close(found[fits].double(), exact[fits], atol=16 * eps, rtol=2 * eps)  # 1 + erf cancels
    assert all(same_bits(kernels.gated(gate[None, :n].clone(), up[None, :n], kind)[0], found[:n]) for n in ROWS[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "angles", "norm"),
    [((6, 2), 16, 16, None), ((3, 3), 24, 16, 0), ((4, 1), 16, 8, 1), ((8, 2), 10, 10, None)],
)
def test_keys_and_values_on_their_way_into_pages(
    heads: tuple[int, int], dim: int, angles: int, norm: int | None, dtype: torch.dtype
) -> None:
    """Of tokens before padding, which are parts of one product."""
    tokens, used, value_dim = 20, 18, 12
    sizes = [heads[0] * dim, heads[1] * dim, heads[1] * value_dim]
    parts = made(0, tokens, sum(sizes), dtype=dtype).split(sizes, dim=-1)
    query, key, value = (x.unflatten(-1, (-1, d)) for x, d in zip(parts, (dim, dim, value_dim), strict=True))
    angle, slots = made(1, tokens, angles // 2), torch.randperm(48, generator=torch.Generator().manual_seed(0))[:used]
    rotary = tuple(torch.cat([f(angle)] * 2, dim=-1).to(dtype) for f in (torch.cos, torch.sin))
    weights = made(2, dim, dtype=dtype), made(3, dim, dtype=dtype)
    norms = None if norm is None else (*weights, 1e-5, norm)

    def run(at: list[int] | slice) -> Any:
        pools = torch.zeros(3, 16, heads[1], dim, dtype=dtype), torch.zeros(3, 16, heads[1], value_dim, dtype=dtype)
        turned = kernels.store_pages(
            query[at], key[at], value[at], *pools, slots[at], tuple(x[at] for x in rotary), norms
        )
        return turned, *(pool.flatten(0, 1) for pool in pools)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.double() if norm is None else normed(x, weight, norm)
        return rotated(x, tuple(one.double() for one in rotary))

    turned, keys, values = run(slice(None))
    close(turned[:used], exact(query, weights[0])[:used])
    close(keys[slots], exact(key, weights[1])[:used])
    assert torch.equal(values[slots], value[:used])
    assert values.count_nonzero() == value[:used].count_nonzero(), "nothing elsewhere"
    for token in (0, 5, used - 1):
        alone = run([token])
        assert same_bits(alone[0][:1], turned[token : token + 1])
        assert same_bits(alone[1][slots[token]], keys[slots[token]])


def load(kind: str, number: int = 1, **options: Any) -> RaggedModel:
    return RaggedModel(make_model(kind, num_hidden_layers=number), 1 << 17, **options)


def read(model: RaggedModel, *parts: np.ndarray) -> torch.Tensor:
    """Logits of a sequence."""
    row, found = model.cache.open(sum(map(len, parts))), []
    assert row is not None
    for tokens in parts:
        count = np.array([len(tokens)])
        found.append(model.forward(np.array([row]), count, tokens, count))
    model.cache.free(row)
    return torch.cat(found)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "_CPU_PAGE", 32)


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are not compared at load, which takes seconds in the interpreter."""
    monkeypatch.setattr(RaggedModel, "_check", lambda *_: None)


_ALL = {"Attention", "GatedMlp", "Layer", "RmsNorm"}


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("llama", _ALL), ("qwen2", _ALL), ("qwen3", _ALL), ("gemma", _ALL), ("gemma2", _ALL), ("gemma3_text", _ALL),
        ("mistral", _ALL), ("seed_oss", _ALL - {"GatedMlp"}), ("phi3", {"RmsNorm"}), ("smollm3", _ALL - {"Attention"}),
        ("qwen3_moe", _ALL - {"GatedMlp"}), ("deepseek_v3", _ALL - {"Attention"}), ("gpt2", set()),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(kind: str, fused: set[str]) -> None:
    model, tokens = make_model(kind, num_hidden_layers=1 + (kind == "deepseek_v3")), np.arange(12) * 7 % 96
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    with attending_on_gpu(fused=True):
        found = read(RaggedModel(model, 1 << 17), tokens[:11], tokens[11:])
    forms = {type(one.forward).__name__.strip("_") for one in model.modules() if "forward" in vars(one)}
    assert forms == fused
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("unproved")
def test_a_row_has_its_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `target.batch_invariant`: its proof at load takes the operators of fused layers."""
    monkeypatch.setattr(ragged_model, "invariant", lambda *_: Invariant())
    with attending_on_gpu(fused=True), monkeypatch.context() as patch:
        patch.setattr(ragged_model, "_COMPANY", 20)
        model, tokens = load("qwen3", batch_invariant=True), np.arange(6)
        patch.undo()
        alone = read_in_parts(model, tokens, [6], 0)
        for beside in (16, 128):
            assert same_bits(read_in_parts(model, tokens, [2, 1, 3], beside), alone), beside


@pytest.mark.usefixtures("unproved")
def test_new_weights_and_another_memory() -> None:
    """Weights of one product are parts of one tensor, and stay the model's under their names; after they went to
    another memory and back they are joined again."""
    tokens = np.arange(20)
    with attending_on_gpu(fused=True):
        model = load("qwen2")
        attention, names = model.model.model.layers[0].self_attn, list(model.model.state_dict())
        old = read(model, tokens)
        new = {name: weight + 0.01 * torch.randn_like(weight) for name, weight in model.model.state_dict().items()}
        model.load_weights(new)
        assert list(model.model.state_dict()) == names
        changed = read(model, tokens)
        assert not torch.allclose(changed, old)
        for parameter in model.model.parameters():
            parameter.data = parameter.data.clone()
        assert len({p.untyped_storage().data_ptr() for p in attention.parameters()}) == 7
        torch.testing.assert_close(read(model, tokens), changed, atol=1e-5, rtol=1e-4)
        layers.sleep(model.model, model.cache)
        layers.wake(model.model, model.cache)
        assert len({p.untyped_storage().data_ptr() for p in attention.parameters()}) == 3
        torch.testing.assert_close(read(model, tokens), changed, atol=1e-5, rtol=1e-4)
        fresh = RaggedModel(model.model.__class__(model.model.config).eval(), 1 << 17)
        fresh.load_weights(new)
        torch.testing.assert_close(read(fresh, tokens), changed, atol=1e-5, rtol=1e-4)
