"""How many draft actors there should be: pure decisions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.config.load import from_mapping
from specactor_ray.controller.elastic import (
    Bounds,
    Elastic,
    Figures,
    LearnedCost,
    Standing,
    VerifierLoad,
    best_number,
    revise,
    tokens_per_s,
)
from specactor_ray.core.errors import ConfigError

NEVER = float("inf")
BOUNDS = Bounds(least=0, most=8, devices=1.0, verifying=8.0, weight=1.0, window=16, branches=0)


def cost(**points: float) -> LearnedCost:
    """Milliseconds by positions: `p64=10.0`."""
    learned = LearnedCost()
    learned.take([(float(name[1:]), ms / 1e3) for name, ms in points.items()])
    return learned


def figures(draft: LearnedCost, verify: LearnedCost | None = None, probability: float = 0.7) -> Figures:
    """Verifying is bound by memory up to 256 positions."""
    return Figures(verify or cost(p1=8.0, p256=10.0, p512=18.0, p1024=36.0), draft, probability)


FAST = cost(p1=0.8, p64=1.0, p256=1.6, p1024=5.0)
BUSY = VerifierLoad(verifiers=2, rows=32.0, supply=0.5)


def test_a_slow_drafter_is_given_fewer_requests() -> None:
    slow, small = figures(cost(p1=1.0, p8=2.0, p16=4.0, p32=8.0, p64=16.0)), replace(BOUNDS, devices=0.25)
    few, many = best_number(0, replace(BUSY, rows=1.0), slow, small, NEVER), best_number(0, BUSY, slow, small, NEVER)
    assert 1 <= few < many


def test_predictions_rise_with_draft_actors_and_never_fall_below_plain() -> None:
    slow = figures(cost(p1=1.0, p64=16.0))
    speeds = [tokens_per_s(number, BUSY, slow, BOUNDS) for number in range(9)]
    assert speeds == sorted(speeds) and speeds[-1] > 1.3 * speeds[0]
    never_right = replace(slow, probability=0.0)
    plain = tokens_per_s(0, BUSY, slow, BOUNDS)
    assert all(tokens_per_s(number, BUSY, never_right, BOUNDS) == pytest.approx(plain) for number in range(9))


def test_no_draft_actors_where_drafts_are_wrong_or_verifying_them_costs_too_much() -> None:
    assert best_number(4, BUSY, figures(FAST, probability=0.02), BOUNDS, NEVER) == 0
    saturated = cost(p128=10.0, p256=20.0, p512=40.0, p1024=80.0)
    assert best_number(4, VerifierLoad(2, 256.0, 0.9), figures(FAST, saturated), BOUNDS, NEVER) == 0


def test_idle_verifiers_and_those_that_leave_drafts_alone_need_the_fewest() -> None:
    bounds = replace(BOUNDS, least=1)
    assert best_number(4, VerifierLoad(), figures(FAST), bounds, NEVER) == 1
    assert best_number(4, replace(BUSY, suspended=0.9), figures(FAST), bounds, NEVER) == 1


def test_what_verifiers_refused_is_not_tried_with_as_many_requests() -> None:
    assert best_number(0, BUSY, figures(FAST), BOUNDS, NEVER) > 0
    assert best_number(0, BUSY, figures(FAST), BOUNDS, refused_rows=BUSY.rows) == 0
    assert best_number(0, BUSY, figures(FAST), BOUNDS, refused_rows=2.0 * BUSY.rows) > 0


def test_none_is_added_where_requests_have_tails() -> None:
    slow, small = figures(cost(p1=1.0, p64=16.0)), replace(BOUNDS, devices=0.25)
    assert best_number(2, BUSY, slow, small, NEVER) > 2
    assert best_number(2, replace(BUSY, supply=0.97), slow, small, NEVER) <= 2


def test_an_unmeasured_drafter_is_tried_alone() -> None:
    assert best_number(0, BUSY, figures(LearnedCost()), BOUNDS, NEVER) == 1


def test_without_a_price_of_devices_speed_decides() -> None:
    slow = figures(cost(p1=1.0, p64=16.0))
    priced = replace(BOUNDS, verifying=1.0)
    assert best_number(0, BUSY, slow, replace(priced, weight=0.0), NEVER) > best_number(0, BUSY, slow, priced, NEVER)


def test_bounds_hold_also_for_a_number_outside_them() -> None:
    bounds = replace(BOUNDS, least=2, most=3)
    for present in range(9):
        for load in (BUSY, VerifierLoad(), replace(BUSY, supply=0.99)):
            assert 2 <= best_number(present, load, figures(FAST), bounds, NEVER) <= 3


def look(standing: Standing, present: int, best: int, now: float, load: VerifierLoad = BUSY) -> tuple[Standing, int]:
    return revise(standing, present, best, load, now, up_s=10.0, down_s=60.0)


def test_a_change_is_made_when_it_was_better_for_long_enough() -> None:
    standing, number = look(Standing(), 0, 2, 100.0)
    assert number == 0
    standing, number = look(standing, 0, 3, 109.0)
    assert number == 0, "another number of the same direction goes on counting"
    standing, number = look(standing, 0, 3, 110.0)
    assert number == 3
    standing, number = look(standing, 3, 1, 111.0)
    standing, number = look(standing, 3, 1, 170.0)
    assert number == 3
    assert look(standing, 3, 1, 171.0)[1] == 1


def test_a_direction_that_was_given_up_counts_anew() -> None:
    standing, _ = look(Standing(), 2, 4, 0.0)
    standing, _ = look(standing, 2, 2, 5.0)
    standing, number = look(standing, 2, 4, 11.0)
    assert number == 2
    standing, _ = look(standing, 2, 0, 12.0)
    assert look(standing, 2, 4, 30.0)[1] == 2


def test_refused_requests_are_remembered_until_there_are_fewer() -> None:
    standing, _ = look(Standing(), 2, 0, 0.0, replace(BUSY, suspended=1.0))
    assert standing.refused_rows == BUSY.rows
    standing, _ = look(standing, 0, 0, 1.0, replace(BUSY, rows=0.9 * BUSY.rows))
    assert standing.refused_rows == BUSY.rows
    standing, _ = look(standing, 0, 0, 2.0, replace(BUSY, rows=0.5 * BUSY.rows))
    assert standing.refused_rows == NEVER


def test_reported_costs_are_kept_and_never_fall_with_positions() -> None:
    learned = cost(p4=10.0, p64=20.0)
    learned.take([(64.0, 0.015), (128.0, 0.012)])
    assert [learned.seconds(1, at, 0) for at in (1, 4, 64, 128, 500)] == [0.01, 0.01, 0.015, 0.015, 0.015]


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ({"method": "draft_model", "model": "m", "replicas": 3, "max_replicas": 2}, "drafters.0.replicas: 3"),
        ({"method": "draft_model", "model": "m", "replicas": 1, "min_replicas": 2, "max_replicas": 4}, "0.replicas: 1"),
        ({"method": "draft_model", "model": "m", "min_replicas": 1}, "drafters.0.min_replicas: 1, but without"),
        ({"method": "suffix", "max_replicas": 4}, "drafters.0.max_replicas: verifiers draft by suffix themselves"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused(drafter: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_mapping({"mode": "decoupled", "target": {"model": "m"}, "drafters": [drafter]})


def member(key: str, phase: Phase = Phase.READY, **counters: Any) -> Any:
    actor = SimpleNamespace(counters=counters) if phase is not Phase.PENDING else None
    return SimpleNamespace(actor_id=f"{key}-0#0000", key=key, phase=phase, actor=actor)


def verifier(steps: int, rows: int) -> Any:
    """One that took so many steps in all, each over so many requests, half of them with a tail."""
    counts = {"steps": steps, "row_steps": steps * rows, "supplied_row_steps": steps * rows // 2, "suspended_steps": 0}
    ladder = [{"method": "draft_model", "drafted": 100.0, "acceptance": 0.8}]
    return member(VERIFIER, **counts, cost=[(1.0, 0.008), (256.0, 0.010)], ladder=ladder)


def elastic(**drafter: Any) -> Elastic:
    model = {"method": "draft_model", "model": "m", "replicas": 0, "max_replicas": 4, **drafter}
    settings = {"mode": "decoupled", "target": {"model": "m", "cores": 1}, "drafters": [model]}
    return Elastic(from_mapping({**settings, "elastic": {"up_s": 0.0, "down_s": 0.0}}), {})


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


def test_a_method_that_is_held_or_given_up_keeps_its_number() -> None:
    scaling = elastic(cores=0.1)
    assert scaling.revise([verifier(100, 8)], {"draft_model": 0}, ["draft_model"], 0.0) == {}
    scaling.hold("draft_model", True)
    assert scaling.revise([verifier(200, 8)], {"draft_model": 0}, [], 10.0) == {}
    scaling.hold("draft_model", False)
    assert scaling.revise([verifier(300, 8)], {"draft_model": 0}, [], 20.0) == {"draft_model": 1}
