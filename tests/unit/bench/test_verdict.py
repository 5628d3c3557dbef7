"""The conclusion of paired rounds: right at every level of noise, and never above the acceptance length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from specactor_ray.bench.verdict import _quantile, verdict


def said(rounds: list[tuple[float, float]], acceptance_length: float = 4.0) -> dict[str, Any]:
    return verdict(rounds, acceptance_length, "at T=1, batch 16")


def rounds(ratio: float, number: int, noise: float, seed: int) -> list[tuple[float, float]]:
    """Rounds at a true ratio. All of a round is slower or faster together, and each turn alone by `noise`."""
    random = np.random.default_rng(seed)
    machine = 100.0 * np.exp(random.normal(0.0, 0.5, number))
    turns = np.exp(random.normal(0.0, noise, (2, number)))
    return list(zip((machine * turns[0]).tolist(), (machine * ratio * turns[1]).tolist(), strict=True))


@pytest.mark.parametrize("noise", [0.02, 0.3])
@pytest.mark.parametrize("number", [2, 5, 10])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.05, 1.5])
def test_the_interval_holds_and_the_outcome_never_flips(ratio: float, number: int, noise: float) -> None:
    found = [said(rounds(ratio, number, noise, seed)) for seed in range(200)]
    inside = [one for one in found if one["interval"][0] <= ratio <= one["interval"][1]]
    assert len(inside) >= 0.9 * len(found), "95% are expected, 90% is four standard errors below"
    for outcome, is_wrong in (("loses", ratio >= 1.0), ("pays", ratio <= 1.0)):
        if is_wrong:
            assert sum(one["outcome"] == outcome for one in found) <= 0.06 * len(found), "2.5% at most are expected"


@pytest.mark.parametrize(
    ("given", "outcome", "sentence"),
    [
        (rounds(1.5, 5, 0.05, 1), "pays", "drafts pay ("),
        (rounds(1.0, 5, 0.02, 1), "even", "no difference"),
        (rounds(1.3, 5, 0.6, 1), "noisy", "more rounds"),
        (rounds(1.5, 1, 0.0, 1), "noisy", "one round gave 1.50"),
        (
            [(100.0, 94.0), (90.0, 85.5), (110.0, 102.3)],
            "loses",
            "at T=1, batch 16: drafts do not pay (0.94 of plain decoding, 0.92 to 0.97); auto will suspend them",
        ),
        ([(10.0, 50.9), (20.0, 101.8), (15.0, 76.4)], "noisy", "5.09 of plain decoding was measured"),
        ([(10.0, 36.0), (10.0, 41.0), (10.0, 49.0)], "pays", "of which the acceptance length explains 4.00)"),
    ],
)
def test_outcomes_and_their_sentences(given: list[tuple[float, float]], outcome: str, sentence: str) -> None:
    found = said(given)
    assert found["outcome"] == outcome and sentence in found["verdict"]


@pytest.mark.parametrize("length", [1.0, 1.74])
def test_no_claim_exceeds_the_acceptance_length(length: float) -> None:
    for seed in range(100):
        found = said(rounds(1.6, 4, 0.1, seed), length)
        assert found["interval"][0] <= found["ratio"] <= found["interval"][1] <= length
        assert found["outcome"] != "pays" or length > 1.0


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (5, 2.571), (6, 2.447), (10, 2.228), (30, 2.042)])
def test_quantiles_are_students(freedom: int, t: float) -> None:
    assert math.isclose(_quantile(freedom), t, rel_tol=3e-3)
