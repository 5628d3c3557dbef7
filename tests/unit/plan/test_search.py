"""The plan: its equations and its search against the written algorithm, and what must always hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.schema import ModeName
from specactor_ray.core.errors import InputError
from specactor_ray.plan.costs import StepTimes
from specactor_ray.plan.search import (
    Candidate,
    Method,
    best_ahead,
    coupled_rates,
    decoupled_rates,
    geometric,
    run_ahead,
    search_plan,
)

# ---- equations ----


# Also those next to 1, where a naive quotient loses its digits.
PROBABILITIES = st.one_of(st.floats(0, 1), st.floats(1e-15, 1e-3).map(lambda rest: 1.0 - rest))
SECONDS = st.floats(1e-6, 1.0)
COSTS = st.lists(SECONDS, min_size=13, max_size=13)


def coupled_sum(p: Fraction, w: int) -> Fraction:
    return sum((p**a * (1 - p) * (a + 1) for a in range(w)), Fraction(0)) + (w + 1) * p**w


@given(PROBABILITIES, SECONDS | st.just(0.0), COSTS, st.integers(1, 12))
def test_a_coupled_window_commits_the_sum_of_the_paper_in_its_seconds(
    p: float, draft_s: float, verify_s: list[float], most: int
) -> None:
    rates = coupled_rates(geometric(np.array([p]), most), draft_s, np.array(verify_s[: most + 1]))[0]
    for window in range(1, most + 1):
        expected = float(coupled_sum(Fraction(p), window)) / (window * draft_s + verify_s[window])
        assert rates[window - 1] == pytest.approx(expected, rel=1e-12)


def line(base_s: float, position_s: float = 0.0) -> StepTimes:
    """A linear cost."""
    return StepTimes((n, base_s + position_s * n) for n in (1e-9, 1e9))


def test_the_decoupled_equation_orders_drafters_as_the_chain_of_states_does() -> None:
    """3% of the pairs are in another order, where steps take the same seconds to 1%."""
    rng, wrong, pairs = np.random.default_rng(0), 0, 100
    for _ in range(pairs):
        rows, window, position_s = rng.choice([1, 4, 16, 64]), int(rng.choice([4, 8, 16])), 10 ** rng.uniform(-4, -1.3)
        verify_s, exact, short = 1.0 + position_s * rows * np.arange(1, window + 2), [], []
        for p, draft_s in zip(rng.uniform(0.3, 0.98, 2), 10 ** rng.uniform(-2, 0.2, 2), strict=True):
            chance, steps = np.array([p]), (line(1.0, position_s), line(draft_s))
            rate = best_ahead(*steps, Method({}, geometric(chance, window)[0]), rows, rows)
            exact.append(max(rate, 1.0 / verify_s[0]))
            rates = decoupled_rates(geometric(chance, window + 1), draft_s, verify_s)
            short.append(max(rates.max(), 1.0 / verify_s[0]))
        chosen = exact[int(np.argmax(short))]
        wrong += chosen < 0.99 * max(exact)
    assert wrong <= 0.03 * pairs


@pytest.mark.parametrize(
    ("p", "forwards", "most", "spare"),
    [(0.4, 3.0, 2, 0.0), (0.9, 5.0, 16, 0.0), (0.7, 4.0, 8, 12.0), (0.9, 8.0, 8, 60.0)],
)
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


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.1, 20.0), st.integers(1, 12), st.floats(0.0, 50.0))
def test_better_or_faster_drafts_never_commit_fewer_tokens(
    p: float, q: float, forwards: float, most: int, spare: float
) -> None:
    worse, better = geometric(np.array(sorted((p, q))), 12)
    known = run_ahead(worse, forwards, most, spare)[0]
    assert run_ahead(better, forwards, most, 0.0)[0] >= run_ahead(worse, forwards, most, 0.0)[0] - 1e-9
    assert run_ahead(worse, forwards + 1.0, most, 0.0)[0] >= run_ahead(worse, forwards, most, 0.0)[0] - 1e-9
    assert run_ahead(worse, forwards, most, spare + 4.0)[0] >= known - 1e-9


# ---- the search ----


WINDOW = 6


def survival(p: float) -> np.ndarray:
    return geometric(np.array([p]), WINDOW)[0]


def layout_of(candidate: Candidate) -> tuple:
    return candidate.mode.value, candidate.method, candidate.draft_devices, candidate.verify_devices


def table(slopes: dict[int, float], intercept: float) -> dict[int, StepTimes]:
    """Linear costs by the number of devices."""
    return {g: line(intercept / g, slope) for g, slope in slopes.items()}


@st.composite
def problems(draw: st.DrawFn) -> dict:
    costs = st.floats(1e-4, 0.1)
    verifiers = draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))
    drafters = draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))
    methods = draw(st.lists(st.sampled_from(["ngram", "draft_model", "eagle"]), min_size=1, max_size=2, unique=True))
    verify = table({g: draw(costs) for g in sorted(verifiers)}, draw(costs))
    return {
        "verify": verify,
        "methods": {
            name: Method(
                table({g: draw(costs) for g in sorted(drafters)}, draw(costs)),
                survival(draw(st.floats(0.0, 1.0))),
                draw(st.booleans()),
            )
            for name in methods
        },
        "devices": draw(st.integers(max(1, min(verifiers)), 9)),
        "requests": draw(st.integers(1, 40)),
    }


def brute_force(problem: dict) -> list[tuple[float, tuple]]:
    """Algorithm 1 for plain and coupled decoding, written down a second time, with none of the code under test but the
    fitted costs."""
    verify: dict[int, StepTimes] = problem["verify"]
    G, B = problem["devices"], problem["requests"]
    found = []
    for g_v in verify:
        if g_v > G:
            continue
        b = B / min(G // g_v, B)
        found.append((B / verify[g_v].seconds(b), ("plain", None, 0, g_v, 0)))
        for name, method in problem["methods"].items():
            if g_v not in method.costs:
                continue
            p, D = method.survival[1], method.costs[g_v].seconds(b)
            for w in range(1, WINDOW + 1):
                tau = float(coupled_sum(Fraction(p), w))
                found.append((B * tau / (w * D + verify[g_v].seconds(b * (w + 1))), ("coupled", name, 0, g_v, w)))
    return found


class TestSearch:
    @settings(max_examples=60)
    @given(problems())
    def test_predictions_are_complete_and_equal_to_brute_force(self, problem: dict) -> None:
        plan, expected = search_plan(**problem), brute_force(problem)
        speeds = {key: speed for speed, key in expected}
        best: dict[tuple, float] = {}
        for (*layout, _), speed in speeds.items():
            best[tuple(layout)] = max(speed, best.get(tuple(layout), 0.0))
        alone = [c for c in plan.predictions if c.mode is not ModeName.decoupled]
        assert {layout_of(c): c.tokens_per_s for c in alone} == pytest.approx(best, rel=1e-9)
        for c in alone:
            assert speeds[*layout_of(c), c.window] == pytest.approx(c.tokens_per_s, rel=1e-9)
        assert plan.chosen is max(plan.predictions, key=lambda c: c.tokens_per_s)
        # Every layout is predicted or rejected, and none exceeds the devices or the requests.
        measured = len(problem["verify"])
        for g_v, method in itertools.product(problem["verify"], problem["methods"].values()):
            own = [g_v] if method.free else range(1, g_v + 1)
            measured += (g_v in method.costs) + sum(g in method.costs for g in own)
        assert len(plan.predictions) + len(plan.rejected) == measured
        plain = [c.tokens_per_s for c in plan.predictions if c.mode is ModeName.plain]
        assert plain and plan.chosen.tokens_per_s >= max(plain)
        for c in plan.predictions:
            assert c.verifiers * c.verify_devices + c.drafters * c.draft_devices <= problem["devices"]
            assert 1 <= c.batch <= problem["requests"] <= c.verifiers * c.batch
            assert c.drafters <= c.verifiers and (c.drafters > 0) == (c.draft_devices > 0)

    @settings(max_examples=40)
    @given(problems(), st.integers(0, 6))
    def test_drafters_with_devices_of_their_own_take_none_of_the_verifiers(self, problem: dict, own: int) -> None:
        shared = {layout_of(one): one for one in search_plan(**problem).predictions}
        methods = {name: replace(method, devices=own, free=False) for name, method in problem["methods"].items()}
        for c in search_plan(**{**problem, "methods": methods}).predictions:
            assert c.verifiers == min(problem["devices"] // c.verify_devices, problem["requests"])
            assert c.drafters * c.draft_devices <= own and c.drafters <= c.verifiers
            if c.mode is not ModeName.decoupled:
                assert c == shared[layout_of(c)]

    @staticmethod
    def even(p: float) -> dict:
        return {
            "verify": table({1: 0.003, 2: 0.002}, 0.05),
            "methods": {"draft_model": Method(table({1: 0.001, 2: 0.0008}, 0.004), survival(p))},
            "devices": 4,
            "requests": 16,
        }

    @pytest.mark.parametrize(("draft_s", "layout"), [(0.0005, (12, 4)), (0.003, (10, 10))])
    def test_verifiers_share_a_drafter_that_keeps_up(self, draft_s: float, layout: tuple) -> None:
        methods = {"draft_model": Method(table({1: draft_s / 8}, draft_s), survival(0.8))}
        problem = {"devices": 52, "requests": 96, "modes": [ModeName.decoupled]}
        plan = search_plan(table({4: 0.0005}, 0.04), methods, **problem)
        assert (plan.chosen.verifiers, plan.chosen.drafters) == layout

    def test_branches_that_cost_little_are_used(self) -> None:
        problem = {**self.even(0.7), "modes": [ModeName.decoupled]}
        method = Method(table({1: 1e-5}, 0.004), survival(0.7))
        alone = search_plan(**{**problem, "methods": {"draft_model": method}}).chosen
        method = replace(method, branches=8)
        branching = search_plan(**{**problem, "methods": {"draft_model": method}}).chosen
        assert branching.tokens_per_s > 1.02 * alone.tokens_per_s

    def test_requests_without_a_tail_decode_plainly(self) -> None:
        """Half of them: between plain decoding and drafts for all, for the price of half of the positions."""
        method = Method({1: StepTimes()}, survival(0.8), free=True)
        problem = {"devices": 1, "requests": 8, "modes": [ModeName.coupled, ModeName.decoupled]}
        none, half = (
            search_plan({1: line(0.05, 0.001)}, {"ngram": replace(method, supply=share)}, **problem).predictions
            for share in (0.0, 0.5)
        )
        assert [one.tokens_per_s for one in none] == pytest.approx([8 / 0.058] * 2)
        assert (half[0].mode, half[0].window) == (ModeName.coupled, 6)
        right = 0.8 * (1 - 0.8**6) / (1 - 0.8)
        assert half[0].tokens_per_s == pytest.approx(8 * (1 + right / 2) / (0.058 + 0.001 * 24))
        assert none[1].tokens_per_s < half[1].tokens_per_s < half[0].tokens_per_s, "after a miss comes a plain step"

    def test_in_words(self) -> None:
        plan = search_plan(**self.even(0.0))
        assert plan.words().startswith("plain, ") and "; predicted tokens/s: plain " in plan.words()
        plan = search_plan(**{**self.even(1.0), "modes": [ModeName.decoupled], "devices": 3})
        assert plan.words().startswith(
            "decoupled draft_model, 2 x 1 + 1 x 1, window 6, batch 8; predicted tokens/s: dec"
        )
        assert plan.rejected == ("decoupled draft_model, 1 x 2 + 1 x 2: needs 4 devices, and there are 3",)

    @pytest.mark.parametrize(("requests", "noted"), [(16, False), (400, True)])
    def test_what_lies_outside_the_measured_is_noted(self, requests: int, noted: bool) -> None:
        verify = {1: StepTimes([(1, 0.05), (8, 0.06), (64, 0.2)])}
        problem = {**self.even(0.0), "requests": requests, "verify": verify, "modes": [ModeName.plain]}
        notes = " ".join(search_plan(**problem).notes)
        assert ("over 1 to 64 positions, and those of the plan have up to 100" in notes) == noted == bool(notes)

    def test_refused(self) -> None:
        with pytest.raises(InputError, match="does not fit 1 device"):
            search_plan(**{**self.even(0.5), "devices": 1, "verify": table({2: 0.1}, 0.1)})
        with pytest.raises(InputError, match="no plan: decoupled"):
            search_plan(**{**self.even(0.5), "devices": 1, "modes": [ModeName.decoupled]})
