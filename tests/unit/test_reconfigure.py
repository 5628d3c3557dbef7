"""Algorithm 2: against brute force, and its hysteresis under noise."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.messages import Mode
from specactor_ray.speculation.reconfigure import (
    PLAIN,
    Reconfigurator,
    RequestPlan,
    RequestView,
    best_plan,
    predicted,
    reconfigure,
    useful_window,
)

BOTH = (Mode.DECOUPLED, Mode.COUPLED)
BASE = RequestPlan(8, Mode.DECOUPLED)
# A verify step that grows a little with its positions, as measured ones do.
VERIFY_S = [0.050 + 0.004 * window for window in range(17)]

probabilities = st.floats(0, 1)
draft_costs = st.floats(0, 0.1)
rising_costs = st.lists(st.floats(1e-4, 0.1), min_size=17, max_size=17).map(sorted)


def view(name: str, p: float, verified: int = 1000, committed: int = 0, draft_s: float = 0.002) -> RequestView:
    return RequestView(name, p, draft_s, BASE, verified, committed)


def all_plans(max_window: int) -> list[RequestPlan]:
    return [PLAIN, *(RequestPlan(w, mode) for mode in BOTH for w in range(1, max_window + 1))]


@given(probabilities, draft_costs, rising_costs, st.integers(1, 16))
def test_no_plan_is_better_than_the_best(p: float, draft_s: float, verify_s: list[float], max_window: int) -> None:
    plan, rate = best_plan(p, draft_s, verify_s, max_window, BOTH)
    assert rate == pytest.approx(max(predicted(other, p, draft_s, verify_s) for other in all_plans(max_window)))
    assert rate == pytest.approx(predicted(plan, p, draft_s, verify_s))
    assert (plan.window == 0) == (plan.mode is Mode.PLAIN)


@given(draft_costs, rising_costs)
def test_better_drafts_never_promise_less_nor_a_smaller_window(draft_s: float, verify_s: list[float]) -> None:
    found = [best_plan(step / 50, draft_s, verify_s, 16, BOTH)[1] for step in range(51)]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(found))
    windows = [best_plan(step / 50, draft_s, verify_s, 16, (Mode.COUPLED,))[0].window for step in range(51)]
    assert windows == sorted(windows)


def test_only_requests_below_the_average_change() -> None:
    views = [view("good", 0.95), view("fair", 0.85), view("poor", 0.5), view("bad", 0.01)]
    plans = reconfigure(views, VERIFY_S, BOTH)
    assert plans["good"] == plans["fair"] == BASE
    assert plans["poor"] == best_plan(0.5, 0.002, VERIFY_S, 8, BOTH)[0] != BASE
    assert plans["bad"] == PLAIN
    assert reconfigure([], VERIFY_S, BOTH) == {}
    assert reconfigure([view("alone", 0.1)], VERIFY_S, BOTH) == {"alone": BASE}, "nobody is below itself"


def test_dear_drafts_are_not_worth_it() -> None:
    assert best_plan(0.6, 0.2, VERIFY_S, 8, BOTH)[0] == PLAIN
    assert best_plan(0.6, 0.0, VERIFY_S, 8, BOTH)[0].mode is Mode.COUPLED


def test_a_change_needs_evidence_and_a_known_cost() -> None:
    made = Reconfigurator(BOTH, min_verified=32)
    good = view("good", 0.9)
    assert made.revise([good, view("bad", 0.01, verified=31)], VERIFY_S) == {}
    assert made.revise([good, view("bad", 0.01, draft_s=0.0)], VERIFY_S) == {}
    assert made.revise([good, view("bad", 0.01, verified=32)], VERIFY_S) == {"bad": PLAIN}
    assert made.plan("bad", BASE) == PLAIN
    assert made.plan("good", BASE) == made.plan("unknown", BASE) == BASE


def test_plans_hold_still_under_noise() -> None:
    """Acceptance that wobbles around the average, and around where two plans are equal, changes a plan seldom."""
    rng = random.Random(1)
    made, raw_changes, last = Reconfigurator(BOTH), 0, None
    for step in range(400):
        noise = [rng.uniform(-0.04, 0.04) for _ in range(2)]
        views = [view("a", 0.60 + noise[0], 16 * step, 20 * step), view("b", 0.60 + noise[1], 16 * step, 20 * step)]
        made.revise(views, VERIFY_S)
        wanted = reconfigure(views, VERIFY_S, BOTH)
        raw_changes += wanted != last
        last = wanted
    assert raw_changes > 100, "the noise is too small to show anything"
    assert made.changes <= 4


def test_two_changes_are_apart_by_evidence_whatever_happens() -> None:
    rng = random.Random(2)
    made, since = Reconfigurator(BOTH, min_verified=64, plain_tokens=100), {}
    for step in range(600):
        views = [view(name, rng.random(), 8 * step, 9 * step, rng.choice([0.0005, 0.02])) for name in "abc"]
        plans = {v.request_id: made.plan(v.request_id, BASE) for v in views}
        for name in made.revise(views, VERIFY_S):
            gap = step - since.get(name, -1000)
            assert gap * 9 >= 100 if plans[name] == PLAIN else gap * 8 >= 64
            since[name] = step
    assert made.changes > 20


def test_a_plain_request_is_tried_again_ever_more_seldom_until_it_pays() -> None:
    made, tried, verified = Reconfigurator(BOTH, min_verified=32, plain_tokens=100), [], 40
    for committed in range(0, 3000, 10):
        before = made.plan("bad", BASE)
        verified += 0 if before == PLAIN else 16
        made.revise([view("good", 0.9), view("bad", 0.01, verified, committed)], VERIFY_S)
        if before == PLAIN and made.plan("bad", BASE) == BASE:
            tried.append(committed)
    gaps = [after - before for before, after in pairwise(tried)]
    assert len(tried) >= 4 and gaps == sorted(gaps) and gaps[-1] >= 3 * gaps[0]
    for committed in range(3000, 6000, 10):
        verified += 0 if made.plan("bad", BASE) == PLAIN else 16
        made.revise([view("good", 0.9), view("bad", 0.9, verified, committed)], VERIFY_S)
    assert made.plan("bad", BASE) != PLAIN


def test_the_last_straggler_is_compared_with_those_that_have_ended() -> None:
    made = Reconfigurator(BOTH)
    for step in range(20):
        made.revise([view(name, 0.9, 8 * step) for name in "abcdefgh"], VERIFY_S)
    assert made.revise([view("last", 0.02)], VERIFY_S) == {"last": PLAIN}


def test_a_coupled_layout_never_runs_ahead() -> None:
    base = RequestPlan(8, Mode.COUPLED)
    made = Reconfigurator((Mode.COUPLED,))
    rng = random.Random(3)
    for step in range(200):
        views = [RequestView(name, rng.random(), 0.004, base, 64 * step, 64 * step) for name in "abcd"]
        assert all(plan.mode is not Mode.DECOUPLED for plan in made.revise(views, VERIFY_S).values())
    assert made.changes


def test_a_plan_fits_the_window_of_whoever_drafts() -> None:
    made = Reconfigurator(BOTH, min_verified=0, min_gain=0.0)
    made.revise([view("good", 0.99), view("fair", 0.7, draft_s=0.001)], VERIFY_S)
    plan = made.plan("fair", BASE)
    assert plan.mode is Mode.COUPLED and plan.window > 2
    assert made.plan("fair", RequestPlan(2, Mode.DECOUPLED)) == RequestPlan(2, Mode.COUPLED)
    made.forget("fair")
    assert made.plan("fair", BASE) == BASE


def test_where_nobody_searched_the_base_plan_every_request_gets_its_own_best() -> None:
    made = Reconfigurator((Mode.COUPLED,), base_is_searched=False)
    base = RequestPlan(8, Mode.COUPLED)
    chances = {"good": 0.9, "fair": 0.5, "bad": 0.05}
    made.revise([RequestView(name, p, 0.01, base, 1000, 0) for name, p in chances.items()], VERIFY_S)
    for name, p in chances.items():
        best, rate = best_plan(p, 0.01, VERIFY_S, base.window, (Mode.COUPLED,))
        near = predicted(made.plan(name, base), p, 0.01, VERIFY_S)
        assert made.plan(name, base) == best or rate <= 1.1 * near, "only what promises a tenth more is taken"
    assert made.plan("bad", base) == PLAIN and made.plan("fair", base).window < 8


@given(probabilities, st.integers(0, 64))
def test_a_drafter_runs_ahead_as_far_as_it_is_likely_to_be_followed(p: float, most: int) -> None:
    window = useful_window(p, most)
    assert min(most, 1) <= window <= most
    assert window <= 1 or p ** (window - 1) >= 0.05 * (1 - 1e-9), "its last token is hardly ever reached"
    assert window == most or p**window <= 0.05 * (1 + 1e-9), "the next one would be worth drafting"
