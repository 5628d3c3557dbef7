"""The conclusion of paired rounds: right at every level of noise, and never above the acceptance length."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from specactor_ray.bench.verdict import Round, _quantile, estimate, verdict, why_stop


def said(rounds: list[Round], most: float = 4.0, length: float = 1.0, stopped: str = "") -> dict[str, Any]:
    return verdict(rounds, "at T=1, batch 16", most, length, stopped)


def rounds(ratio: float, number: int, noise: float, seed: int, stalls: float = 0.0) -> list[Round]:
    """Rounds at a true ratio. All of a round is slower or faster together, and each turn alone by `noise`; a share of
    `stalls` turns takes twice as long."""
    random = np.random.default_rng(seed)
    machine = 100.0 * np.exp(random.normal(0.0, 0.5, number))
    turns = np.exp(random.normal(0.0, noise, (2, number))) / np.where(random.random((2, number)) < stalls, 2.0, 1.0)
    return [*map(Round, (machine * turns[0]).tolist(), (machine * ratio * turns[1]).tolist())]


def of(*ratios: float, plain: float = 20.0) -> list[Round]:
    return [Round(plain, plain * ratio) for ratio in ratios]


@pytest.mark.parametrize(("noise", "stalls"), [(0.02, 0.0), (0.3, 0.0), (0.04, 0.1), (0.04, 0.3)])
@pytest.mark.parametrize("number", [2, 5, 10])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.05, 1.5])
def test_the_interval_holds_and_the_outcome_never_flips(ratio: float, number: int, noise: float, stalls: float) -> None:
    found = [said(rounds(ratio, number, noise, seed, stalls)) for seed in range(200)]
    inside = [one for one in found if one["interval"][0] <= ratio <= one["interval"][1]]
    assert len(inside) >= 0.9 * len(found), "95% are expected, 90% is four standard errors below"
    for outcome, is_wrong in (("loses", ratio >= 1.0), ("pays", ratio <= 1.0)):
        if is_wrong:
            assert sum(one["outcome"] == outcome for one in found) <= 0.06 * len(found), "2.5% at most are expected"


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (of(1.67), "noisy"),
        (of(1.67, 1.02), "noisy"),
        (of(1.67, 1.67), "pays"),
        (of(1.67, 1.4, 1.9), "pays"),
        (of(1.67, 0.7, 1.1, 2.4, 0.9), "noisy"),
        (of(1.3, 0.8, 2.1, 1.0), "noisy"),
        (of(1.0), "noisy"),
        (of(1.0, 1.0), "even"),
        (of(1.0, 1.0, 1.0, 1.0, 1.0), "even"),
        (of(1.01, 1.0, 1.02, 0.99, 0.98), "even"),
        (of(1.01, 1.01, 1.01, 1.01, 1.01), "even"),
        (of(1.0, 1.3, 0.8, 1.1, 0.9), "noisy"),
        (of(0.7, 0.72, 0.68, 0.71, 0.7), "loses"),
        (of(0.7, 1.2), "noisy"),
    ],
)
def test_outcomes_of_few_and_noisy_rounds(given: list[Round], outcome: str) -> None:
    found = said(given)
    assert found["outcome"] == outcome
    low, high = found["interval"] or (0.0, math.inf)
    assert low <= found["ratio"] <= high and (outcome != "even" or 0.9 <= low <= high <= 1.1)
    assert (outcome == "noisy") == ("not conclusive" in found["verdict"])


@pytest.mark.parametrize(
    ("given", "outcome", "sentence"),
    [
        (rounds(1.5, 5, 0.05, 1), "pays", "drafts pay: 1."),
        (rounds(1.0, 5, 0.02, 1), "even", "drafts make no difference: "),
        (rounds(1.5, 1, 0.0, 1), "noisy", "not conclusive: 1.50 times as fast as plain decoding in one round, which"),
        (of(1.3, 0.8, 2.1, 1.0), "noisy", "not conclusive: 1.22 times as fast as plain decoding (95%: 0.63 to 2.35; 4"),
        (of(1.3, 0.8, 2.1, 1.0), "noisy", "). The rounds differed by 51%; more of them may tell"),
        (
            [Round(100.0, 94.0), Round(90.0, 85.5), Round(110.0, 102.3)],
            "loses",
            "at T=1, batch 16: drafts do not pay: 0.94 times as fast as plain decoding (95%: 0.92 to 0.97; 3 rounds); "
            "auto will suspend them",
        ),
        (of(5.09, 5.09, 5.09), "noisy", "5.09 was measured, of which the acceptance length explains 4.00;"),
        (of(3.6, 4.1, 4.9), "pays", "of which the acceptance length explains 4.00; 3 rounds)"),
    ],
)
def test_outcomes_and_their_sentences(given: list[Round], outcome: str, sentence: str) -> None:
    found = said(given)
    assert found["outcome"] == outcome and sentence in found["verdict"]


def test_a_sentence_says_why_the_rounds_ended() -> None:
    assert "; 2 rounds, then the time was over)" in said(of(1.5, 1.6), stopped="then the time was over")["verdict"]


@pytest.mark.parametrize("length", [1.0, 1.74])
def test_no_claim_exceeds_the_acceptance_length(length: float) -> None:
    for seed in range(100):
        found = said(rounds(1.6, 4, 0.1, seed), length)
        assert found["interval"][0] <= found["ratio"] <= found["interval"][1] <= length
        assert found["outcome"] != "pays" or length > 1.0


def test_prompts_that_repeat_more_are_no_error() -> None:
    lengths, costs = [1.5, 2.2, 2.1, 1.6, 2.3], [0.95, 0.94, 0.96, 0.95, 0.94]
    same = [Round(20.0, 20.0 * length * cost, length) for length, cost in zip(lengths, costs, strict=True)]
    found = said(same, most=1.9, length=1.9)
    assert 0.93 * 1.9 < found["interval"][0] < 0.95 * 1.9 < found["interval"][1] < 0.97 * 1.9
    apart = said([one._replace(length=1.0) for one in same])
    assert apart["interval"][1] - apart["interval"][0] > 10 * (found["interval"][1] - found["interval"][0])
    assert re.search(r"1\.8\d times as fast", found["verdict"])


@pytest.mark.parametrize(
    ("given", "left_s", "why"),
    [
        (of(1.67), 0.0, ""),
        (of(1.67, 1.67), 0.0, ""),
        (of(1.67, 1.67, 1.67), 8.0, ""),
        (of(1.67, 1.67, 1.67), 7.9, "then the time was over"),
        (of(1.67, 1.67, 1.67, 1.67), 100.0, ""),
        (of(1.67, 1.67, 1.68, 1.67, 1.66), 100.0, "enough for this interval"),
        (of(1.67, 1.67, 1.68, 1.67, 1.66), 0.0, "enough for this interval"),
        (of(1.67, 1.2, 2.0, 1.4, 1.8), 100.0, ""),
        (of(1.67, 1.2, 2.0, 1.4, 1.8), 8.0, ""),
        (of(1.67, 1.2, 2.0, 1.4, 1.8), 7.9, "then the time was over"),
        (of(1.67, 1.2, 2.0, 1.4, 1.8), -50.0, "then the time was over"),
    ],
)
def test_rounds_end_when_they_suffice_or_the_time_is_over(given: list[Round], left_s: float, why: str) -> None:
    assert why_stop(given, 1.0, round_s=8.0, left_s=left_s) == why


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.2])
def test_the_interval_holds_at_the_end_of_the_rounds(noise: float) -> None:
    inside, number = 0, 0
    for seed in range(200):
        all_of_them = rounds(1.5, 12, noise, seed)
        taken = next(n for n in range(1, 13) if why_stop(all_of_them[:n], 1.0, 1.0, 12.5 - n))
        low, high = estimate(all_of_them[:taken])[1:3]
        inside, number = inside + (low <= 1.5 <= high), number + taken
    assert inside >= 180 and (number == 1000 if noise == 0.005 else number > 1000)


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (5, 2.571), (6, 2.447), (10, 2.228), (30, 2.042)])
def test_quantiles_are_students(freedom: int, t: float) -> None:
    assert math.isclose(_quantile(freedom), t, rel_tol=3e-3)
