"""Paged attention's Triton kernels in Triton's interpreter: right to float64, and the same bits in every company.

`test_triton_kernels.py` runs this file in a process of its own: TRITON_INTERPRET=1 counts when triton is imported.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.draft.model import ModelProposer
from specactor_ray.models import _paged_attention_triton as kernels
from specactor_ray.models import paged_cache, ragged_model
from specactor_ray.models.batch_invariance import Invariant
from specactor_ray.models.captured import StaticBatch
from specactor_ray.models.cpu_attention import AttentionRules
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.target.hf import HfEngine
from tests.attention import attending_on_gpu
from tests.by_name import extend_fully
from tests.fakes.capturer import FakeCapturer
from tests.families import make_model
from tests.page_attention import attend, check_against_float64, options_of, reference, same_bits, sequence, with_sinks
from tests.unit.draft.test_burst import MAKERS, drafts, requests_of
from tests.unit.interpreted_kernels import exact_dots, quick_interpreter  # noqa: F401
from tests.unit.models import test_captured
from tests.unit.models.test_batch_invariance import products_of_gpus
from tests.unit.target.test_hf_engine import load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPLIT = 128

heads_of = st.sampled_from([(1, 1), (6, 2), (9, 3), (20, 1)])
dims = st.sampled_from([(64, 64), (8, 8), (80, 80), (24, 40), (96, 16), (128, 128)])
pages_of = st.sampled_from([16, 48, 64, 256])


@pytest.fixture(autouse=True, scope="module")
def short_splits() -> Iterator[None]:
    """Short rows have several splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SPLIT", SPLIT)
        yield


def on_gpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    rules: AttentionRules,
    longer: int = 0,
    programs: int | None = None,
) -> torch.Tensor:
    """`longer`: how much longer than the longest row the call takes it to be, as a captured one does."""
    table = np.pad(pages, ((0, 0), (0, -(-longer // keys.shape[1]))), constant_values=1 << 30)
    arrays = (torch.from_numpy(array).int() for array in (starts, lengths, table))
    most = int(np.diff(starts).max()), int(lengths.max()) + longer
    output = kernels.paged_attention(query, keys, values, *arrays, *most, rules, programs)
    assert not output[starts[-1] :].any(), "padding sees nothing"
    return output


def attend_paged(
    parts: list[Any], page_size: int, seed: int = 0, longer: int = 0, programs: int | None = None, **options: Any
) -> list[torch.Tensor]:
    run = functools.partial(on_gpu, longer=longer, programs=programs)
    return attend(parts, page_size, seed=seed, run=run, **options)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(1, 9), st.just(40)),
            st.one_of(st.integers(0, 300), st.sampled_from([SPLIT - 1, SPLIT, 2 * SPLIT - 1, 2 * SPLIT, 255, 256])),
        ),
        min_size=1, max_size=3,
    ),
    heads_of, dims, st.sampled_from(DTYPES), pages_of, options_of,
    st.sampled_from([1, 2, 100]), st.sampled_from([0, 1, 300]), st.sampled_from([0, 1, 90]),
)  # fmt: skip
def test_against_float64(rows, heads, dim, dtype, page_size, options, programs, longer, padding) -> None:
    run = functools.partial(attend_paged, page_size=page_size, programs=programs, longer=longer, padding=padding)
    check_against_float64(run, rows, heads, dim, dtype, options)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.integers(1, 300), st.randoms(use_true_random=False), heads_of, dims, st.sampled_from(DTYPES), pages_of,
    options_of,
)  # fmt: skip
def test_bits_depend_on_the_query_and_its_keys_alone(length, random, heads, dim, dtype, page_size, options) -> None:
    """The last queries at once against parts of random lengths, among other rows, in other pages, by other numbers of
    programs."""
    options = with_sinks(options, heads[0])
    one, other = (sequence(seed, length, *heads, *dim, dtype) for seed in (1, 2))
    start = max(length - 20, 0)
    (whole,) = attend_paged([(one, start, length)], page_size, programs=1, **options)
    cuts = sorted({start, length, *(random.randint(start, length) for _ in range(3))})
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        rows = [
            (one, begin, end),
            *((other, random.randint(0, length - 1), length) for _ in range(random.randint(0, 2))),
        ]
        random.shuffle(rows)
        at = next(place for place, row in enumerate(rows) if row[0] is one)
        programs, longer = random.choice([1, 2, 3, 50]), random.choice([0, 300])
        options["padding"] = random.choice([0, 3, 70])
        part = attend_paged(rows, page_size, seed=number, programs=programs, longer=longer, **options)[at]
        assert same_bits(part, whole[begin - start : end - start])


@pytest.mark.parametrize("window", [None, 700])
def test_a_long_row_has_the_same_bits_by_any_number_of_programs(window: int | None) -> None:
    one = sequence(1, 6_000, 2, 1, 16, 16, torch.bfloat16)
    whole, *others = (
        attend_paged([(one, 5_998, 6_000), (one, 4096, 4097)], 64, programs=programs, longer=longer, window=window)
        for programs, longer in ((1, 0), (3, 0), (200, 100_000))
    )
    for part, begin, end in ((whole[0], 5_998, 6_000), (whole[1], 4096, 4097)):
        expected = reference(one, begin, end, window=window)
        torch.testing.assert_close(part.double(), expected, atol=2e-2, rtol=2e-2)
    assert all(same_bits(x, y) for other in others for x, y in zip(whole, other, strict=True))


def test_rows_of_many_tiles_are_found() -> None:
    """More rows than are searched at once, with and without further queries."""
    one = sequence(0, 40, 16, 1, 16, 16, torch.bfloat16)
    parts = [(one, 40 - count, 40) for count in [1, 9, 1, 4, 5] * 27]
    whole = attend_paged([(one, 0, 40)], 16)[0]
    for (_, begin, end), output in zip(parts, attend_paged(parts, 16), strict=True):
        assert same_bits(output, whole[begin:end])


def test_what_does_not_fit_is_refused() -> None:
    for shape, reason in (
        ((2, 300, 64, 1, 256), "300"),
        ((2, 64, 512, 1, 256), "512"),
        ((2, 64, 64, 129, 256), "129"),
        ((2, 64, 64, 1, 24), "24"),
    ):
        with pytest.raises(ModelLoadError, match=reason):
            kernels.shape_of(*shape, 99 << 10)


def history(drafter: ModelProposer, most: int) -> list[Any]:
    """Drafts after each of several commits, in bursts of up to `most` tokens."""
    rng, requests, seen = random.Random(0), requests_of(5, 0), list[Any]()
    drafter.burst = most
    for request in requests:
        request.prompt = tuple(request.prompt * 27)[:27]
        request.open(drafter)
    for _ in range(4):
        extend_fully(drafter)
        seen.append(drafts(drafter, len(requests)))
        for request in rng.sample(requests, rng.randint(1, 5)):
            tail = seen[-1][0][request.slot][1]
            request.commit(drafter, [*tail[: rng.randint(0, len(tail))], rng.randrange(400)])
    return seen


@MAKERS
def test_captured_steps_draft_what_is_drafted_on_the_cpu(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cross from their first page into their second."""
    monkeypatch.setattr(paged_cache, "_CPU_PAGE", 32)
    wanted = history(make(cache_bytes=8 << 20), 1)
    monkeypatch.setattr(ragged_model, "cheapest_row_counts", lambda packed: [0])  # devices are not padded
    with attending_on_gpu(fused=make.__name__ == "eagle"):
        device = FakeCapturer()
        assert history(make(cache_bytes=8 << 20, capturer=device, max_batch=6), 4) == wanted
    assert device.captures and device.launches > device.fetches


def linear_by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose bits do not depend on the number of rows."""
    rows = [torch.mv(weight, row) for row in x.reshape(-1, x.shape[-1])]
    product = torch.stack(rows).view(*x.shape[:-1], len(weight))
    return product if bias is None else product + bias


def same_padding(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of no row in each captured step of the engine, which are checked to have the same finite logits."""
    step, seen = engine._model.step, list[int]()

    def checked(batch: StaticBatch, *args: Any) -> Any:
        logits, features = step(batch, *args)
        rest = logits[int(batch.device_starts[-1]) :]
        assert torch.isfinite(rest).all() and torch.equal(rest, rest[:1].expand_as(rest))
        seen.append(len(rest))
        return logits, features

    monkeypatch.setattr(engine._model, "step", checked)
    return seen


def make_mixture() -> RaggedModel:
    """With products of GPUs, which give a row its bits whatever other rows its experts have."""
    return RaggedModel(make_model("qwen3_moe", num_hidden_layers=1, vocab_size=512), 8 << 20, [0], batch_invariant=True)


def make_dense() -> RaggedModel:
    return RaggedModel(load(), 8 << 20, range(4))


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        (make_dense, {"max_batch": 13, "max_step_tokens": 64}),
        (make_mixture, {"max_batch": 13, "max_step_tokens": 64}),
    ],
)
def test_padding_is_one_token_and_changes_no_bit_of_a_row(
    make: Any, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps of the engine, captured and eager: empty rows, tokens of no row, a table with more pages, a cache
    that holds what the memory held before. States are those of all layers, log-probabilities those of the logits."""
    monkeypatch.setattr(paged_cache, "_CPU_PAGE", 32)
    if make is make_dense:
        monkeypatch.setattr(torch.nn.functional, "linear", linear_by_rows)
    with attending_on_gpu(), products_of_gpus(monkeypatch, Invariant()):
        engines, device = list[Any](), FakeCapturer()
        for capturer in (device, None):
            engines.append(HfEngine(make(), record_margins=True, capturer=capturer, **limits))
            for pool in engines[-1]._model.cache._pools:
                pool.fill_(float("nan"))
        ours, theirs = (test_captured.Turns(engine, 4) for engine in engines)
        padding = same_padding(engines[0], monkeypatch)
        # Multiples of four tokens: functions of the CPU round differently behind the last whole vector.
        for turn, mix in enumerate(([0, 0, 0, 0], [1, 0, 4, 3], [0, 9, 0, 3], [2, 2, 2, 2])):
            assert test_captured.equal(ours.step(mix), theirs.step(mix)), turn
    assert device.launches > 4, "prompts, too"
    assert len(padding) == 4 and max(padding) > 1
