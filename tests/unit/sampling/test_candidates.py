"""Tokens, margins and candidates of keyed draws are those of every draw made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.candidates import MOST, Candidates, candidates
from specactor_ray.sampling.rules import Rules
from tests.tails import sample_rows
from tests.unit.sampling.test_sampling import perturbed, rows


def ranked(logits: torch.Tensor, params: list[SamplingParams], positions: list[int], most: int = MOST) -> Candidates:
    """Candidates of one draw per row. Row i has slot n - 1 - i, and a prompt of i tokens."""
    n, rules = len(params), Rules(0, logits.device)
    slots = np.arange(n)[::-1].copy()
    rules.write(slots.tolist(), params, [-i for i in range(n)])
    return candidates(logits, np.array(positions) + np.arange(n), slots, rules, most)


def best_of_all(logits: np.ndarray, params: SamplingParams, position: int) -> list[int]:
    scores = perturbed(logits, params, position)
    order = np.lexsort((np.arange(len(scores)), -scores))[:MOST]
    best = [int(v) for v in order if scores[v] > -np.inf]
    return best + [-1] * (MOST - len(best))


def mixed(count: int) -> list[SamplingParams]:
    filters = ((0, 1.0), (40, 1.0), (0, 0.9), (2000, 0.99))
    return [SamplingParams((0.0, 0.6, 1.0)[i % 3], *filters[i % 4], seed=2**63 + i) for i in range(count)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows())
def test_pruned_draws_are_the_best_of_all_draws(case: tuple[np.ndarray, SamplingParams, int]) -> None:
    logits, params, position = case
    x, best = torch.from_numpy(logits).unsqueeze(0), best_of_all(logits, params, position)
    scores = np.append(np.sort(perturbed(logits, params, position))[::-1], -np.inf)
    plain = sample_rows(x, [params], [position])
    assert (plain.token_ids, plain.margins) == (best[:1], None)
    with_margin = sample_rows(x, [params], [position], record_margins=True)
    assert (with_margin.token_ids, with_margin.logprobs) == (best[:1], plain.logprobs)
    assert with_margin.margins == [scores[0] - scores[1]]
    tokens, gaps = ranked(x, [params], [position])
    assert tokens.tolist() == [best]
    with np.errstate(over="ignore"):
        assert gaps.tolist() == np.float32(with_margin.margins).tolist()
    alone, no_gaps = ranked(x, [params], [position], 1)
    assert alone.tolist() == [best[:1]] and np.isinf(no_gaps).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_of_the_vocabulary_is_ranked_as_the_whole_one(dtype: torch.dtype) -> None:
    """Noise and tokens are those of the whole vocabulary, in which all other tokens have no chance."""
    rng, n, size = np.random.default_rng(5), 48, 5000
    ids = np.sort(rng.choice(size, 1100, replace=False)).astype(np.uint32)
    part = (3 * torch.from_numpy(rng.standard_normal((n, len(ids))))).to(dtype)
    whole = torch.full((n, size), -math.inf, dtype=dtype)
    whole[:, torch.from_numpy(ids.astype(np.int64))] = part
    rules, slots = Rules(0, part.device), np.arange(n)
    rules.write(slots.tolist(), mixed(n), [0] * n)
    wanted, found = candidates(whole, 7 * slots, slots, rules), candidates(part, 7 * slots, slots, rules, ids=ids)
    assert found.tokens.tolist() == wanted.tokens.tolist() and found.gaps.tolist() == wanted.gaps.tolist()
    for row, rule, position, best in zip(whole, mixed(n), 7 * slots, wanted.tokens.tolist(), strict=True):
        assert best == best_of_all(row.float().numpy(), rule, int(position))
    assert set(found.tokens.ravel().tolist()) <= {-1, *ids.tolist()}
    for wrong in ({"ids": ids[1:]}, {"ids": ids, "backend": "triton"}):
        with pytest.raises(ValueError, match="ids"):
            candidates(part, 7 * slots, slots, rules, **wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("most", [1, MOST])
def test_rows_that_cannot_be_sampled_have_no_candidates(temperature: float, most: int) -> None:
    logits = torch.full((2, 700), -math.inf)
    logits[1, 3], logits[1, 600] = 0.0, math.nan
    tokens, gaps = ranked(logits, [SamplingParams(temperature, seed=3)] * 2, [0] * 2, most)
    assert (tokens == -1).all() and np.isinf(gaps).all()


@pytest.mark.parametrize(("rule", "expected"), [
    ({"temperature": 0.0}, [4, 6]),
    ({"temperature": 0.01}, [4, 6]),
    ({"temperature": 0.01, "top_k": 1}, [4]),
    ({"temperature": 0.01, "top_p": 0.2}, [4]),
])  # fmt: skip
def test_fewer_candidates_than_asked_for(rule: dict, expected: list[int]) -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, 6], logits[0, 4] = 1.0, 3.0
    tokens, gaps = ranked(logits, [SamplingParams(**rule)], [5])
    assert tokens.tolist() == [expected + [-1] * (MOST - len(expected))]
    assert np.isinf(gaps[0]) == (len(expected) == 1)
    one, none = ranked(logits[:, 4:5], [SamplingParams(**rule)], [5])
    assert one.tolist() == [[0] + [-1] * (MOST - 1)] and np.isinf(none[0])


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(1, 1200)
    logits[0, [1100, 30, 600, 900, 650, 800]] = 2.0
    logits[0, 700] = -0.0
    assert ranked(logits, [SamplingParams(0.0)], [0]).tokens.tolist() == [[30, 600, 650, 800, 900]]
    assert ranked(logits[:, :700], [SamplingParams(0.0)], [0]).tokens.tolist() == [[30, 600, 650, 0, 1]]
    drowned = SamplingParams(seed=1)  # float64 rounds the noise away
    assert ranked(logits - 1e20, [drowned], [0]).tokens.tolist() == [[*range(MOST)]]
