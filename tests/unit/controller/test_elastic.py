"""How many draft actors there should be: pure decisions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.config.load import from_mapping
from specactor_ray.controller.elastic import Elastic, LearnedCost, Scaling, VerifierLoad
from specactor_ray.core.errors import ConfigError
from tests.unit.simulation.test_start import Start

NEVER = float("inf")
BOUNDS: dict[str, Any] = {"least": 0, "most": 8, "devices": 1.0, "verifying": 8.0, "weight": 1.0}
BOUNDS |= {"window": 16, "branches": 0}


def cost(**points: float) -> LearnedCost:
    """Milliseconds by positions: `p64=10.0`."""
    learned = LearnedCost()
    learned.take([(float(name[1:]), ms / 1e3) for name, ms in points.items()])
    return learned


def scaling(draft: LearnedCost | None = None, **changes: Any) -> Scaling:
    """Verifying is bound by memory up to 256 positions."""
    verify = cost(p1=8.0, p256=10.0, p512=18.0, p1024=36.0)
    return Scaling(**{**BOUNDS, "verify": verify, "draft": draft or FAST, "probability": 0.7, **changes})


FAST = cost(p1=0.8, p64=1.0, p256=1.6, p1024=5.0)
SLOW = cost(p1=1.0, p64=16.0)
BUSY = VerifierLoad(verifiers=2, rows=32.0, supply=0.5)


def test_a_slow_drafter_is_given_fewer_requests() -> None:
    slow = scaling(cost(p1=1.0, p8=2.0, p16=4.0, p32=8.0, p64=16.0), devices=0.25)
    assert 1 <= slow.best_number(0, replace(BUSY, rows=1.0)) < slow.best_number(0, BUSY)


def test_predictions_rise_with_draft_actors_and_never_fall_below_plain() -> None:
    speeds = [scaling(SLOW).tokens_per_s(number, BUSY) for number in range(9)]
    assert speeds == sorted(speeds) and speeds[-1] > 1.3 * speeds[0]
    never_right = scaling(SLOW, probability=0.0)
    assert all(never_right.tokens_per_s(number, BUSY) == pytest.approx(speeds[0]) for number in range(9))


SATURATED = cost(p128=10.0, p256=20.0, p512=40.0, p1024=80.0)


@pytest.mark.parametrize(
    ("method", "present", "load", "least", "most"),
    [
        pytest.param(scaling(probability=0.02), 4, BUSY, 0, 0, id="wrong drafts"),
        pytest.param(scaling(verify=SATURATED), 4, VerifierLoad(2, 256.0, 0.9), 0, 0, id="verifying costs too much"),
        pytest.param(scaling(least=1), 4, VerifierLoad(), 1, 1, id="idle"),
        pytest.param(scaling(least=1), 4, replace(BUSY, suspended=0.9), 1, 1, id="suspended"),
        pytest.param(scaling(refused_rows=BUSY.rows), 0, BUSY, 0, 0, id="refused with as many requests"),
        pytest.param(scaling(refused_rows=2.0 * BUSY.rows), 0, BUSY, 1, 8, id="refused with more requests"),
        pytest.param(scaling(SLOW, devices=0.25), 2, BUSY, 3, 8, id="tails are missing"),
        pytest.param(scaling(SLOW, devices=0.25), 2, replace(BUSY, supply=0.97), 0, 2, id="requests have tails"),
        pytest.param(scaling(LearnedCost()), 0, BUSY, 1, 1, id="unmeasured"),
        pytest.param(scaling(least=2, most=3), 0, VerifierLoad(), 2, 3, id="below the bounds"),
        pytest.param(scaling(least=2, most=3), 8, BUSY, 2, 3, id="above the bounds"),
        pytest.param(scaling(least=2, most=3), 8, replace(BUSY, supply=0.99), 2, 3, id="above, with tails"),
    ],
)
def test_best_numbers(method: Scaling, present: int, load: VerifierLoad, least: int, most: int) -> None:
    assert least <= method.best_number(present, load) <= most


def test_without_a_price_of_devices_speed_decides() -> None:
    free, priced = (scaling(SLOW, verifying=1.0, weight=weight).best_number(0, BUSY) for weight in (0.0, 1.0))
    assert free > priced


def look(method: Scaling, present: int, best: int, now: float, load: VerifierLoad = BUSY) -> int:
    return method.revise(present, best, load, now, up_s=10.0, down_s=60.0)


def test_a_change_is_made_when_it_was_better_for_long_enough() -> None:
    method = scaling()
    assert look(method, 0, 2, 100.0) == 0
    assert look(method, 0, 3, 109.0) == 0, "another number of the same direction goes on counting"
    assert look(method, 0, 3, 110.0) == 3
    assert [look(method, 3, 1, now) for now in (111.0, 170.0, 171.0)] == [3, 3, 1]


def test_a_direction_that_was_given_up_counts_anew() -> None:
    method = scaling()
    best = ((4, 0.0), (2, 5.0), (4, 11.0), (0, 12.0), (4, 30.0))
    assert {look(method, 2, number, now) for number, now in best} == {2}


def test_refused_requests_are_remembered_until_there_are_fewer() -> None:
    method = scaling()
    look(method, 2, 0, 0.0, replace(BUSY, suspended=1.0))
    assert method.refused_rows == BUSY.rows
    look(method, 0, 0, 1.0, replace(BUSY, rows=0.9 * BUSY.rows))
    assert method.refused_rows == BUSY.rows
    look(method, 0, 0, 2.0, replace(BUSY, rows=0.5 * BUSY.rows))
    assert method.refused_rows == NEVER


def test_reported_costs_are_kept_and_never_fall_with_positions() -> None:
    learned = cost(p4=10.0, p64=20.0)
    learned.take([(64.0, 0.015), (128.0, 0.012)])
    assert [learned.seconds(1, at, 0) for at in (1, 4, 64, 128, 500)] == [0.01, 0.01, 0.015, 0.015, 0.015]


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ({"method": "draft_model", "model": "m", "replicas": 3, "max_replicas": 2}, "drafters.0.replicas: 3"),
        ({"method": "draft_model", "model": "m", "replicas": 1, "min_replicas": 2, "max_replicas": 4}, "0.replicas: 1"),
        ({"method": "suffix", "max_replicas": 4}, "drafters.0.max_replicas: verifiers draft by suffix themselves"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused(drafter: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_mapping({"mode": "decoupled", "target": {"model": "m"}, "drafters": [drafter]})


def member(key: str, phase: Phase = Phase.READY, **counters: Any) -> Any:
    return SimpleNamespace(actor_id=f"{key}-0#0000", key=key, phase=phase, counters=counters)


def verifier(steps: int, rows: int) -> Any:
    """One that took so many steps in all, each over so many requests, half of them with a tail."""
    counts = {"steps": steps, "row_steps": steps * rows, "supplied_row_steps": steps * rows // 2, "suspended_steps": 0}
    ladder = [{"method": "draft_model", "drafted": 100.0, "acceptance": 0.8}]
    return member(VERIFIER, **counts, cost=[(1.0, 0.008), (256.0, 0.010)], ladder=ladder)


def elastic(**drafter: Any) -> Elastic:
    model = {"method": "draft_model", "model": "m", "replicas": 0, "max_replicas": 4, **drafter}
    settings = {"mode": "decoupled", "target": {"model": "m", "cores": 1}, "drafters": [model]}
    return Elastic(from_mapping({**settings, "elastic": {"up_s": 0.0, "down_s": 0.0}}))


def test_what_is_reported_is_turned_into_numbers() -> None:
    scaling = elastic(cores=0.1)
    assert scaling.revise([verifier(0, 0)], {"draft_model": 0}, [], 0.0) == {}
    assert scaling.revise([verifier(100, 8)], {"draft_model": 0}, [], 10.0) == {"draft_model": 1}
    drafter = member("draft_model", cost=[(1.0, 0.0005), (8.0, 0.001)])
    assert scaling.revise([verifier(200, 8), drafter], {"draft_model": 1}, [], 20.0) == {}
    same = verifier(200, 8)
    assert scaling.revise([same, drafter], {"draft_model": 1}, [], 30.0) == {"draft_model": 0}, "no step since"
    assert scaling.revise([same, drafter], {"draft_model": 1}, [], 40.0) == {}, "no report since"


def test_counters_that_were_reset_count_from_nothing() -> None:
    scaling = elastic(cores=0.1)
    assert scaling.revise([verifier(100, 8)], {"draft_model": 0}, [], 0.0) == {"draft_model": 1}
    assert scaling.revise([verifier(50, 8)], {"draft_model": 1}, [], 10.0) == {}
    assert scaling.revise([verifier(0, 0)], {"draft_model": 1}, [], 20.0) == {"draft_model": 0}


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.STARTING])
def test_those_on_their_way_come_before_more_and_hold_no_removal_up(phase: Phase) -> None:
    slow = {"cost": [(1.0, 0.001), (16.0, 0.0015), (20.0, 0.004), (64.0, 0.012)]}

    def after(phase: Phase, number: int, rows: int) -> dict[str, int]:
        scaling = elastic(cores=0.1)
        scaling.revise([verifier(1, 64), member("draft_model", **slow)], {"draft_model": number}, [], 0.0)
        mine = [member("draft_model", **slow), member("draft_model", phase)]
        return scaling.revise([verifier(1 + 100 * bool(rows), rows or 64), *mine], {"draft_model": number}, [], 10.0)

    assert after(Phase.READY, 2, 64) == {"draft_model": 4} and after(phase, 2, 64) == {}
    assert after(phase, 2, 0) == {"draft_model": 0}


def test_a_method_that_was_given_up_keeps_its_number() -> None:
    assert elastic(cores=0.1).revise([verifier(100, 8)], {"draft_model": 0}, ["draft_model"], 0.0) == {}


def test_a_number_that_a_user_set_holds_until_it_is_given_back() -> None:
    """On the virtual cluster, whose verifiers are idle, so that no draft actor pays."""
    start, seen = Start(), list[int]()
    drafter, settings = start.run.config.drafters[0], start.run.config.elastic
    drafter.replicas, drafter.min_replicas, drafter.max_replicas = 1, 0, 4
    settings.up_s = settings.down_s = 1.0

    def count() -> None:
        start.run.clock.sleep(30.0)
        seen.append(sum(row["kind"] == "drafter" for row in start.status()))

    def scale() -> None:
        count()
        for number in (2, None):
            start.scale(ngram=number)
            count()

    assert start.play(scale) is None and seen == [0, 2, 0]
