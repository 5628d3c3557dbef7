"""Predicted tokens per second: the closed forms against the sums of the paper, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.messages import Mode
from specactor_ray.speculation.tgs import best_window, tau_coupled, tau_decoupled, tokens_per_s

# Also those next to 1, where a naive quotient loses its digits.
PROBABILITIES = st.one_of(st.floats(0, 1), st.floats(1e-15, 1e-3).map(lambda rest: 1.0 - rest))
WINDOWS = st.integers(1, 128)
SECONDS = st.floats(1e-6, 1.0)
DRAFTED = st.sampled_from([Mode.COUPLED, Mode.DECOUPLED])
COSTS = st.lists(SECONDS, min_size=13, max_size=13)


def coupled_sum(p: Fraction, w: int) -> Fraction:
    return sum((p**a * (1 - p) * (a + 1) for a in range(w)), Fraction(0)) + (w + 1) * p**w


def decoupled_sum(p: Fraction, w: int) -> Fraction:
    return sum((p**a * (1 - p) * Fraction(a + 1, 2) for a in range(w)), Fraction(0)) + w * p**w


@given(PROBABILITIES, st.integers(1, 24))
def test_tau_is_the_sum_of_the_paper(p: float, window: int) -> None:
    exact = Fraction(p)
    assert tau_coupled(p, window) == pytest.approx(float(coupled_sum(exact, window)), rel=1e-12)
    assert tau_decoupled(p, window) == pytest.approx(float(decoupled_sum(exact, window)), rel=1e-12)


def test_the_ends_are_exact() -> None:
    assert (tau_coupled(0.0, 5), tau_coupled(1.0, 5), tau_coupled(0.7, 0)) == (1.0, 6.0, 1.0)
    assert (tau_decoupled(0.0, 5), tau_decoupled(1.0, 5)) == (0.5, 5.0)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="window"):
            tau_decoupled(0.5, bad)
    with pytest.raises(ValueError, match="window"):
        tau_coupled(0.5, -1)


@given(st.floats(0, 1), st.floats(0, 1), WINDOWS, DRAFTED, SECONDS, SECONDS)
def test_better_drafts_never_predict_less(
    p: float, q: float, window: int, mode: Mode, draft_s: float, verify_s: float
) -> None:
    low, high = sorted((p, q))
    worse, better = (tokens_per_s(mode, x, window, draft_s, verify_s) for x in (low, high))
    assert better >= worse * (1 - 1e-12)


@given(PROBABILITIES, SECONDS | st.just(0.0), COSTS, st.integers(1, 12), DRAFTED)
def test_the_best_window_is_the_best(p: float, draft_s: float, verify_s: list[float], most: int, mode: Mode) -> None:
    rate, window = best_window(mode, p, draft_s, verify_s, most)
    rates = [tokens_per_s(mode, p, w, draft_s, verify_s[w]) for w in range(1, most + 1)]
    assert 1 <= window <= most
    assert rate == pytest.approx(max(rates), rel=1e-9)
    assert rates[window - 1] == pytest.approx(max(rates), rel=1e-9)


def test_plain_is_one_token_per_step() -> None:
    assert tokens_per_s(Mode.PLAIN, 0.9, 8, 1.0, 0.05) == pytest.approx(20.0)
    assert tokens_per_s(Mode.COUPLED, 1.0, 4, 0.01, 0.06) == pytest.approx(50.0)
    assert tokens_per_s(Mode.DECOUPLED, 1.0, 4, 0.01, 0.06) == pytest.approx(4 / 0.06)
