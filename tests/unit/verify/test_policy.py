"""What is verified, how far drafters draft that take turns with the verifier, and when drafts are suspended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.core.step_cost import StepCost
from specactor_ray.table.table import RequestTable
from specactor_ray.verify import _kernels
from specactor_ray.verify.acceptance import Acceptance
from specactor_ray.verify.policy import BUDGET, PROBE_STEPS, TELL_EVERY, Drafter, DraftPolicy, Seconds, Suspension
from tests.unit.verify.tables import commit, ints, request, say

WINDOW = 8


def spec_of(method: str, window: int = WINDOW) -> DrafterSpec:
    return DrafterSpec(method, window=window, traits=traits(method))


MODEL = Drafter("d", spec_of("eagle"), token_s=0.001, hosted=True)
APART = replace(MODEL, drafter_id="a", spec=spec_of("draft_model"), hosted=False)
LOOKUP = Drafter("n", spec_of("ngram"), token_s=1e-5)


def gained(p: float, length: int) -> float:
    return sum(p**i for i in range(1, length + 1))


def chosen(
    p: np.ndarray, supply: np.ndarray, room: np.ndarray, curve: np.ndarray
) -> tuple[float, list[int], list[int]]:
    """What `_kernels.choose_lengths` says; one seat where the arrays are flat."""
    p, supply = np.atleast_2d(p), np.atleast_2d(supply).astype(np.int32)
    seats, lengths = np.zeros(len(room), np.int32), np.zeros(len(room), np.int32)
    rate = _kernels.choose_lengths(p, supply, room.astype(np.int32), curve, seats, lengths)
    return rate, seats.tolist(), lengths.tolist()


def test_of_several_tails_the_one_that_promises_most_is_taken() -> None:
    p = np.array([[0.9, 0.9, 0.5, 0.5, 0.5], [0.6, 0.6, 0.9, 0.9, 0.9]])
    supply = np.array([[1, 5, 3, 3, 0], [8, 8, 1, 0, 0]])
    seats, lengths = chosen(p, supply, np.array([8, 8, 8, 8, 8]), np.ones(41))[1:]
    assert seats == [1, 0, 1, 0, -1] and lengths == [8, 5, 1, 3, 0]
    assert chosen(p, supply, np.ones(5), np.ones(41))[1] == [0, 0, 1, 0, -1], "no more than there is room for"


def test_models_that_have_much_to_read_must_promise_more() -> None:
    """Such as after a suspension, in which they are told nothing."""
    bench = Bench(replace(MODEL, token_s=0.0375), rows=2)
    rows = bench.rows.tolist()
    bench.table.sent[0, rows] = 0
    assert bench.rounds == 1, "it gains less than a twentieth"
    commit(bench.table, bench.acceptance, {row: [1] * (WINDOW + 1) for row in rows})
    assert bench.rounds == 0
    bench.table.sent[0, rows] = bench.table.committed[rows]
    assert bench.rounds == 1
    bench.table.sent[0, rows] = -1
    bench.drafters[0].token_s = 0.01
    assert bench.rounds > 1, "it gains more"


# ---- the policy ----


def step_cost(base_s: float = 0.05, position_s: float = 0.001) -> StepCost:
    cost = StepCost()
    for _ in range(4):
        for count in (1, 2, 4, 8, 16, 32, 64):
            cost.record(count, base_s + position_s * count)
    return cost


class Bench:
    """A policy and requests that all its drafters draft for."""

    def __init__(
        self,
        *drafters: Drafter,
        rows: int = 4,
        prior: float = 0.8,
        cost: StepCost | None = None,
        room: int = 500,
        **speculation: Any,
    ) -> None:
        self.table = RequestTable(WINDOW)
        self.acceptance = Acceptance()
        self.acceptance.evidence[:] = np.array([prior, 1.0])[:, None, None] * 1e6
        config = SpeculationConfig(window=WINDOW, **speculation)
        self.drafters = dict(enumerate(map(replace, drafters)))
        self.policy = DraftPolicy(config, self.table, self.acceptance, cost or step_cost(), self.drafters)
        self.rows = ints([self.table.open(request(str(number), (), room + 1)) for number in range(rows)])
        self.table.fit_seats(len(drafters))
        for seat, drafter in self.drafters.items():
            self.table.clear_seat(seat, self.acceptance.number(drafter.spec.method))
            for row in self.rows.tolist():
                self.table.assign(seat, row)

    @property
    def rounds(self) -> int:
        return self.policy.plan_rounds(self.rows)

    @property
    def is_waiting(self) -> bool:
        return bool(self.policy.silent(self.rows).any())

    def say(self, lengths: Sequence[int], seat: int = 0) -> None:
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            say(self.table, seat, row, *[1] * length)


def test_drafters_whose_pace_is_unknown_are_tried_for_a_few_rounds() -> None:
    assert Bench(replace(MODEL, token_s=0.0)).rounds == 3
    assert Bench(replace(MODEL, token_s=0.0, spec=spec_of("eagle", 2))).rounds == 2
    assert Bench(replace(MODEL, token_s=0.0), cost=step_cost(0.01, 10.0)).rounds == 0, "drafts would be too dear anyway"


@pytest.mark.parametrize("verify", list(VerifyPolicy))
def test_nobody_drafts_before_a_step_was_timed_or_where_no_model_can(verify: VerifyPolicy) -> None:
    assert Bench(MODEL, verify=verify).rounds > 0
    assert Bench(MODEL, cost=StepCost(), verify=verify).rounds == 0
    assert Bench(replace(MODEL, able=False), verify=verify).rounds == 0
    assert Bench(verify=verify).rounds == 0
    assert Bench(LOOKUP, verify=verify).rounds == 0, "what it finds is there"
    left = Bench(MODEL, verify=verify)
    del left.drafters[0]
    assert left.rounds == 0
    unserved = Bench(MODEL, verify=verify)
    for row in unserved.rows.tolist():
        unserved.table.release(0, row)
    assert unserved.rounds == 0


def test_nobody_drafts_where_enough_is_there_or_nothing_has_room() -> None:
    found = Bench(replace(MODEL, token_s=0.01), LOOKUP)
    assert found.rounds > 0
    found.say([WINDOW] * 4, seat=1)
    assert found.rounds == 0, "a lookup has found as much"
    bench = Bench(MODEL)
    bench.table.limits[bench.rows] = bench.table.prompts[bench.rows] + [1, 2, 3, 3]
    assert bench.rounds == 2, "behind the last draft token comes one of the target's own"
    bench.table.limits[bench.rows] = bench.table.prompts[bench.rows] + 1
    assert bench.rounds == 0


def test_a_pace_of_twice_as_many_requests_says_nothing() -> None:
    bench = Bench(replace(MODEL, token_s=1.0, token_rows=7), prior=0.9)
    assert bench.rounds == 0, "it is too slow"
    bench.drafters[0].token_rows = 8
    assert 0 < bench.rounds <= 3 and bench.drafters[0].token_s == 0.0


def test_a_step_waits_for_requests_without_a_tail_whose_drafters_have_yet_to_answer() -> None:
    assert not Bench().is_waiting
    bench = Bench(APART)
    assert bench.is_waiting
    bench.say([1, 1, 2, 0])
    assert not bench.is_waiting, "one has answered that it has no guess"
    row = int(bench.rows[0])
    commit(bench.table, bench.acceptance, {row: [1]})
    assert bench.is_waiting, "the tail is used up"
    say(bench.table, 0, row, 1, 2, base=0)
    assert not bench.is_waiting, "that answer is older and still holds"
    commit(bench.table, bench.acceptance, {row: [1]})
    assert bench.is_waiting
    bench.drafters[0] = replace(APART, able=False)
    assert not bench.is_waiting, "nobody is left who could answer"
    del bench.drafters[0]
    assert not bench.is_waiting
    bench.drafters[0] = APART
    bench.table.release(0, row)
    assert not bench.is_waiting

    last = Bench(APART)
    last.table.limits[last.rows] = last.table.lengths[last.rows] + 1
    assert not last.is_waiting, "the last token of an output is the target's"
    last.table.limits[last.rows[0]] += 1
    assert last.is_waiting

    two = Bench(APART, LOOKUP)
    two.say([0] * 4)
    assert two.is_waiting, "the other one may still find something"
    two.say([2] * 4, seat=1)
    assert not two.is_waiting


# Even a guess that is hardly ever right.
@pytest.mark.parametrize("prior", [0.02, 0.3, 0.9])
def test_verify_all_takes_all_that_is_there(prior: float) -> None:
    bench = Bench(MODEL, prior=prior, cost=step_cost(0.01, 10.0), verify=VerifyPolicy.all)
    bench.table.limits[bench.rows] = bench.table.prompts[bench.rows] + [100, 100, 100, 7]
    bench.say([0, 1, 5, 8])
    seats, lengths = bench.policy.choose(bench.rows)
    assert lengths.tolist() == [0, 1, 5, 6] and seats.tolist() == [-1, 0, 0, 0], "one token more is the target's own"
    bench = Bench(MODEL, prior=prior, cost=step_cost(0.01, 10.0))
    bench.say([0, 1, 5, 8])
    assert not bench.policy.choose(bench.rows)[1].any(), "at this cost no draft token pays"


def test_the_ladder_is_shown_as_plain_data() -> None:
    bench = Bench(replace(MODEL, token_s=0.003), replace(MODEL, spec=DrafterSpec("ngram")))
    bench.acceptance.evidence[:] = 0.0
    assert bench.policy.standings() == []
    bench.acceptance.evidence[1, 0, 1], bench.acceptance.evidence[0, 0, 1] = 50.0, 40.0
    [shown] = bench.policy.standings()
    assert (shown["method"], shown["positions"], shown["drafted"], shown["token_s"]) == ("eagle", "64-127", 50.0, 0.003)
    assert 0.7 < shown["acceptance"] < 0.8 and shown["tgs"] > 20


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
def test_drafts_that_do_not_are_tried_within_the_budget(slowness: Slowness) -> None:
    tried = steps(Suspension(), 4000, accepted=1, drafting_s=0.0015, slowness=slowness)
    lost = 1.0 - (17 / 16) / ((PLAIN_S + OWN_S + 0.0015) / (PLAIN_S + PLAIN_OWN_S))
    assert 0.5 * BUDGET < lost * sum(tried[500:]) / 3500 < 1.5 * BUDGET


def test_drafts_that_begin_to_pay_are_taken_up_for_good() -> None:
    suspension = Suspension()
    steps(suspension, 3000, accepted=0, drafting_s=0.002)
    resumed = steps(suspension, 1000, accepted=8, drafting_s=0.002)
    assert resumed.index(True) < 300 and all(resumed[resumed.index(True) :])
    again = steps(suspension, 40, accepted=0, drafting_s=0.01)
    assert not all(again) and again.index(False) + 3 < len(again) - again[::-1].index(True), "the pauses begin short"


def suspended() -> Suspension:
    """In a long pause."""
    suspension = Suspension()
    while not suspension.is_on:
        steps(suspension, 1, accepted=0, drafting_s=0.002)
    return suspension


def test_a_pause_is_interrupted_for_news_and_ends_with_half_the_requests_or_new_drafters() -> None:
    suspension, quiet = suspended(), list[bool]()
    while suspension.is_on:
        quiet.append(suspension.is_quiet)
        steps(suspension, 1, accepted=0, drafting_s=0.0)
    assert quiet.count(False) == len(quiet) // TELL_EVERY > 1 and not suspension.is_quiet
    suspension = suspended()
    for num_rows in (16, 12, 9, 8):  # the tail of a rollout has room for drafts
        assert suspension.is_on
        suspension.record(num_rows, 0, PLAIN_S, 0.0, PLAIN_OWN_S)
    assert not suspension.is_on
    suspension = suspended()
    suspension.end()
    assert all(steps(suspension, PROBE_STEPS, accepted=0, drafting_s=0.002))


@pytest.mark.parametrize(
    ("speculation", "suspends"), [({}, True), ({"verify": VerifyPolicy.all}, False), ({"race": RaceName.always}, False)]
)
def test_the_configuration_may_demand_drafts(speculation: dict[str, Any], suspends: bool) -> None:
    """Many steps of 16 rows with 48 draft tokens, of which none is right."""
    policy = Bench(**speculation).policy
    for _ in range(PROBE_STEPS + 1):
        policy.record(16, 64, 0, 0, Seconds(0.02, 0.01, 0.01))
    assert policy.suspension.is_on is suspends


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
