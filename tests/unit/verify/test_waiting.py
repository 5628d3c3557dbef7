"""When a step waits for first drafts, and when drafts that cost more than they bring are suspended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.plan.costs import StepCost
from specactor_ray.verify.table import Acceptance, RequestTable
from specactor_ray.verify.verify_lengths import DraftPolicy, Seconds
from specactor_ray.verify.waiting import PROBE_STEPS, TELL_EVERY, Suspension, Waiting
from tests.unit.verify.tables import ints, request

# ---- waits ----


STEP_S = 0.02


class Chain:
    """Rows whose tails come and go at random: after a plain step with probability `a`, after a wait with `b`, after a
    step with a tail with `c`. A tail brings `tokens` beside the target's own, a wait of `answer_s` one with chance `p`.
    """

    def __init__(
        self, p: float, tokens: float, a: float, b: float, c: float, answer_s: float, rows: int = 1, seed: int = 0
    ) -> None:
        self.p, self.tokens, self.next, self.answer_s = p, tokens, (a, b, c), answer_s
        self.table, self.rng = RequestTable(4), np.random.default_rng(seed)
        self.rows = ints([self.table.open(request(str(number))) for number in range(rows)])
        self.waiting, self.has_tail = Waiting(), np.zeros(rows, np.bool_)
        self.longest: list[float] = []
        """Seconds of each step with a row without a tail."""

    def run(self, steps: int, least_s: float = 0.0) -> None:
        for _ in range(steps):
            if self.waiting.rest:
                self.longest.append(0.0)
                self.waiting.record(len(self.rows), STEP_S)
                continue
            self.waiting.begin(self.table, self.rows, self.has_tail)
            lacking, waited_s = self.rows[~self.has_tail], 0.0
            did = np.where(self.has_tail, 2, 0)
            if len(lacking):
                longest_s = self.waiting.plan(np.full(len(lacking), self.p), 0.0, least_s)
                self.longest.append(longest_s)
                if longest_s > 0.0:
                    waited_s = min(longest_s, self.answer_s)
                    self.waiting.waited(lacking, waited_s)
                    did[~self.has_tail] = 1 if self.answer_s <= longest_s else 0
            draws = self.rng.random((2, len(self.rows)))
            with_tail = np.where(did == 2, self.rng.poisson(self.tokens, len(did)), 0)
            right = np.where(did == 1, draws[0] < self.p, with_tail)
            self.table.committed[self.rows] += 1 + right
            self.table.steps[self.rows] += 1
            self.has_tail = draws[1] < np.array(self.next)[did]
            self.waiting.record(len(self.rows) + int(right.sum()), STEP_S + waited_s)

    def rate(self, waits: bool) -> float:
        """Tokens per second of a row in the long run."""
        a, b, c = self.next
        enter, tokens, seconds = (b, 1.0 + self.p, STEP_S + self.answer_s) if waits else (a, 1.0, STEP_S)
        share = enter / (1.0 + enter - c)
        return float(((1 - share) * tokens + share * (1 + self.tokens)) / ((1 - share) * seconds + share * STEP_S))


HEAD = (0.34, 0.6, 0.45, 0.22, 0.2)
"""A weak drafter beside long steps: a plain step regains little."""
MODEL = (0.7, 1.8, 0.88, 0.6, 0.6)
"""A good one with branches: a step that waited loses its next tail."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("figures", [HEAD, MODEL])
@pytest.mark.parametrize("answer_s", [0.0005, 0.008, 0.015])
def test_the_rule_with_the_higher_long_run_rate_is_taken(
    figures: tuple[float, float, float, float, float], answer_s: float, seed: int
) -> None:
    chain = Chain(*figures, answer_s, seed=seed)
    gain = chain.rate(waits=True) / chain.rate(waits=False)
    assert abs(gain - 1.0) > 0.03, "the situations tell the rules apart"
    chain.run(3000)
    share = np.mean(np.array(chain.longest[-500:]) >= answer_s)
    assert share > 0.9 if gain > 1.0 else share < 0.1


def test_all_rows_wait_so_the_rows_without_a_tail_pay_for_them() -> None:
    waits = []
    for rows in (1, 16):
        chain = Chain(0.5, 0.5, 0.5, 0.5, 0.95, answer_s=0.004, rows=rows)
        chain.run(1500)
        waits.append(np.mean(np.array(chain.longest[-300:]) > 0.0))
    assert waits[0] > 0.9 and waits[1] < 0.1


def test_a_silent_drafter_is_waited_for_when_it_has_been_forgotten() -> None:
    chain = Chain(*HEAD, answer_s=60.0)
    chain.run(2000)
    waits = [longest_s for longest_s in chain.longest if longest_s > 0.0]
    assert 2 <= len(waits) <= 2000 / 128 and max(waits) < 2 * STEP_S


def test_where_the_least_answer_takes_too_long_no_wait_is_tried() -> None:
    chain = Chain(*HEAD, answer_s=0.001)
    chain.run(200, least_s=0.05)
    assert max(chain.longest) == 0.0 and 0 < chain.waiting.rest <= 16
    chain.run(200)
    assert max(chain.longest) > 0.0
    chain.run(20, least_s=0.05)
    assert max(chain.longest[-10:]) > 0.0, "what was measured counts"


def test_a_row_that_is_used_again_or_left_out_of_a_step_teaches_nothing() -> None:
    chain = Chain(*HEAD, answer_s=0.001, rows=2)
    chain.run(50)
    counts = chain.waiting._counts.copy()
    kept, row = chain.rows.tolist()
    chain.table.close(row)
    assert chain.table.open(request("new")) == row
    chain.table.steps[kept] += 1  # a step between, in which drafts were left alone
    chain.waiting.begin(chain.table, chain.rows, chain.has_tail)
    assert (chain.waiting._counts <= counts).all()


# ---- suspensions ----


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
