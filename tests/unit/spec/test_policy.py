"""What is verified, what a step waits for and how far drafters run ahead, against brute force."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.spec import _kernels
from specactor_ray.spec.acceptance import Acceptance
from specactor_ray.spec.cost import StepCost
from specactor_ray.spec.policy import Drafter, Policy, Wait
from specactor_ray.spec.table import RequestTable
from specactor_ray.spec.tgs import geometric, taus
from tests.unit.spec.tables import ints, request, say

WINDOW = 8
REMOTE = Drafter("d", "eagle", WINDOW, 64, token_s=0.001)
INLINE = replace(REMOTE, inline=True)
LOOKUP = Drafter("n", "ngram", WINDOW, 64, looks_up=True, inline=True, token_s=1e-5)


def gained(p: float, length: int) -> float:
    return sum(p**i for i in range(1, length + 1))


def chosen(
    p: np.ndarray, supply: np.ndarray, room: np.ndarray, curve: np.ndarray, weight: np.ndarray | None = None
) -> tuple[float, list[int], list[int]]:
    """What `_kernels.choose` says; one seat where the arrays are flat."""
    p, supply = np.atleast_2d(p), np.atleast_2d(supply).astype(np.int32)
    seats, lengths = np.zeros(len(room), np.int32), np.zeros(len(room), np.int32)
    weight = np.ones_like(p) if weight is None else np.atleast_2d(weight)
    rate = _kernels.choose(p, weight, supply, room.astype(np.int32), curve, seats, lengths)
    return rate, seats.tolist(), lengths.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_hardly_any_other_choice_commits_more_per_second(seed: int) -> None:
    """All lengths of a few requests, where positions cost the same or ever more."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 5))
    p, weight = rng.uniform(0.02, 1.0, rows), rng.uniform(0.1, 1.0, rows)
    supply, room = rng.integers(0, 5, rows), rng.integers(0, 6, rows)
    drafts = np.arange(4 * rows + 1)
    curve = 0.05 + 10 ** rng.uniform(-4, -1) * drafts ** rng.uniform(1.0, 1.5)
    rate, _, lengths = chosen(p, supply, room, curve, weight)

    def rate_of(choice: Sequence[int]) -> float:
        tokens = rows + sum(w * gained(q, n) for q, w, n in zip(p, weight, choice, strict=True))
        return float(tokens / curve[sum(choice)])

    most = np.minimum(supply, room).tolist()
    assert all(0 <= length <= limit for length, limit in zip(lengths, most, strict=True))
    assert rate == pytest.approx(rate_of(lengths))
    best = max(map(rate_of, product(*(range(limit + 1) for limit in most))))
    assert rate >= 0.97 * best


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=4), st.data())
def test_at_any_cost_what_is_promised_is_what_is_chosen(rows: list[tuple[float, int]], data: st.DataObject) -> None:
    """Also where the cost falls; and it is never less than that of plain decoding."""
    p, supply = (np.array(column) for column in zip(*rows, strict=True))
    size = 6 * len(rows) + 1
    curve = np.array(data.draw(st.lists(st.floats(0.01, 10.0), min_size=size, max_size=size)))
    rate, _, lengths = chosen(p.astype(float), supply, np.full(len(rows), 9), curve)
    assert all(0 <= length <= limit for length, limit in zip(lengths, supply, strict=True))
    expected = len(rows) + sum(gained(q, n) for q, n in zip(p, lengths, strict=True))
    assert rate == pytest.approx(expected / curve[sum(lengths)]) and rate >= len(rows) / curve[0] * (1 - 1e-9)


def test_free_positions_take_all_and_dear_ones_none() -> None:
    p, supply, room = np.array([0.9, 0.3, 0.0, 1.0, 0.5]), np.array([4, 4, 4, 3, 0]), np.full(5, 9)
    assert chosen(p, supply, room, np.ones(16))[2] == [4, 4, 0, 3, 0]
    assert chosen(p, supply, room, np.arange(5, 21.0) ** 3)[2] == [0] * 5


def test_the_better_request_gets_the_positions() -> None:
    curve = np.where(np.arange(17) <= 4, 1.0, 100.0)
    assert chosen(np.array([0.9, 0.3]), np.array([8, 8]), np.full(2, 8), curve)[2] == [4, 0]


def test_of_several_tails_the_one_that_promises_most_is_taken() -> None:
    p = np.array([[0.9, 0.9, 0.5, 0.5, 0.5], [0.6, 0.6, 0.9, 0.9, 0.9]])
    supply = np.array([[1, 5, 3, 3, 0], [8, 8, 1, 9, 0]])
    weight = np.array([[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, 1.0]])
    seats, lengths = chosen(p, supply, np.array([8, 8, 8, 8, 8]), np.ones(41), weight)[1:]
    assert seats == [1, 0, 1, 0, -1] and lengths == [8, 5, 1, 3, 0]
    assert chosen(p, supply, np.ones(5), np.ones(41), weight)[1] == [0, 0, 1, 0, -1], "no more than there is room for"


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
        coupled: bool = False,
        room: int = 500,
        **speculation: Any,
    ) -> None:
        self.table = RequestTable(WINDOW)
        self.acceptance = Acceptance({"eagle": prior, "ngram": prior})
        config = SpeculationConfig(window=WINDOW, **speculation)
        self.policy = Policy(config, self.table, self.acceptance, cost or step_cost(), coupled)
        self.rows = ints([self.table.open(request(str(number), (), room + 1)) for number in range(rows)])
        self.table.fit_seats(len(drafters))
        for seat, drafter in enumerate(map(replace, drafters)):
            self.policy.drafters.append(drafter)
            self.table.clear_seat(seat, self.acceptance.number(drafter.method))
            for row in self.rows.tolist():
                self.table.seat_row(seat, row, drafter.window)

    def plan(self) -> Wait:
        return self.policy.plan_wait(self.rows)

    def say(self, lengths: Sequence[int], complete: bool = False, seat: int = 0) -> None:
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            say(self.table, seat, row, *[1] * length, complete=complete)

    @property
    def ordered(self) -> list[int]:
        return self.table.windows[0, self.rows].tolist()


@pytest.mark.parametrize("drafter", [REMOTE, INLINE], ids=["remote", "inline"])
@pytest.mark.parametrize("prior", [0.05, 0.4, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("token_s", [0.0002, 0.003, 0.01, 0.03, 0.2])
def test_a_step_waits_as_long_as_pays(drafter: Drafter, prior: float, token_s: float) -> None:
    """All requests are alike, so every number of rounds can be tried."""
    bench = Bench(replace(drafter, token_s=token_s), prior=prior, coupled=drafter.inline)
    most = WINDOW if drafter.inline else 4

    def rate(rounds: int, length: int) -> float:
        return 4 * (1 + gained(prior, length)) / (0.05 + 0.001 * 4 * (1 + length) + token_s * rounds)

    rounds, _ = bench.plan()
    assert rounds <= most
    assert bench.policy.wanted.tolist() == [rounds] * 4, "what is drafted is verified"
    assert rate(rounds, rounds) >= 0.99 * max(rate(number, number) for number in range(most + 1))
    if prior <= 0.4 and token_s >= 0.03:
        assert not rounds
    if prior >= 0.7 and token_s <= 0.003:
        assert rounds


def test_a_wait_is_bounded_by_what_it_should_take_or_by_what_the_configuration_says() -> None:
    drafters = replace(REMOTE, token_s=0.002), replace(REMOTE, drafter_id="e", token_s=0.001)
    rounds, seconds = Bench(*drafters).plan()
    assert rounds and 0.002 * rounds <= seconds <= 2 * 0.002 * rounds, "the slowest counts"
    assert Bench(*drafters, draft_wait_s=0.7).plan() == (rounds, 0.7)
    assert Bench(INLINE, coupled=True, coupled_wait_s=0.3).plan().seconds == 0.3


def test_drafters_of_one_thread_take_turns_and_others_run_at_once() -> None:
    pair = [replace(INLINE, token_s=0.006), replace(INLINE, drafter_id="e", token_s=0.006)]
    alone = Bench(pair[0], coupled=True).plan().rounds
    assert Bench(*pair, coupled=True).plan().rounds < alone
    pair = [replace(REMOTE, token_s=0.006), replace(REMOTE, drafter_id="e", token_s=0.006)]
    assert Bench(*pair).plan().rounds == Bench(pair[0]).plan().rounds > 0


def test_an_answer_that_takes_long_is_not_waited_for() -> None:
    assert Bench(REMOTE).plan().rounds > 0
    late = Bench(replace(REMOTE, answer_s=1.0))
    assert late.plan() == (0, 0.0)
    late.say([0] * 4)
    assert late.plan().rounds > 0, "it has begun to draft from the newest commit"


@pytest.mark.parametrize("drafter", [REMOTE, INLINE], ids=["remote", "inline"])
def test_a_drafter_whose_pace_is_unknown_is_tried_for_a_few_rounds(drafter: Drafter) -> None:
    bench = Bench(replace(drafter, token_s=0.0), coupled=drafter.inline)
    assert bench.plan().rounds == 3 and bench.policy.wanted.tolist() == [3] * 4


def test_nothing_is_waited_for_before_a_step_was_timed_or_where_nobody_can_answer() -> None:
    assert Bench(INLINE, cost=StepCost(), coupled=True).plan() == (0, 0.0)
    assert Bench(replace(REMOTE, able=False)).plan() == (0, 0.0)
    assert Bench().plan() == (0, 0.0)
    done = Bench(REMOTE)
    done.say([2] * 4, complete=True)
    assert done.plan() == (0, 0.0)
    full = Bench(REMOTE)
    full.say([WINDOW] * 4)
    assert full.plan() == (0, 0.0)


def test_who_runs_ahead_is_waited_for_only_by_requests_that_have_nothing() -> None:
    bench = Bench(REMOTE)
    bench.say([1] * 4)
    assert bench.plan().rounds == 0, "what comes later is for the next step"
    bench = Bench(REMOTE)
    bench.say([0, 1, 1, 1])
    assert bench.plan().rounds > 0
    inline = Bench(INLINE, coupled=True)
    inline.say([1] * 4)
    assert inline.plan().rounds > 0 and min(inline.policy.wanted) > 1, "nobody drafts during the step"


@pytest.mark.parametrize("guesses", [True, False])
def test_lookups_that_hardly_ever_find_anything_are_not_waited_for(guesses: bool) -> None:
    bench = Bench(replace(LOOKUP, token_s=0.01), coupled=True)
    bench.table.evidence[3, 0, bench.rows], bench.table.evidence[2, 0, bench.rows] = 200.0, 200.0 * guesses
    assert (bench.plan().rounds > 0) == guesses


def test_a_wait_ends_when_each_request_has_what_is_wanted_or_cannot_get_it() -> None:
    bench = Bench(REMOTE)
    rounds = bench.plan().rounds
    assert rounds > 1 and not bench.policy.is_served(bench.rows)
    bench.say([rounds, rounds, rounds, rounds - 1])
    assert not bench.policy.is_served(bench.rows)
    say(bench.table, 0, 3, *[1] * (rounds - 1), complete=True)
    assert bench.policy.is_served(bench.rows), "it has no better guess"

    bench = Bench(REMOTE)
    bench.plan()
    bench.policy.drafters[0].able = False  # type: ignore[union-attr]
    assert bench.policy.is_served(bench.rows), "nobody is left who could answer"

    two = Bench(REMOTE, replace(REMOTE, drafter_id="e"))
    rounds = two.plan().rounds
    two.say([0] * 4, complete=True)
    assert not two.policy.is_served(two.rows), "the other one still drafts"
    two.say([rounds] * 4, seat=1)
    assert two.policy.is_served(two.rows)


# Even a guess that is hardly ever right.
@pytest.mark.parametrize("prior", [0.02, 0.3, 0.9])
def test_verify_all_takes_all_that_is_there(prior: float) -> None:
    bench = Bench(REMOTE, prior=prior, cost=step_cost(0.01, 10.0), verify=VerifyPolicy.all, room=6)
    bench.plan()
    bench.say([0, 1, 5, 8])
    seats, lengths = bench.policy.choose(bench.rows)
    assert lengths.tolist() == [0, 1, 5, 6] and seats.tolist() == [-1, 0, 0, 0]
    bench = Bench(REMOTE, prior=prior, cost=step_cost(0.01, 10.0))
    bench.plan()
    bench.say([0, 1, 5, 8])
    assert not bench.policy.choose(bench.rows)[1].any(), "at this cost no draft token pays"


def test_a_coupled_step_that_verifies_all_waits_for_whole_windows() -> None:
    bench = Bench(INLINE, cost=step_cost(0.01, 10.0), coupled=True, verify=VerifyPolicy.all)
    bench.say([0, 3, 8, 2])
    say(bench.table, 0, 3, 1, 1, 1, complete=True)
    assert bench.plan().rounds == WINDOW
    assert bench.policy.wanted.tolist() == [8, 8, 0, 0] and bench.ordered == [8, 8, 0, 0]


@pytest.mark.parametrize("wait_s", [None, 0.0, 0.5])
def test_a_decoupled_step_that_verifies_all_waits_for_a_first_token_if_told_how_long(wait_s: float | None) -> None:
    bench = Bench(REMOTE, prior=0.0, cost=step_cost(0.01, 10.0), verify=VerifyPolicy.all, draft_wait_s=wait_s)
    bench.say([0, 3, 8, 1])
    assert bench.plan() == (Wait(1, 0.5) if wait_s else Wait(0, 0.0))
    assert bench.policy.wanted.tolist() == ([1, 1, 0, 1] if wait_s else [0] * 4)
    assert bench.policy.is_served(bench.rows) == (not wait_s)


@pytest.mark.parametrize("verify", list(VerifyPolicy))
@pytest.mark.parametrize("drafter", [REMOTE, INLINE], ids=["remote", "inline"])
def test_requests_without_room_get_nothing(drafter: Drafter, verify: VerifyPolicy) -> None:
    """Behind the last draft token comes one of the target's own."""
    bench = Bench(drafter, coupled=drafter.inline, verify=verify)
    bench.table.limit[bench.rows] = [1, 2, 3, 100]
    bench.plan()
    wanted = bench.policy.wanted.tolist()
    assert wanted[:2] == [0, 1] and wanted[2] <= 2 <= wanted[3]
    bench.say([4] * 4)
    assert bench.policy.choose(bench.rows)[1].tolist() == [0, 1, 2, 4]
    last = Bench(replace(drafter, token_s=0.0), coupled=drafter.inline, verify=verify, room=0)
    assert last.plan().rounds == 0


def test_drafters_of_this_thread_are_ordered_what_is_wanted_and_no_more() -> None:
    bench = Bench(INLINE, LOOKUP, coupled=True)
    bench.table.evidence[0, 0, bench.rows], bench.table.evidence[1, 0, bench.rows] = [200, 160, 60, 1], 200
    bench.table.evidence[3, 1, bench.rows] = 200  # lookups find nothing
    bench.plan()
    wanted = bench.policy.wanted.tolist()
    assert bench.ordered == wanted == sorted(wanted, reverse=True) and wanted[0] > wanted[2] and wanted[3] == 0
    assert bench.table.windows[1, bench.rows].tolist() == [WINDOW] * 4, "lookups cost nothing"
    bench.table.limit[bench.rows] = 1
    bench.plan()
    assert bench.ordered == [0] * 4
    bench.policy.set_windows(bench.rows)
    assert bench.ordered == [0] * 4, "they draft only while a step waits"
    bench.table.limit[bench.rows] = 100
    bench.plan()
    assert bench.ordered == wanted, "an order of nothing does not last"
    dear = Bench(replace(INLINE, token_s=1.0), coupled=True)
    dear.say([3] * 4)
    dear.plan()
    assert dear.ordered == [0] * 4, "what is there need not be ordered"


def test_drafters_that_run_at_once_run_as_far_as_they_may() -> None:
    bench = Bench(replace(REMOTE, window=5), LOOKUP, replace(REMOTE, drafter_id="e"))
    bench.table.windows[:] = 1
    bench.policy.set_windows(bench.rows)
    assert bench.table.windows[:3, bench.rows].tolist() == [[5] * 4, [WINDOW] * 4, [WINDOW] * 4]


def test_a_method_is_predicted_in_its_best_window_or_none() -> None:
    bench = Bench(replace(REMOTE, token_s=0.004))
    bench.plan()
    verify_s = [0.05 + 0.001 * 4 * (1 + window) for window in range(WINDOW + 1)]
    for p in (0.0, 0.3, 0.8, 1.0):
        tau_coupled, tau_decoupled = (tau[0] for tau in taus(geometric(np.array([p]), WINDOW)))
        coupled = [tau_coupled[w - 1] / (w * 0.004 + verify_s[w]) for w in range(1, WINDOW + 1)]
        decoupled = [tau_decoupled[w - 1] / max(w * 0.004, verify_s[w]) for w in range(1, WINDOW + 1)]
        expected = max(*coupled, *decoupled, 1 / verify_s[0])
        assert bench.policy.predict("eagle", np.array([p, 0.5]))[0] == pytest.approx(expected, rel=1e-3)


def test_nothing_is_chosen_but_what_is_there() -> None:
    """At random: tails of two drafters, unseated rows, closed seats, narrow rooms."""
    rng = random.Random(0)
    for _ in range(100):
        bench = Bench(REMOTE, replace(REMOTE, drafter_id="e", method="ngram"), rows=5, prior=rng.random())
        bench.table.limit[bench.rows] = [rng.randint(1, 12) for _ in range(5)]
        for seat, row in product(range(2), bench.rows.tolist()):
            say(bench.table, seat, row, *[1] * rng.randint(0, 8))
            if rng.random() < 0.3:
                bench.table.unseat_row(seat, row)
        bench.plan()
        seats, lengths = bench.policy.choose(bench.rows)
        for row, seat, length in zip(bench.rows.tolist(), seats.tolist(), lengths.tolist(), strict=True):
            assert length < bench.table.limit[row]
            assert length == 0 or (bench.table.assigned[seat, row] and length <= bench.table.length[seat, row])
