"""Drafts that cost more than they bring are left alone, and tried again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.plan.costs import StepCost
from specactor_ray.verify.table import Acceptance, RequestTable
from specactor_ray.verify.verify_lengths import DraftPolicy, Seconds
from specactor_ray.verify.waiting import PROBE_STEPS, TELL_EVERY, Suspension

PLAIN_S, OWN_S, PLAIN_OWN_S = 0.01, 0.0006, 0.0002
"""A plain step, and our own Python in steps with drafts and in plain ones."""


Slowness = Callable[[int], float]


def calm(number: int) -> float:
    return 1.0


def steps(
    suspension: Suspension, count: int, accepted: int, drafting_s: float, slowness: Slowness = calm
) -> list[bool]:
    """Which of `count` steps of 16 rows were with drafts."""
    with_drafts = []
    for number in range(count):
        drafts = not suspension.is_on
        own_s, waited_s = (OWN_S, drafting_s) if drafts else (PLAIN_OWN_S, 0.0)
        factor = slowness(number)
        seconds = factor * (PLAIN_S + own_s + waited_s)
        suspension.record(16, accepted if drafts else 0, seconds, factor * waited_s, factor * own_s)
        with_drafts.append(drafts)
    return with_drafts


def noisy(number: int) -> float:
    return float(np.random.default_rng(number // 40).uniform(0.3, 3.0))


@pytest.mark.parametrize("slowness", [calm, noisy])
def test_drafts_that_pay_are_never_left_alone_on_a_machine_of_any_mood(slowness: Slowness) -> None:
    assert all(steps(Suspension(), 2000, accepted=4, drafting_s=0.0015, slowness=slowness))


@pytest.mark.parametrize("slowness", [calm, noisy])
def test_drafts_that_do_not_are_tried_ever_more_rarely(slowness: Slowness) -> None:
    tried = steps(Suspension(), 4000, accepted=1, drafting_s=0.0015, slowness=slowness)
    assert sum(tried[:500]) < 120 and 0 < sum(tried[2000:]) < 100


def test_drafts_that_begin_to_pay_are_taken_up_for_good() -> None:
    suspension = Suspension()
    steps(suspension, 3000, accepted=0, drafting_s=0.002)
    resumed = steps(suspension, 1000, accepted=8, drafting_s=0.002)
    assert resumed.index(True) < 300 and all(resumed[resumed.index(True) :])
    again = steps(suspension, 40, accepted=0, drafting_s=0.01)
    assert not all(again) and again.index(False) + 3 < len(again) - again[::-1].index(True), "the pauses begin short"


def test_drafters_are_told_now_and_then_while_they_are_left_alone() -> None:
    suspension = Suspension()
    while suspension._spell < 128 or not suspension.is_on:
        steps(suspension, 1, accepted=0, drafting_s=0.002)
    quiet = []
    while suspension.is_on:
        quiet.append(suspension.is_quiet)
        steps(suspension, 1, accepted=0, drafting_s=0.0)
    assert quiet.count(False) == len(quiet) // TELL_EVERY > 1 and not suspension.is_quiet


def test_half_as_many_requests_end_a_pause() -> None:
    """The tail of a rollout has room for drafts."""
    suspension = Suspension()
    while suspension._spell < 128 or not suspension.is_on:
        steps(suspension, 1, accepted=0, drafting_s=0.002)
    for num_rows in (16, 12, 9):
        suspension.record(num_rows, 0, PLAIN_S, 0.0, PLAIN_OWN_S)
        assert suspension.is_on
    suspension.record(8, 0, PLAIN_S, 0.0, PLAIN_OWN_S)
    assert not suspension.is_on


def test_new_drafters_are_tried_at_once() -> None:
    suspension = Suspension()
    while not suspension.is_on:
        steps(suspension, 1, accepted=0, drafting_s=0.002)
    suspension.end()
    assert all(steps(suspension, PROBE_STEPS, accepted=0, drafting_s=0.002))


def policy_after(config: SpeculationConfig, seconds: Seconds) -> DraftPolicy:
    """After many steps of 16 rows with 48 draft tokens, of which none is right."""
    policy = DraftPolicy(config, RequestTable(8), Acceptance(), StepCost(), {})
    for _ in range(PROBE_STEPS + 1):
        policy.record(16, 64, 0, 0, seconds)
    return policy


def test_the_configuration_may_demand_drafts() -> None:
    seconds = Seconds(0.02, 0.01, 0.01)
    assert policy_after(SpeculationConfig(), seconds).suspension.is_on
    assert not policy_after(SpeculationConfig(verify=VerifyPolicy.all), seconds).suspension.is_on
    assert not policy_after(SpeculationConfig(race=RaceName.always), seconds).suspension.is_on


def test_the_time_of_prompts_says_nothing_of_drafts() -> None:
    """Of 100 positions 40 are prompts: a request has them once, however fast it is decoded. Drafts that save a fifth
    of the rest save less than what is waited for them."""
    policy = DraftPolicy(SpeculationConfig(), RequestTable(8), Acceptance(), StepCost(), {})
    for number in (16, 60, 100):
        policy.cost.record(number, number / 1000.0)
    for _ in range(PROBE_STEPS + 1):
        policy.record(50, 100, 40, 10, Seconds(0.1 + 0.003, 0.1, 0.003))
    assert policy.suspension.is_on
    policy = DraftPolicy(SpeculationConfig(), RequestTable(8), Acceptance(), StepCost(), {})
    for _ in range(PROBE_STEPS + 1):
        policy.record(50, 200, 140, 0, Seconds(0.3, 0.2, 0.1))
    assert not policy.suspension.is_on and not policy.cost.is_known, "steps of prompts alone are not judged"
