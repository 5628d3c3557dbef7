"""Keyed sampling: the distribution is the softmax, the draw depends on (seed, position, token) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling import cpu as kernels
from specactor_ray.sampling.keyed import Backend, Found, verify_arrays, verify_on_device
from specactor_ray.sampling.rules import Rules
from specactor_ray.sampling.seeds import derive_seed
from tests.tails import BAD_LOGITS, Drawn, check_bad_logits, gumbel_noise, sample_rows, verify_tails

ALPHA = 1e-4  # seeds are fixed: a p-value under this is a wrong distribution, not bad luck


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Torch's thread teams spin against each other on a busy machine, and nothing here is large."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(logits: np.ndarray, count: int, params: SamplingParams, first: int = 0, chunk: int = 512) -> np.ndarray:
    """Tokens at `count` successive positions that all have the same logits."""
    row = torch.from_numpy(logits.astype(np.float32))
    tokens: list[int] = []
    for start in range(first, first + count, chunk):
        n = min(chunk, first + count - start)
        block = row.expand(n, -1).contiguous()
        tokens += sample_rows(block, [params] * n, range(start, start + n)).token_ids
    return np.array(tokens)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.astype(np.float32).astype(np.float64) / temperature
    e = np.exp(scaled - scaled.max())
    return e / e.sum()


def kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Reference top-k/top-p: a full sort by (logit descending, id ascending)."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    if params.top_k:
        order = order[: params.top_k]
    e = np.exp((logits[order].astype(np.float64) - logits.max()) / params.temperature)
    if params.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(e)[:-1]])
        order = order[before < params.top_p * e.sum()]
    mask = np.zeros(len(logits), bool)
    mask[order] = True
    return mask


def perturbed(logits: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
    """Scores with every draw made and nothing pruned, float64; -inf: not allowed."""
    if params.temperature < kernels.GREEDY_BELOW:
        return logits.astype(np.float64)
    noise = gumbel_noise(params.seed, position, len(logits)).astype(np.float64)
    score = logits.astype(np.float64) / params.temperature + noise
    score[~kept(logits, params)] = -np.inf
    return score


# --- the distribution ----------------------------------------------------------------------------------------


def test_positions_and_seeds_follow_the_softmax():
    logits, n = np.random.default_rng(2).normal(size=12) * 1.5, 40_000
    over_positions = draw(logits, n, SamplingParams(temperature=1.7, seed=11))
    block = torch.from_numpy(logits.astype(np.float32)).expand(n, -1).contiguous()
    params = [SamplingParams(1.7, seed=derive_seed(1, i, 0)) for i in range(n)]
    for tokens in (over_positions, sample_rows(block, params, [5] * n).token_ids):
        assert stats.chisquare(np.bincount(tokens, minlength=12), softmax(logits, 1.7) * n).pvalue > ALPHA


def test_long_tail_of_rare_tokens_gets_its_mass():
    """50,000 tokens: 40,000 of them under 2^-24 each; every bucket of the tail is drawn as often as it should."""
    rng = np.random.default_rng(4)
    mass = np.concatenate([np.full(8, 1.0), np.full(1992, 2e-4), np.full(8000, 3e-6), np.full(40_000, 2.0**-24 * 7)])
    bucket = np.repeat(np.arange(4), [8, 1992, 8000, 40_000])
    shuffle = rng.permutation(len(mass))
    logits, bucket = np.log(mass[shuffle]), bucket[shuffle]
    p = softmax(logits)
    rare = bucket == 3
    assert p[rare].max() < 2.0**-24
    tokens = draw(logits, 15_000, SamplingParams(seed=2**40 + 1))
    want = np.bincount(bucket, weights=p) * len(tokens)
    assert want.min() > 25
    assert stats.chisquare(np.bincount(bucket[tokens], minlength=4), want).pvalue > ALPHA
    ids = tokens[rare[tokens]]  # no region of the vocabulary is favoured
    assert stats.kstest(ids / len(mass), stats.uniform.cdf).pvalue > ALPHA


def test_shared_noise_makes_drafter_and_target_agree():
    rng, n = np.random.default_rng(5), 20_000
    target = rng.normal(size=200) * 2
    drafter = target + rng.normal(size=200) * 0.4
    tv = 0.5 * np.abs(softmax(target) - softmax(drafter)).sum()
    truth = draw(target, n, SamplingParams(seed=21))
    shared, own = ((truth == draw(drafter, n, SamplingParams(seed=seed))).mean() for seed in (21, 22))
    bound, slack = (1 - tv) / (1 + tv), 4 * 0.5 / math.sqrt(n)
    assert 0.05 < tv < 0.5 and bound - slack <= shared <= 1 - tv + slack
    assert own < bound - slack, "so the bound is not met by luck"


# --- pruned and filtered: equal to the plain reference --------------------------------------------


@st.composite
def rows(draw_from) -> tuple[np.ndarray, SamplingParams, int]:
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    size = draw_from(st.sampled_from([1, 2, 3, 40, 511, 512, 513, 1400]))
    logits = rng.normal(size=size) * draw_from(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 200.0]))
    logits += draw_from(st.sampled_from([0.0, 0.0, -1e4, 1e4, 1e20]))
    if draw_from(st.booleans()):
        logits[rng.integers(size)] += 20.0
    if draw_from(st.booleans()):
        logits = np.round(logits)  # many ties
    if draw_from(st.booleans()):
        masked = rng.random(size) < 0.7
        masked[rng.integers(size)] = False
        logits[masked] = draw_from(st.sampled_from([-np.inf, np.finfo(np.float32).min]))
    params = SamplingParams(
        temperature=draw_from(st.sampled_from([0.0, 1e-6, 1e-5, 1e-3, 0.3, 0.6, 1.0, 1.0, 2.5, 40.0, 1e30])),
        top_k=draw_from(st.sampled_from([0, 0, 1, 2, 5, 50, 1000, 2**31 - 1])),
        top_p=draw_from(st.sampled_from([1.0, 1.0, 1e-9, 0.31, 0.7, 0.953, 0.99999])),
        seed=draw_from(st.integers(0, 2**64 - 1)),
    )
    return logits.astype(np.float32), params, draw_from(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize(
    "rule", [{}, {"temperature": 0.6}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 3000, "top_p": 0.6}]
)
def test_large_vocabulary_equals_the_reference(rule):
    logits = (np.random.default_rng(6).normal(size=(12, 50_000)) * 3.0).astype(np.float32)
    params = [SamplingParams(seed=1000 + i, **rule) for i in range(12)]
    scores = np.array([perturbed(row, one, 3) for row, one in zip(logits, params, strict=True)])
    got = sample_rows(torch.from_numpy(logits), params, [3] * 12, record_margins=True)
    second, first = np.sort(scores, axis=1)[:, -2:].T
    assert got.token_ids == scores.argmax(axis=1).tolist() and got.margins == (first - second).tolist()


@pytest.mark.parametrize(("rule", "allowed"), [
    ({"top_k": 3}, [1, 2, 4]),  # ids 4 and 5 tie for the third place: the lower id stays
    ({"top_p": 0.5}, [1, 2]),  # 0.3 + 0.2 reach it
    ({"top_p": 0.51}, [1, 2, 4]),
    ({"top_k": 2, "top_p": 0.55}, [1]),  # 0.3 of the renormalised 0.5 is 0.6
    ({"top_p": 1e-6}, [1]),
])  # fmt: skip
def test_filters_by_hand(rule, allowed):
    logits = torch.log(torch.tensor([[0.1, 0.3, 0.2, 0.1, 0.15, 0.15]]))
    params = [SamplingParams(seed=s, **rule) for s in range(300)]
    got = sample_rows(logits.expand(300, -1), params, range(300), record_margins=True)
    assert sorted(set(got.token_ids)) == allowed
    assert all(math.isinf(m) for m in got.margins) == (len(allowed) == 1)
    want = torch.log_softmax(logits[0], 0)[got.token_ids]
    assert got.logprobs == pytest.approx(want.tolist(), abs=1e-6)  # of the distribution before the filters


def test_tied_scores_go_to_the_lowest_id():
    noise = gumbel_noise(13, 2, 50_000)
    values, first, count = np.unique(noise, return_index=True, return_counts=True)
    i = int(np.argmax(count > 1))
    low, high = int(first[i]), int(np.flatnonzero(noise == values[i])[1])
    logits = torch.full((1, 50_000), -math.inf)
    logits[0, low], logits[0, high] = 0.0, 1.0  # the temperature makes the difference vanish
    got = sample_rows(logits, [SamplingParams(seed=13, temperature=1e30)], [2], record_margins=True)
    assert (got.token_ids, got.margins) == ([low], [0.0])


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 3.0])
def test_logprobs_are_those_of_the_scaled_softmax(temperature):
    logits = torch.randn(40, 20_000, generator=torch.Generator().manual_seed(7)) * 4 + 30
    params = [SamplingParams(temperature=temperature, seed=i, top_k=0 if i % 2 else 40) for i in range(40)]
    got = sample_rows(logits, params, range(40))
    want = torch.log_softmax(logits.double() / (temperature or 1.0), -1)[range(40), got.token_ids]
    assert got.logprobs == pytest.approx(want.tolist(), abs=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_layout_and_gradients_do_not_matter(dtype):
    logits = (torch.randn(700, 9, generator=torch.Generator().manual_seed(8)) * 3).to(dtype).requires_grad_()
    params = [SamplingParams(seed=i) for i in range(9)]
    plain = logits.detach().float().T.contiguous()
    assert sample_rows(logits.T, params, range(9)) == sample_rows(plain, params, range(9))


# --- verification --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.booleans())
def test_verify_equals_sampling_one_by_one(seed, margins):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, size=rng.integers(1, 6))
    params = [SamplingParams(seed=int(rng.integers(2**62)), temperature=float(rng.choice([0.0, 0.7, 1.0])),
                             top_k=int(rng.choice([0, 4])), top_p=float(rng.choice([1.0, 0.8])))
              for _ in lengths]  # fmt: skip
    starts = np.cumsum(lengths + 2) - lengths - 2  # one unused row between requests
    logits = torch.from_numpy((rng.normal(size=(int((lengths + 2).sum()), 30)) * 2).astype(np.float32))
    first = rng.integers(0, 1000, size=len(lengths))
    tails, want = [], []
    for i, length in enumerate(lengths):
        span = range(starts[i], starts[i] + length + 1)
        alone = sample_rows(logits[span], [params[i]] * len(span), range(first[i], first[i] + length + 1),
                            record_margins=True)  # fmt: skip
        tail = alone.token_ids[:length]
        right = int(rng.integers(0, length + 1))
        if right < length:
            tail[right] = (tail[right] + 1) % 30
        tails.append(tuple(tail))
        cut = slice(0, right + 1)
        want.append(Drawn(alone.token_ids[cut], alone.logprobs[cut], alone.margins[cut] if margins else None))
        logits[starts[i] + right + 1 : starts[i] + length + 2] = math.nan  # past the mismatch nothing is read
    assert verify_tails(logits, starts, tails, params, first, record_margins=margins) == want


def test_draft_ids_outside_of_the_vocabulary_never_match_and_a_batch_may_be_empty():
    logits = torch.zeros(4, 5)
    got = verify_tails(logits, [0, 2], [(-1,), (5,)], [SamplingParams(seed=1)] * 2, [0, 0])
    assert [len(one.token_ids) for one in got] == [1, 1]
    assert verify_tails(logits[:0], [], [], [], []) == [] == sample_rows(logits[:0], [], []).token_ids


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "problem"), BAD_LOGITS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_named(values, problem, temperature):
    check_bad_logits(values, problem, SamplingParams(temperature))


def check_tensors_of_a_device(integers: torch.dtype, backend: Backend) -> None:
    """In other slots than the rows'; a row before its first position spoils no other."""
    logits, slots = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)), np.array([2, 0])
    rules = Rules(3, logits.device)
    rules.write([0, 2], [SamplingParams(seed=5, top_p=0.1), SamplingParams(0.5, seed=9)], [0, 0])
    rules.write([0], [SamplingParams(seed=5, top_k=9)], [-2])
    offsets, tail_offsets, positions = np.array([0, 3]), np.array([0, 2, 4]), np.array([2, 7])
    drafts = np.array([3, 4, 5, 6], np.int32)
    drafts[[0, 2]] = verify_arrays(logits, offsets, tail_offsets, drafts, positions, slots, rules).tokens[:, 0]
    wanted = verify_arrays(logits, offsets, tail_offsets, drafts, positions, slots, rules)
    assert wanted.counts.tolist() == [2, 2] and rules.any_filtered
    parts = [torch.from_numpy(one).to(integers) for one in (offsets, tail_offsets, drafts)]
    rows = (logits, *parts, 2)
    at, own = torch.from_numpy(positions).to(integers), torch.from_numpy(slots).to(integers)
    found = Found(verify_on_device(*rows, at, rules, 1, own, backend=backend).numpy())
    assert found.tokens.tolist() == wanted.tokens.tolist() and found.counts.tolist() == [2, 2]
    early = at - torch.tensor([5, 0], dtype=integers)
    found = Found(verify_on_device(*rows, early, rules, 1, own, backend=backend).numpy())
    assert found.tokens[1].tolist() == wanted.tokens[1].tolist()


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_tensors_of_a_device_give_what_arrays_give(integers: torch.dtype) -> None:
    check_tensors_of_a_device(integers, "numba")


# --- seeds ---------------------------------------------------------------------------------------------------


def test_derived_seeds_are_frozen_and_distinct():
    assert derive_seed(0, 0, 0) == 7799811477047112
    assert derive_seed(2**64 - 1, 7, 3) == 6887484342298913
    seeds = {derive_seed(r, p, s) for r in range(3) for p in range(500) for s in range(8)}
    assert len(seeds) == 3 * 500 * 8 and min(seeds) >= 0 and 2**52 < max(seeds) < 2**53


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, 2**64, 0), (0, 0, -5)])
def test_seeds_out_of_range_are_refused(numbers):
    with pytest.raises(InputError, match=r"2\*\*64 - 1"):
        derive_seed(*numbers)
