"""Predicted tokens per second: the closed forms against the sums of the paper, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.plan.search import geometric, iterations, run_ahead, share_right, window_rates

# Also those next to 1, where a naive quotient loses its digits.
PROBABILITIES = st.one_of(st.floats(0, 1), st.floats(1e-15, 1e-3).map(lambda rest: 1.0 - rest))
WINDOWS = st.integers(1, 128)
SECONDS = st.floats(1e-6, 1.0)
COSTS = st.lists(SECONDS, min_size=13, max_size=13)


def coupled_sum(p: Fraction, w: int) -> Fraction:
    return sum((p**a * (1 - p) * (a + 1) for a in range(w)), Fraction(0)) + (w + 1) * p**w


def decoupled_sum(p: Fraction, w: int) -> Fraction:
    return sum((p**a * (1 - p) * Fraction(a + 1, 2) for a in range(w)), Fraction(0)) + w * p**w


def taus(survival: np.ndarray) -> list[float]:
    """τ of coupled and decoupled iterations, at the largest window."""
    return [float(tau[0, -1]) for tau, _ in iterations(survival, 0.0, np.ones(survival.shape[1]))]


def both(p: float, window: int) -> list[float]:
    return taus(geometric(np.array([p]), window))


@given(PROBABILITIES, st.integers(1, 24))
def test_tau_is_the_sum_of_the_paper(p: float, window: int) -> None:
    exact = Fraction(p)
    expected = [float(coupled_sum(exact, window)), float(decoupled_sum(exact, window))]
    assert both(p, window) == pytest.approx(expected, rel=1e-12)


@given(st.floats(1e-3, 1.0), st.integers(1, 12))
def test_p_of_a_geometric_survival_is_its_p_at_every_window(p: float, window: int) -> None:
    assert share_right(geometric(np.array([p]), window)[0]) == pytest.approx(p, rel=1e-9)


def test_p_of_measured_survival() -> None:
    assert share_right(np.array([1.0, 0.5, 0.4])) == pytest.approx(0.9 / 1.5)


def test_the_ends_are_exact() -> None:
    assert both(0.0, 5) == [1.0, 0.5] and both(1.0, 5) == [6.0, 5.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).map(lambda rates: [1.0, *sorted(rates, reverse=True)]))
def test_tau_of_measured_survival_is_the_sum_over_how_many_are_right(rates: list[float]) -> None:
    window = len(rates) - 1
    exactly = [rates[a] - rates[a + 1] for a in range(window)]
    coupled = sum(chance * (a + 1) for a, chance in enumerate(exactly)) + (window + 1) * rates[-1]
    decoupled = sum(chance * (a + 1) / 2 for a, chance in enumerate(exactly)) + window * rates[-1]
    assert taus(np.array([rates])) == pytest.approx([coupled, decoupled])


@given(PROBABILITIES, SECONDS | st.just(0.0), COSTS, st.integers(1, 12))
def test_a_windows_rate_is_that_of_the_better_mode(p: float, draft_s: float, verify_s: list[float], most: int) -> None:
    rates = window_rates(np.array([p]), most, draft_s, np.array(verify_s))[0]
    for window in range(1, most + 1):
        tau_coupled, tau_decoupled = both(p, window)
        coupled = tau_coupled / (window * draft_s + verify_s[window])
        decoupled = tau_decoupled / max(window * draft_s, verify_s[window])
        assert rates[window - 1] == pytest.approx(max(coupled, decoupled), rel=1e-12)


@given(st.floats(0, 1), st.floats(0, 1), WINDOWS, SECONDS, COSTS)
def test_better_drafts_never_predict_less(
    p: float, q: float, window: int, draft_s: float, verify_s: list[float]
) -> None:
    worse, better = window_rates(np.array(sorted((p, q))), min(window, 12), draft_s, np.array(verify_s))
    assert (better >= worse * (1 - 1e-12)).all()


@pytest.mark.parametrize(("forwards", "most", "spare"), [(3.0, 2, 0.0), (5.0, 16, 0.0), (4.0, 8, 12.0), (8.0, 8, 60.0)])
@pytest.mark.parametrize("p", [0.4, 0.7, 0.9])
def test_run_ahead_is_the_mean_of_what_it_describes(p: float, forwards: float, most: int, spare: float) -> None:
    """Step by step with drawn tokens. Branches are those of most need: each a position of the main chain, a candidate
    that is right where those before it are wrong, and a depth."""
    window, rng, steps = 12, np.random.default_rng(1), 10_000
    right = np.array([0.4, 0.6 * 0.18, 0.6 * 0.82 * 0.12, 0.6 * 0.82 * 0.88 * 0.1])
    worth = {
        (at, rank, depth): p**at * (1 - p) * right[rank] * p**depth
        for at in range(window)
        for rank in range(4)
        for depth in range(int(forwards))
        if at + depth < window
    }
    taken = sorted(worth, key=lambda one: -worth[one])[: int(spare)]
    tail, committed, verified = 0.0, 0, 0
    for _ in range(steps):
        shown = min(int(tail), most)
        tail = min(tail + forwards - (tail == 0), window)
        accepted = 0
        while accepted < shown and rng.random() < p:
            accepted += 1
        committed, verified = committed + 1 + accepted, verified + shown
        left = max(tail - accepted - 1, 0)
        if accepted < tail and (accepted < shown or rng.random() >= p):
            rank = int(np.searchsorted(np.cumsum(right), rng.random()))
            depths = [depth for at, one, depth in taken if at == accepted and one == rank]
            left = min(max(len(depths) - 1, 0), left)
        tail = left
    tau, positions = run_ahead(geometric(np.array([p]), window)[0], forwards, most, spare)
    assert [tau, positions] == pytest.approx([committed / steps, verified / steps], rel=0.05, abs=0.05)


@given(st.floats(0.1, 20.0), st.integers(1, 12), st.floats(0.0, 50.0))
def test_run_ahead_at_the_ends(forwards: float, most: int, spare: float) -> None:
    never, always = geometric(np.array([0.0, 1.0]), 12)
    assert run_ahead(never, forwards, most, spare)[0] == pytest.approx(1.0)
    tau, positions = run_ahead(always, forwards, most, spare)
    assert 1.0 - 1e-9 <= tau <= 1.0 + min(forwards, most) and positions <= most


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.1, 20.0), st.integers(1, 12), st.floats(0.0, 50.0))
def test_better_or_faster_drafts_never_commit_fewer_tokens(
    p: float, q: float, forwards: float, most: int, spare: float
) -> None:
    worse, better = geometric(np.array(sorted((p, q))), 12)
    known = run_ahead(worse, forwards, most, spare)[0]
    assert run_ahead(better, forwards, most, 0.0)[0] >= run_ahead(worse, forwards, most, 0.0)[0] - 1e-9
    assert run_ahead(worse, forwards + 1.0, most, 0.0)[0] >= run_ahead(worse, forwards, most, 0.0)[0] - 1e-9
    assert run_ahead(worse, forwards, most, spare + 4.0)[0] >= known - 1e-9
