"""The conclusion of paired rounds: right at every level of noise, and never above the acceptance length."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specactor_ray.bench.verdict import Verdict, _quantile, verdict


def rounds(ratio: float, number: int, noise: float, seed: int) -> list[tuple[float, float]]:
    """Rounds at a true ratio. All of a round is slower or faster together, and each turn alone by `noise`."""
    random = np.random.default_rng(seed)
    machine = 100.0 * np.exp(random.normal(0.0, 0.5, number))
    turns = np.exp(random.normal(0.0, noise, (2, number)))
    return list(zip((machine * turns[0]).tolist(), (machine * ratio * turns[1]).tolist(), strict=True))


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("number", [2, 3, 5, 10])
@pytest.mark.parametrize("ratio", [0.7, 0.95, 1.0, 1.05, 1.5])
def test_the_interval_holds_and_the_outcome_never_flips(ratio: float, number: int, noise: float) -> None:
    found = [verdict(rounds(ratio, number, noise, seed), 4.0) for seed in range(200)]
    inside = [one for one in found if one.low is not None and one.high is not None and one.low <= ratio <= one.high]
    assert len(inside) >= 0.9 * len(found), "95% are expected, 90% is four standard errors below"
    for outcome, is_wrong in (("loses", ratio >= 1.0), ("pays", ratio <= 1.0)):
        if is_wrong:
            assert sum(one.outcome == outcome for one in found) <= 0.06 * len(found), "2.5% at most are expected"
    assert not any("drafts pay (" in one.sentence for one in found if one.outcome != "pays")


def test_enough_rounds_tell() -> None:
    assert verdict(rounds(1.5, 5, 0.05, 1), 2.0).outcome == "pays"
    assert verdict(rounds(0.9, 5, 0.02, 1), 2.0).outcome == "loses"
    assert verdict(rounds(1.0, 5, 0.02, 1), 2.0).outcome == "even"
    assert verdict(rounds(1.3, 5, 0.6, 1), 2.0).outcome == "noisy"
    assert verdict(rounds(1.5, 1, 0.0, 1), 2.0).outcome == "noisy", "a single round has no error"


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("length", [1.0, 1.2, 1.74])
def test_no_claim_exceeds_the_acceptance_length(length: float, noise: float) -> None:
    for seed in range(100):
        found = verdict(rounds(1.6, 4, noise, seed), length)
        assert found.low is not None and found.high is not None
        assert found.low <= found.ratio <= found.high <= length
        assert found.outcome != "pays" or length > 1.0
    found = verdict([(10.0, 20.9), (20.0, 41.8), (15.0, 31.4)], 1.74)
    assert found.outcome == "noisy" and "2.09 of plain decoding was measured" in found.sentence, (
        "drafts cannot have been that fast"
    )
    found = verdict([(10.0, 16.0), (10.0, 18.0), (10.0, 19.0)], 1.74)
    assert found.outcome == "pays" and found.ratio == 1.74
    assert found.sentence.endswith("was measured, of which the acceptance length explains 1.74)")


def test_the_sentences() -> None:
    found = verdict([(100.0, 94.0), (90.0, 85.5), (110.0, 102.3)], 1.3, "for these prompts at T=1, batch 16")
    assert found.sentence == (
        "for these prompts at T=1, batch 16: drafts do not pay (0.94 of plain decoding, 0.92 to 0.97); "
        "auto will suspend them"
    )
    assert isinstance(found, Verdict) and found.outcome == "loses"
    for wrong in ([], [(0.0, 1.0)], [(1.0, -1.0)]):
        with pytest.raises(ValueError, match="rounds"):
            verdict(wrong, 1.0)


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (5, 2.571), (6, 2.447), (10, 2.228), (30, 2.042)])
def test_quantiles_are_students(freedom: int, t: float) -> None:
    assert math.isclose(_quantile(freedom), t, rel_tol=3e-3)
