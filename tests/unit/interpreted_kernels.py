"""The Triton kernels in Triton's interpreter, compared with the numba form.

`test_triton_kernels.py` runs this file in a process of its own: TRITON_INTERPRET=1 counts when triton is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from gpu_check.target import KERNELS
from specactor_ray.core.ragged import begins
from specactor_ray.core.types import SamplingParams
from specactor_ray.models import _paged_attention_triton as attention_kernels
from specactor_ray.sampling import gpu as triton_kernels
from specactor_ray.sampling import keyed
from specactor_ray.sampling.candidates import MOST, candidates
from specactor_ray.sampling.keyed import Found, verify_arrays
from specactor_ray.sampling.rules import Rules
from specactor_ray.target.vllm_cpu import quicken_interpreter
from tests.tails import BAD_LOGITS, check_bad_logits, sample_rows, verify_tails
from tests.unit.sampling.test_sampling import check_tensors_of_a_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TEMPERATURES = (0.0, 1e-6, 1e-5, 1e-4, 0.3, 0.6, 1.0, 1.0, 2.0, 100.0)
LAST_POSITION = 2**32 - 1


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    quicken_interpreter()  # overflow is what hashes are made of
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def exact_dots() -> Iterator[None]:
    """A product of two tiles has the same bits in each row, and takes bfloat16 for what it is: the interpreter's has
    neither, as it leaves it to a CPU's library, and keeps bfloat16 as integers."""

    def exact(x: Any) -> np.ndarray:
        data = (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
        return data.astype(np.float64)

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        product = np.matmul(exact(a), exact(b)).astype(np.float32)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that give small vocabularies several chunks."""
    monkeypatch.setitem(triton_kernels.SCAN, "BLOCK", 512)
    monkeypatch.setitem(triton_kernels.FILTER, "BLOCK", 256)


def differences(
    logits: torch.Tensor, offsets: list[int], tails: list[tuple[int, ...]], params: list[SamplingParams],
    positions: list[int], margins: bool,
) -> tuple[int, list[str]]:  # fmt: skip
    """(rows compared, what is different)."""
    want, got = (
        verify_tails(logits, offsets, tails, params, positions, record_margins=margins, backend=backend)
        for backend in ("numba", "triton")
    )
    found = []
    for one, other, rule in zip(want, got, params, strict=True):
        if (one.token_ids, one.margins) != (other.token_ids, other.margins):
            found.append(f"{rule}: {one} {other}")
        elif other.logprobs != pytest.approx(one.logprobs, rel=1e-6, abs=3e-6):
            found.append(f"{rule}: log-probabilities {one.logprobs} {other.logprobs}")
    return sum(len(one.token_ids) for one in want), found


def ranked_otherwise(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[str]:
    """What is different in the candidates of one draw per row; the rules are repeated."""
    n, rules = len(logits), Rules(0, logits.device)
    params, at = [params[i % len(params)] for i in range(n)], np.resize(np.array(positions, np.int64), n)
    rules.write(range(n), params, [0] * n)
    found = []
    for most in (1, MOST):
        forms = (candidates(logits, at, np.arange(n), rules, most, backend=form) for form in ("numba", "triton"))
        lines = [list(zip(one.tokens.tolist(), one.gaps.tolist(), strict=True)) for one in forms]
        found += [f"{rule}: {a} {b}" for rule, a, b in zip(params, *lines, strict=True) if a != b]
    return found


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.0, 0.1, 1.0, 3.0, 10.0, 200.0])
    logits += rng.choice([0.0, 0.0, -1e4, 1e4])
    if rng.random() < 0.3:
        logits[np.arange(rows), rng.integers(vocab, size=rows)] += 20.0
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties, and zeros of both signs
    if rng.random() < 0.3:
        masked = rng.random(logits.shape) < 0.9
        masked[np.arange(rows), rng.integers(vocab, size=rows)] = False
        logits[masked] = -math.inf
    return logits


def random_batches(rng: np.random.Generator, count: int, vocabs: list[int], filtered: bool) -> Iterator[tuple]:
    """Arguments of `differences`: requests with 0 to 3 drafts, right and wrong, rows of logits between them unused."""
    for index in range(count):
        vocab, n = vocabs[index % len(vocabs)], 8
        lengths = [int(length) for length in rng.integers(0, 4, size=n)]
        offsets = [int(start) for start in np.cumsum([0, *(length + 2 for length in lengths[:-1])])]
        dtype = DTYPES[index % 3]
        x = torch.from_numpy(random_logits(rng, offsets[-1] + lengths[-1] + 1, vocab)).to(dtype)
        params = [
            SamplingParams(
                float(rng.choice(TEMPERATURES)),
                top_k=int(rng.choice([0, 1, 2, 5, 50, 1000])) if filtered else 0,
                top_p=float(rng.choice([1.0, 1e-9, 0.31, 0.7, 0.95, 0.99999])) if filtered else 1.0,
                seed=int(rng.integers(2**64, dtype=np.uint64)),
            )
            for _ in range(n)
        ]
        positions = [int(rng.choice([0, 7, 2**31 - 1, LAST_POSITION - 3])) for _ in range(n)]
        tails = []
        for begin, length, rule, position in zip(offsets, lengths, params, positions, strict=True):
            span = range(begin, begin + length)
            tail = sample_rows(x[span], [rule] * length, [position + j for j in range(length)]).token_ids
            if length and rng.random() < 0.3:
                wrong = int(rng.integers(length))
                tail[wrong] = int(rng.choice([-1, vocab, (tail[wrong] + 1) % vocab]))
            tails.append(tuple(tail))
        yield x, offsets, tails, params, positions, bool(rng.random() < 0.4)


VOCABS = {False: [1, 2, 7, 40, 300, 511, 512, 513, 1030], True: [40, 3, 300, 1, 600, 200]}
"""Sizes of vocabularies for requests without filters, and with them."""


@pytest.mark.parametrize(("filtered", "batches", "least"), [(False, 18, 250), (True, 6, 80)])
def test_rows_are_those_of_the_numba_form(small_blocks: None, filtered: bool, batches: int, least: int) -> None:
    rng, rows, wrong = np.random.default_rng(1 + filtered), 0, []
    for batch in random_batches(rng, batches, VOCABS[filtered], filtered):
        compared, found = differences(*batch)
        rows, wrong = rows + compared, wrong + found
    assert not wrong
    assert rows >= least


@pytest.mark.parametrize("filtered", [False, True])
def test_a_captured_step_finds_what_the_step_finds(small_blocks: None, filtered: bool) -> None:
    """More requests than there are, more columns than the tails need, rules in a tensor that others write."""
    for x, offsets, tails, params, positions, margins in random_batches(np.random.default_rng(5), 2, [300], filtered):
        n, more, longest, lengths = len(offsets), 3, 6, [len(tail) for tail in tails]
        rules, words = Rules(n, x.device), torch.zeros(n + more, 5, dtype=torch.int64)
        rules.write(range(n), params, [0] * n)
        arrays = np.array(offsets), begins(np.array(lengths)), np.array([v for tail in tails for v in tail], np.int64)
        at, ranks = (np.array(positions), np.arange(n)), 1 + margins
        want = verify_arrays(x, *arrays, *at, rules, ranks, backend="triton")
        words[:n] = rules.words
        firsts, ends = torch.zeros(n + more, dtype=torch.int64), torch.full((n + more + 1,), int(sum(lengths)))
        firsts[:n], ends[: n + 1] = torch.tensor(offsets), torch.from_numpy(arrays[1])
        places, drafts = torch.zeros(n + more, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
        places[:n], drafts[: sum(lengths)] = torch.tensor(positions), torch.from_numpy(arrays[2])
        slots = torch.arange(n + more)
        rows = x, firsts, ends, drafts, longest, places, Rules.over(words), ranks
        packed = keyed.verify_on_device(*rows, slots, backend="triton")
        found = Found(packed[:n].numpy())
        assert np.array_equal(found.counts, want.counts) and np.array_equal(found.statuses, want.statuses)
        counted = np.arange(want.width) < want.counts[:, None]
        for kind in ("tokens", "logprobs", *["margins"] * margins):
            ours, theirs = getattr(found, kind)[:, : want.width], getattr(want, kind)
            assert np.array_equal(ours[counted], theirs[counted], equal_nan=True), kind


@pytest.mark.parametrize(("filtered", "batches", "least"), [(False, 5, 100), (True, 2, 40)])
def test_candidates_are_those_of_the_numba_form(small_blocks: None, filtered: bool, batches: int, least: int) -> None:
    rng, rows, wrong = np.random.default_rng(3), 0, []
    for logits, _, _, params, positions, _ in random_batches(rng, batches, VOCABS[filtered], filtered):
        rows, wrong = rows + len(logits), wrong + ranked_otherwise(logits, params, positions)
    assert not wrong
    assert rows >= least


def check(logits: torch.Tensor, params: list[SamplingParams], position: int) -> None:
    n = len(logits)
    assert differences(logits, list(range(n)), [()] * n, params, [position] * n, True) == (n, [])
    assert not ranked_otherwise(logits, params, [position])


def test_tokens_far_below_are_candidates_still(small_blocks: None) -> None:
    """Masks that are finite: float32 overflows at temperatures below 1."""
    logits = torch.full((4, 30), torch.finfo(torch.float32).min)
    logits[:, 25], logits[::2, 17] = 1.0, 0.5
    check(logits, [SamplingParams(t, seed=1, top_k=k) for t, k in ((0.0, 0), (0.6, 0), (0.6, 5), (30.0, 0))], 4)


def test_a_prefix_that_holds_top_p_exactly_is_kept_alone(small_blocks: None) -> None:
    params = [SamplingParams(seed=seed, top_p=0.5) for seed in range(24)]
    for backend in ("numba", "triton"):
        assert set(sample_rows(torch.ones(24, 4), params, range(24), backend=backend).token_ids) == {0, 1}


@pytest.mark.parametrize("level", [9e29, -3e38, 1e20])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_rows_where_float64_rounds_the_noise_away(small_blocks: None, level: float, temperature: float) -> None:
    logits = torch.full((2, 30), level)
    logits[1, 3::2] *= 1 - 1e-6
    check(logits, [SamplingParams(temperature, seed=seed) for seed in range(2)], 5)


def far_rivals() -> tuple[torch.Tensor, list[SamplingParams], int]:
    """Rows where tokens far below the winner compete for the second place. The bound is of float32: there its steps are
    16, and these values come out 32 too low."""
    logits = torch.full((6, 60), -16383.0)
    logits[:, 17] = 0.0
    return logits, [SamplingParams(8.6121e-5, seed=seed) for seed in range(6)], 3


def coarse_scores() -> tuple[torch.Tensor, list[SamplingParams], int]:
    """Rows of equal logits so large that scores come in steps of 1/2. With these seeds a token ties with the one of the
    largest noise, and has the lower id."""
    return torch.full((3, 200), 4e15), [SamplingParams(seed=seed) for seed in (95, 96, 212)], 0


@pytest.mark.parametrize(("rows", "slack"), [(far_rivals, "_SLACK_OF_DISTANCE"), (coarse_scores, "_SLACK_OF_LEVEL")])
def test_rivals_far_away_and_ties_of_rounded_scores(
    rows: Any, slack: str, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*rows())
    monkeypatch.setattr(triton_kernels, slack, tl.constexpr(0.0))
    with pytest.raises(AssertionError):
        check(*rows())


@pytest.mark.parametrize("ranks", [1, 2, MOST])
def test_a_bound_that_is_too_tight_is_seen(ranks: int, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check that a device passes before it takes the kernels."""
    assert not keyed.difference(torch.device("cpu"), torch.bfloat16, ranks, 200)
    monkeypatch.setattr(triton_kernels, "_SLACK_BITS", tl.constexpr(-6.0))
    assert "requests get other tokens" in keyed.difference(torch.device("cpu"), torch.bfloat16, ranks, 200)


def test_gpu_check_finds_the_kernels_by_their_names() -> None:
    for kernels, part in ((attention_kernels, "attention"), (triton_kernels, "sampler")):
        assert {getattr(kernels, name).__name__ for name in KERNELS[part]} == {*KERNELS[part]}


def test_the_largest_vocabulary() -> None:
    """With the blocks that are shipped."""
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(4, 151_936)) * 3).bfloat16()
    params = [SamplingParams(t, seed=2**63 + i) for i, t in enumerate((0.0, 1.0))]
    tail = tuple(sample_rows(logits[1:2], params[1:], [9]).token_ids)
    assert differences(logits, [0, 1], [(), tail], params, [9] * 2, True) == (3, [])
    nucleus = [SamplingParams(1.0, top_p=0.9, seed=1)]
    assert differences(logits[3:], [0], [()], nucleus, [0], False) == (1, [])


@pytest.mark.parametrize(("values", "problem"), BAD_LOGITS)
@pytest.mark.parametrize("rule", [SamplingParams(0.0), SamplingParams(), SamplingParams(top_p=0.5)])
def test_bad_logits_are_named(small_blocks: None, values: dict, problem: str, rule: SamplingParams) -> None:
    check_bad_logits(values, problem, rule, backend="triton")


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])  # vLLM's arrays are the former
def test_tensors_of_a_device_give_what_arrays_give(small_blocks: None, integers: torch.dtype) -> None:
    check_tensors_of_a_device(integers, "triton")
