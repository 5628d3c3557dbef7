"""Attention over pages on CPUs: right to float64, and the same bits in every company."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.models import cpu_attention
from specactor_ray.models import threads as pool
from specactor_ray.models.cpu_attention import AttentionRules, PageRows, attend_pages
from tests.page_attention import (
    Sequence,
    attend,
    check_against_float64,
    options_of,
    same_bits,
    sequence,
    with_sinks,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def compiled_before() -> None:
    """Not inside a property, whose time and calls are watched."""
    attend([(sequence(0, 1, 1, 1, 16, 16, torch.float32), 0, 1)])


heads_of = st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1), (40, 1)])
dims = st.sampled_from([(64, 64), (16, 16), (8, 8), (80, 80), (24, 40), (96, 16), (128, 128)])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 200)), min_size=1, max_size=4),
    heads_of, dims, st.sampled_from(DTYPES), st.sampled_from([16, 48, 128]), st.integers(0, 3), options_of,
)  # fmt: skip
def test_against_float64(rows, heads, dim, dtype, page_size, padding, options) -> None:
    run = functools.partial(attend, page_size=page_size, padding=padding)
    check_against_float64(run, rows, heads, dim, dtype, options)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 300), st.randoms(use_true_random=False), heads_of, dims, st.sampled_from(DTYPES), options_of,
)  # fmt: skip
def test_bits_depend_on_the_query_and_its_keys_alone(length, random, heads, dim, dtype, options) -> None:
    """Whole at once against parts of random lengths, among other rows, in other pages, beside padding."""
    options = with_sinks(options, heads[0])
    one, other = (sequence(seed, length, *heads, *dim, dtype) for seed in (1, 2))
    (whole,) = attend([(one, 0, length)], 64, **options)
    at = 0
    while at < length:
        end = min(at + random.choice([1, 1, 2, 5, 9, 40, 130]), length)
        beside = [(other, max(length - random.randint(1, 9), 0), length) for _ in range(random.randint(0, 3))]
        parts = [*beside, (one, at, end)]
        random.shuffle(parts)
        found = attend(parts, random.choice([16, 48, 128]), random.randint(0, 3), random.randint(0, 99), **options)
        part = found[next(i for i, (which, _, _) in enumerate(parts) if which is one)]
        assert same_bits(part, whole[at:end])
        at = end


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool._team() is not None, "PyTorch for Linux runs on GNU OpenMP"
    monkeypatch.setattr(cpu_attention, "_WORK_PER_THREAD", 1)
    parts = [(sequence(seed, 400, 9, 3, 64, 64, dtype), 400 - count, 400) for seed, count in enumerate((1, 5, 200, 1))]
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            outputs.append(torch.cat(attend(parts)))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(output, outputs[0]) for output in outputs[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_stays_in_the_queries_that_see_it(bad: float) -> None:
    good = sequence(3, 90, 6, 2, 64, 64, torch.float32)
    worse = Sequence(good.query, good.key.clone(), good.value.clone())
    worse.key[70, 0, 5] = worse.value[70, 0, 5] = bad
    (clean,), (output,) = attend([(good, 0, 90)]), attend([(worse, 0, 90)])
    assert same_bits(output[:70], clean[:70])
    assert same_bits(output[:, 3:], clean[:, 3:]), "the other head of the keys"
    assert not output[70:, :3, 5].isfinite().any()


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    one = sequence(4, 80, 2, 2, 16, 16, torch.float32)
    one.query = one.query.abs()
    one.key[:70] = -torch.inf
    (output,) = attend([(one, 79, 80)])
    one.key[:70] = -1e30
    torch.testing.assert_close(output, attend([(one, 79, 80)])[0])
    assert output.isfinite().all()


def test_views_are_read_in_place() -> None:
    """Queries as `(1, heads, N, dim)` of transformers, keys of one layer of a larger tensor."""
    one = sequence(5, 32, 4, 2, 32, 32, torch.bfloat16)
    query = one.query.transpose(0, 1).contiguous().transpose(0, 1)
    cache = torch.stack([one.key, one.value], dim=1).unflatten(0, (2, 16))
    rows = PageRows(np.array([[0, 1]], np.int32), np.array([0, 32]), np.array([32]))
    output = attend_pages(query, cache[:, :, 0], cache[:, :, 1], rows, AttentionRules(32**-0.5))
    assert same_bits(output, attend([(one, 0, 32)])[0])
