"""Products and sums of `target.batch_invariant` in Triton's interpreter: right to float64, and a row's bits in any
company.

`test_triton_interpreter.py` runs this file in a process of its own: TRITON_INTERPRET=1 counts when triton is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from specactor_ray.core.machine import fallbacks
from specactor_ray.models import _products_triton as kernels
from specactor_ray.models import ragged_model
from specactor_ray.models.batch_invariance import Invariant
from specactor_ray.models.ragged_model import RaggedModel, read_in_parts
from tests.families import make_model
from tests.page_attention import same_bits
from tests.unit.interpreted_kernels import exact_dots, quick_interpreter  # noqa: F401
from tests.unit.models.test_batch_invariance import products_of_gpus

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
sizes = st.tuples(st.sampled_from([1, 7, 32, 63, 64, 97, 200]), st.sampled_from([1, 5, 32, 45, 130]))


def made(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(sizes, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_a_row_has_its_bits_in_every_company(size, dtype, biased, transposed, chance) -> None:
    """As a linear layer and as GPT-2's, alone, first, last and in the midst of up to three tiles of rows."""
    inner, columns = size
    x, weight, bias = (
        made(1, 140, inner, dtype=dtype),
        made(2, columns, inner, dtype=dtype),
        made(3, columns, dtype=dtype),
    )
    exact = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    conv = Conv1D(columns, inner)
    conv.weight, conv.bias = (torch.nn.Parameter(one, requires_grad=False) for one in (weight.t().contiguous(), bias))

    def run(rows: torch.Tensor) -> torch.Tensor:
        with Invariant(), torch.inference_mode():
            if transposed and biased:
                return conv(rows)
            return functional.linear(rows, weight, bias if biased else None)

    whole = run(x)
    torch.testing.assert_close(whole.double(), exact, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for count in (1, 2, chance.randint(3, 63), 64, 65):
        begin = chance.randint(0, 140 - count)
        assert same_bits(run(x[begin : begin + count]), whole[begin : begin + count])
    moved = torch.randperm(140, generator=torch.Generator().manual_seed(chance.randint(0, 99)))
    assert same_bits(run(x[moved]), whole[moved])
    assert same_bits(run(x.t().contiguous().t()[None, :9]), whole[None, :9])  # other strides, more dimensions


def few_are_many(monkeypatch: pytest.MonkeyPatch, inner: int = 64) -> list[int]:
    """Products from 100 rows on take the larger tile, here with blocks of `inner`. Returns the rows of all tiles."""
    real, rows = kernels.tile_of, list[int]()

    def tile_of(itemsize: int, columns: int, many: bool = False) -> kernels.Tile:
        tile = real(itemsize, columns, many)
        rows.append(tile.rows)
        return tile._replace(inner=inner) if tile.rows == 128 else tile

    monkeypatch.setattr(kernels, "_MANY", 100)
    monkeypatch.setattr(kernels, "_MANY_COLUMNS", 1)
    monkeypatch.setattr(kernels, "tile_of", tile_of)
    kernels._agree.cache_clear()
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_have_the_bits_of_few(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ragged_model._COMPANY >= kernels._MANY, "the proof at load compiles both"
    x, weight, bias = made(1, 200, 150, dtype=dtype), made(2, 40, 150, dtype=dtype), made(3, 40, dtype=dtype)
    with Invariant():
        whole, rows = functional.linear(x, weight, bias), few_are_many(monkeypatch)
        for count in (1, 16, 128, 200):
            assert same_bits(functional.linear(x[:count], weight, bias), whole[:count])
            assert rows[-1] == (128 if count >= 100 else 64)
    assert kernels._agree(x.device, dtype)


def test_a_tile_with_other_bits_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with blocks of another length: what a library does that chooses kernels by the number of rows."""
    x, weight = made(0, 200, 200, dtype=torch.bfloat16), made(1, 32, 200, dtype=torch.bfloat16)
    with Invariant():
        whole, rows = functional.linear(x, weight), few_are_many(monkeypatch, inner=32)
        assert same_bits(functional.linear(x, weight), whole) and rows[-1] == 64
    assert any("rows take the tile for few rows on cpu" in line for line in fallbacks())
    kernels._agree.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [[3, 3, 70, 71, 90], [0, 0, 0, 0, 90], [90, 90, 90, 90, 90], [1, 2, 3, 4, 80]])
def test_experts_multiply_the_rows_that_chose_them(ends: list[int], dtype: torch.dtype) -> None:
    x, weight = made(1, 90, 40, dtype=dtype), made(2, 5, 24, 40, dtype=dtype)
    with Invariant():
        found = functional.grouped_mm(x, weight.transpose(1, 2), offs=torch.tensor(ends, dtype=torch.int32))
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            assert same_bits(found[begin:end], functional.linear(x[begin:end], weight[expert]))


def test_products_of_batches() -> None:
    x, weight = made(1, 3, 20, 33), made(2, 3, 33, 7)
    with Invariant():
        found, turned, broadcast = torch.bmm(x, weight), x @ weight, x[:, None] @ weight[:, None]
        shared, outer = x @ weight[0], x[:, :, :1] @ weight[:, :1]
        for row in range(3):
            assert same_bits(found[row], x[row] @ weight[row])
            assert same_bits(shared[row], x[row] @ weight[0])
    assert same_bits(turned, found) and same_bits(broadcast[:, 0], found)
    torch.testing.assert_close(found, torch.bmm(x, weight), atol=1e-4, rtol=1e-4)
    assert same_bits(outer, torch.bmm(x[:, :, :1], weight[:, :1]))  # one term each


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 8, 100, 1024, 2500])
def test_sums_means_and_softmax(columns: int, dtype: torch.dtype) -> None:
    x = made(4, 20, columns, dtype=dtype)
    forms: list[Any] = [
        lambda x: x.sum(-1), lambda x: x.mean(-1, keepdim=True), lambda x: x.float().pow(2).mean(dim=1),
        lambda x: torch.sum(x, dim=[-1], keepdim=True), lambda x: x.mean((1,), dtype=torch.float32),
        lambda x: functional.softmax(x, dim=-1, dtype=torch.float32), lambda x: x.softmax(1),
        lambda x: x.view(len(x), columns, 1).expand(-1, -1, 3).sum(dim=1),
    ]  # fmt: skip
    for form in forms:
        with Invariant():
            whole, parts = form(x), [form(part) for part in x.split([1, 2, 17])]
        assert same_bits(torch.cat(parts), whole)
        expected = form(x)
        assert (whole.shape, whole.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(whole, expected, atol=8 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


def test_what_is_left_to_torch() -> None:
    """Products in float64, counts, and sums over all numbers."""
    x = made(0, 4, 6)
    with Invariant():
        assert torch.equal(x.double() @ x.double().t(), x.double() @ x.double().t())
        assert int((x > 0).sum()) == int((x > 0).long().sum(-1).sum()) and x.sum().ndim == 0
        assert functional.linear(x[:0], x).shape == (0, 4)
        assert same_bits(functional.linear(input=x, weight=x), x @ x.t())
        assert x.sum(axis=1).shape == (4,)


@pytest.mark.parametrize(("kind", "sizes"), [("gpt2", {}), ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2})])
def test_a_model_gives_a_row_its_bits_in_every_batch(kind: str, sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the proof at load, with products of GPUs and attention of CPUs."""
    with products_of_gpus(monkeypatch, Invariant()):
        model = RaggedModel(make_model(kind, num_hidden_layers=1, **sizes), 4 << 20, batch_invariant=True)
    tokens = np.arange(8)
    assert same_bits(read_in_parts(model, tokens, [3, 5], 5), read_in_parts(model, tokens, [8], 0))
