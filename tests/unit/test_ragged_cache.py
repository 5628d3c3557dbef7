"""The ragged cache: the allocator against a simple model, the cache against fresh forwards."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.models.packed_linear import PackedLinear, cheapest_row_counts
from specactor_ray.models.ragged_cache import RegionAllocator
from specactor_ray.models.ragged_model import RaggedModel, RowChunk
from tests.tiny import tiny_target


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "free", "extend"]), st.integers(1, 40)), max_size=60))
def test_allocator_never_overlaps_and_loses_nothing(operations: list[tuple[str, int]]) -> None:
    allocator = RegionAllocator(100)
    held: dict[int, int] = {}
    for operation, size in operations:
        if operation == "take":
            offset = allocator.take(size)
            if offset is None:
                assert allocator.largest_free < size
            else:
                held[offset] = size
        elif held:
            offset = sorted(held)[size % len(held)]
            if operation == "free":
                allocator.free(offset, held.pop(offset))
            elif allocator.extend(offset, held[offset], size):
                held[offset] += size
        used = sorted((offset, offset + length) for offset, length in held.items())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(used))
        assert allocator.free_slots == 100 - sum(held.values())
    for offset, length in held.items():
        allocator.free(offset, length)
    assert allocator.largest_free == 100, "free neighbours were not merged"


@pytest.fixture(scope="module", params=[False, True], ids=["per-row", "batched"])
def model(request: pytest.FixtureRequest) -> RaggedModel:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32)
    return RaggedModel(loaded, 32 << 20, batched_attention=request.param)


@pytest.mark.parametrize("seed", range(4))
def test_random_appends_and_rollbacks_equal_a_fresh_forward(model: RaggedModel, seed: int) -> None:
    """Rows of different lengths grow by chunks and roll back at random; the logits are those of a clean slate."""
    rng = random.Random(seed)
    rows = [model.cache.open(8) for _ in range(5)]
    contexts: list[list[int]] = [[] for _ in rows]
    assert all(row is not None for row in rows)
    for _ in range(14):
        active = [i for i in range(len(rows)) if rng.random() < 0.8] or [0]
        chunks = []
        for i in active:
            if contexts[i] and rng.random() < 0.4:
                keep = rng.randint(0, len(contexts[i]))
                rows[i].truncate(keep)
                contexts[i] = contexts[i][:keep]
            tokens = [rng.randrange(model.vocab_size) for _ in range(rng.choice([1, 1, 2, 5, 70]))]
            assert rows[i].reserve(len(contexts[i]) + len(tokens))
            contexts[i] = contexts[i] + tokens
            chunks.append(RowChunk(rows[i], tokens, min(2, len(tokens))))
        logits = model.forward(chunks).logits
        begin = 0
        for i, chunk in zip(active, chunks, strict=True):
            fresh = model.cache.open(len(contexts[i]))
            assert fresh is not None
            expected = model.forward([RowChunk(fresh, contexts[i], chunk.num_logits)]).logits
            fresh.free()
            assert rows[i].length == len(contexts[i])
            assert torch.allclose(logits[begin : begin + chunk.num_logits], expected, atol=2e-3, rtol=1e-3)
            begin += chunk.num_logits
    for row in rows:
        row.free()
    assert model.cache.allocator.free_slots == model.cache.slots


def alone(model: RaggedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after these tokens, from a clean slate."""
    row = model.cache.open(len(tokens))
    assert row is not None
    logits = model.forward([RowChunk(row, tokens, 1)]).logits[0]
    row.free()
    return logits


def test_rolling_forward_is_refused(model: RaggedModel) -> None:
    row = model.cache.open(8)
    assert row is not None
    with pytest.raises(ValueError, match="roll forward"):
        row.truncate(1)
    row.free()


def test_packed_linear_equals_linear() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        linear = torch.nn.Linear(48, 96, bias=bias)
        packed = PackedLinear(linear.weight, linear.bias)
        for rows in (1, 2, 5, 33):
            x = torch.randn(rows, 48)
            assert torch.allclose(packed(x), linear(x), atol=1e-5)
    choice = cheapest_row_counts(packed, up_to=6)
    assert choice[0] == 0 and all(rows <= choice[rows] <= 6 for rows in range(1, 7))
