"""Who drafts for what: Algorithm 3 against its text; the ladder, the race and their bounds under churn."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import RaceName, SpeculationConfig
from specactor_ray.core.step_cost import StepCost
from specactor_ray.table.table import RequestTable
from specactor_ray.verify import racing
from specactor_ray.verify.acceptance import Acceptance
from specactor_ray.verify.policy import Drafter, DraftPolicy
from specactor_ray.verify.racing import REVISE_EVERY, Assigner, Places
from tests.unit.verify.tables import ints, request

METHODS = ("ngram", "draft_model", "eagle", "suffix")
WORKERS = st.dictionaries(
    st.integers(0, 7),
    st.builds(
        Drafter,
        st.just(""),
        st.builds(DrafterSpec, method=st.sampled_from(METHODS), max_batch=st.integers(1, 4)),
    ),
)
LOADS = st.lists(st.integers(0, 4), min_size=8, max_size=8)
STRAGGLERS = st.lists(st.integers(0, 5), unique=True)
SERVED = st.dictionaries(st.integers(0, 5), st.sets(st.sampled_from(METHODS)))
RANKING = st.permutations(METHODS).flatmap(lambda order: st.integers(0, 4).map(lambda n: order[:n]))


def as_written(stragglers, ranking, workers, loads, serving):  # type: ignore[no-untyped-def]
    """The text of the algorithm, step by step, on sets of (request, method) and lists of each worker's requests."""
    batches = {number: [None] * loads[number] for number in workers}
    pairs = {(straggler, method) for straggler, methods in serving.items() for method in methods}
    result = []
    for straggler in stragglers:
        for method in ranking:
            if (straggler, method) in pairs:
                continue
            chosen = None
            for number in sorted(workers):
                has_room = len(batches[number]) < workers[number].spec.max_batch
                right_method = workers[number].spec.method == method
                if has_room and right_method and (chosen is None or len(batches[number]) < len(batches[chosen])):
                    chosen = number
            if chosen is not None:
                batches[chosen].append(straggler)
                result.append((chosen, straggler))
    return result


def race(stragglers, ranking, workers, loads, serving):  # type: ignore[no-untyped-def]
    """What the product's own adds, as (worker, request)."""
    table = RequestTable(8)
    table.fit_seats(8)
    places = Places(DraftPolicy(SpeculationConfig(), table, Acceptance(), StepCost(), workers), level=False)
    places.loads = list(loads)
    for row, methods in serving.items():
        for method in methods:
            places.served[method][row] = True
    places.assign_race(stragglers, ranking)
    return list(map(tuple, np.argwhere(places.wanted).tolist()))


@given(STRAGGLERS, RANKING, WORKERS, LOADS, SERVED)
def test_it_is_the_written_algorithm(stragglers, ranking, workers, loads, serving):  # type: ignore[no-untyped-def]
    arguments = stragglers, ranking, workers, loads, serving
    assert race(*arguments) == sorted(as_written(*arguments))


# ---- the assigner ----


@pytest.fixture(autouse=True, scope="module")
def no_one_beside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "WATCHED", 0)
        yield


def drafter(method: str, max_batch: int = 64, number: int = 0, **more: Any) -> Drafter:
    return Drafter(f"{method}-{number}", DrafterSpec(method, max_batch=max_batch, traits=traits(method)), **more)


class Bench:
    """An assigner and its requests, whose acceptance is set by hand."""

    def __init__(self, *drafters: Drafter, requests: int = 0, coupled: bool = False, **speculation: Any) -> None:
        self.table, self.acceptance, cost = RequestTable(8), Acceptance(), StepCost()
        for count in (1, 2, 4, 8, 16, 32, 64):
            cost.record(count, 0.05 + 0.0001 * count)
        config = SpeculationConfig(**{"race": RaceName.off, **speculation})
        self.drafters: dict[int, Drafter] = {}
        self.policy = DraftPolicy(config, self.table, self.acceptance, cost, self.drafters)
        self.assigner = Assigner(config, self.policy, coupled, 16)
        self.open: set[tuple[int, int]] = set()
        """(seat, row), by what drafters were told."""
        self.rows: list[int] = []
        for number in range(requests):
            self.add(str(number))
        self.join(*drafters)

    def add(self, name: str = "", committed: int = 0) -> int:
        self.rows.append(self.table.open(request(name, [1] * committed)))
        return self.rows[-1]

    def remove(self, row: int) -> None:
        self.open = {pair for pair in self.open if pair[1] != row}
        self.table.close(row)
        self.rows.remove(row)

    def join(self, *drafters: Drafter) -> None:
        for one in map(replace, drafters):
            seat = next(seat for seat in range(len(self.drafters) + 1) if seat not in self.drafters)
            self.drafters[seat] = one
            self.table.fit_seats(seat + 1)
            self.table.clear_seat(seat, self.acceptance.number(one.spec.method))
        self.told(self.assigner.revise(level=True))

    def leave(self, seat: int) -> None:
        del self.drafters[seat]
        self.table.clear_seat(seat, 0)
        self.open = {pair for pair in self.open if pair[0] != seat}
        self.told(self.assigner.revise(level=True))

    def told(self, released: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
        """Seat, row, and whether the drafter is opened for it, of all that changed."""
        before, self.open = self.open, set(map(tuple, np.argwhere(self.table.assigned).tolist()))
        assert sorted(released) == sorted(before - self.open), "each that is closed once, and nobody else"
        return [(*pair, pair in self.open) for pair in sorted(before ^ self.open)]

    def step(self, times: int = 1, rows: Sequence[int] | None = None) -> list[tuple[int, int, bool]]:
        decoding = ints(self.rows if rows is None else rows)
        changes = []
        for _ in range(times):
            if (released := self.assigner.step(decoding)) is not None:
                changes += self.told(released)
        return changes

    def good(self, method: str, p: float, rows: Sequence[int] | None = None) -> None:
        """The method is right so often, everywhere or for these requests."""
        number = self.acceptance.number(method)
        if rows is None:
            self.acceptance.evidence[1, number], self.acceptance.evidence[0, number] = 1e4, 1e4 * p
        else:
            self.table.evidence[1, number, rows], self.table.evidence[0, number, rows] = 1e4, 1e4 * p

    def seats(self, row: int) -> list[int]:
        return sorted(seat for seat, one in self.open if one == row)

    def is_served(self, row: int) -> bool:
        """The request has a base drafter that can be reached."""
        mine = [self.drafters[seat] for seat in self.seats(row)]
        return any(one.able and not one.spec.traits.looks_up for one in mine)

    def is_level(self) -> bool:
        """Drafters of one method have as many requests each, as far as there is room."""
        able = [(one, self.loads[seat]) for seat, one in self.drafters.items() if one.able]
        return not any(
            one.spec.method == peer.spec.method and load + 1 < most and load < one.spec.max_batch
            for one, load in able
            for peer, most in able
        )

    @property
    def loads(self) -> list[int]:
        counts = Counter(seat for seat, _ in self.open)
        return [counts[seat] for seat in range(max(self.drafters, default=-1) + 1)]


def test_requests_have_no_drafters_before_their_turn() -> None:
    bench = Bench(drafter("eagle"), requests=3)
    assert bench.loads == [0]
    bench.step(rows=bench.rows[:2])
    assert bench.loads == [2]
    bench.step()
    assert bench.loads == [3] and bench.step(3 * REVISE_EVERY) == [], "nothing changes when nothing has to"


def test_the_best_method_with_room_is_taken_and_its_drafters_share_the_load() -> None:
    bench = Bench(*(drafter("eagle", 3, n) for n in range(2)), drafter("draft_model", 1), requests=8)
    bench.good("eagle", 0.9)
    bench.good("draft_model", 0.5)
    assert len(bench.step()) == 7 and bench.loads == [3, 3, 1], "one goes without"
    waiting = next(row for row in bench.rows if not bench.seats(row))
    bench.remove(next(row for row in bench.rows if bench.seats(row) == [1]))
    bench.step(REVISE_EVERY)
    assert bench.seats(waiting) and bench.loads == [3, 3, 1], "a place that fell free is given away"


def test_the_ladder_ranks_by_promised_speed_at_each_place() -> None:
    bench = Bench(drafter("draft_model", token_s=0.001), drafter("eagle", token_s=0.001), drafter("ngram"))
    early, late = 0, 5
    for method, at, p in (("eagle", early, 0.9), ("draft_model", early, 0.6), ("ngram", early, 0.2)):
        bench.acceptance.evidence[1, bench.acceptance.number(method), at] = 1e5
        bench.acceptance.evidence[0, bench.acceptance.number(method), at] = 1e5 * p
    for method, p in (("eagle", 0.2), ("draft_model", 0.6), ("ngram", 0.95)):
        bench.acceptance.evidence[1, bench.acceptance.number(method), late] = 1e5
        bench.acceptance.evidence[0, bench.acceptance.number(method), late] = 1e5 * p
    rows = [bench.add("early"), bench.add("late", 1500)]
    bench.step()
    assert [bench.seats(row) for row in rows] == [[1, 2], [0, 2]], "lookups beside each, and never the base"
    bench.drafters[1].token_s = 1.0
    new = bench.add("new")
    bench.step()
    assert bench.seats(new) == [0, 2], "dear drafts are slow"


def test_coupled_models_are_bases() -> None:
    bench = Bench(drafter("draft_model", hosted=True), drafter("eagle", 5, hosted=True), requests=6, coupled=True)
    bench.good("eagle", 0.9)
    bench.good("draft_model", 0.5)
    bench.step()
    assert bench.loads == [1, 5]


def test_requests_change_to_a_method_that_promises_more() -> None:
    bench = Bench(drafter("draft_model"), drafter("eagle"), requests=16)
    bench.good("draft_model", 0.8)
    bench.good("eagle", 0.3)
    bench.step()
    assert bench.loads == [16, 0]
    bench.good("draft_model", 0.3, bench.rows[8:])
    bench.good("eagle", 0.9, bench.rows[8:])
    bench.good("eagle", 0.804, bench.rows[:8])
    bench.step(REVISE_EVERY)
    assert bench.loads == [8, 8], "a little more is no reason"
    assert all(bench.seats(row) == [1] for row in bench.rows[8:])
    bench.good("eagle", 0.01, bench.rows)
    bench.drafters[0].spec.max_batch = 10
    bench.step(4 * REVISE_EVERY)
    assert bench.loads == [10, 6], "no further than there is room"


def test_models_with_few_requests_draft_beside_others_and_are_chosen_once_they_are_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(racing, "WATCHED", 4)
    bench = Bench(drafter("draft_model"), drafter("eagle", 3), requests=16)
    bench.good("draft_model", 0.6)
    bench.step()
    assert bench.loads == [16, 3] and bench.drafters[1].watches and not bench.drafters[0].watches
    bench.step(3 * REVISE_EVERY)
    assert bench.loads == [16, 3], "one that is not known is not chosen, and the same requests are kept"
    bench.good("draft_model", 0.1)  # below what an unknown method promises
    bench.step(REVISE_EVERY)
    new = [bench.add(f"new {number}") for number in range(4)]
    bench.step(REVISE_EVERY)
    assert bench.loads == [20, 3] and all(bench.seats(row) == [0] for row in new), "that never had a draft"
    for row in new:
        bench.remove(row)
    bench.good("draft_model", 0.6)
    bench.drafters[1].spec.max_batch = 64
    bench.good("eagle", 0.9)
    bench.drafters[1].read_s = 1.0
    bench.step(REVISE_EVERY)
    assert bench.loads == [16, 4], "it would take too long to read them"
    bench.drafters[1].read_s = 1e-6
    bench.step(REVISE_EVERY)
    assert bench.loads == [4, 16] and bench.drafters[0].watches


def test_models_that_take_turns_are_compared_over_all_requests() -> None:
    """Each with work delays all of them."""
    models = (drafter("draft_model", hosted=True), drafter("eagle", hosted=True))
    bench = Bench(*models, requests=8, coupled=True)
    bench.good("draft_model", 0.6)
    bench.step()
    bench.good("eagle", 0.7, bench.rows[:3])
    bench.good("eagle", 0.1, bench.rows[3:])
    bench.step(REVISE_EVERY)
    assert bench.loads == [8, 0]
    bench.good("eagle", 0.9)
    bench.good("eagle", 0.9, bench.rows)
    bench.step(REVISE_EVERY)
    assert bench.loads == [0, 8]


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("race", list(RaceName))
def test_when_methods_race(race: RaceName, coupled: bool) -> None:
    bench = Bench(drafter("eagle"), drafter("draft_model"), drafter("ngram"), requests=6, race=race, coupled=coupled)
    always, tail = race is RaceName.always, race is RaceName.tail and not coupled

    def racing() -> bool:
        bench.step()
        both = [len(set(bench.seats(row)) - {2}) for row in bench.rows if bench.seats(row)]
        assert all(2 in bench.seats(row) for row in bench.rows if bench.seats(row)), "lookups stay"
        assert set(both) in ({1}, {2})
        return both[0] == 2

    assert racing() == always, "more than a quarter of the batch"
    bench.remove(bench.rows[0])
    bench.remove(bench.rows[0])
    bench.step(rows=bench.rows[1:])
    assert always or all(len(bench.seats(row)) == 2 for row in bench.rows), "one of them waits"
    assert racing() == (always or tail)
    before = bench.open.copy()
    bench.step(rows=bench.rows[1:])
    assert bench.open == before, "one that reads its prompt again ends no race"
    bench.add("new")
    bench.step(REVISE_EVERY if always else 1)
    assert racing() == always


def test_the_slowest_race_first() -> None:
    bench = Bench(drafter("eagle"), drafter("draft_model", 2), requests=4, race=RaceName.always)
    bench.good("draft_model", 0.1)
    bench.good("eagle", 0.5)
    for row, p in zip(bench.rows, (0.9, 0.3, 0.8, 0.2), strict=True):
        bench.good("eagle", p, [row])
    bench.step()
    assert [len(bench.seats(row)) for row in bench.rows] == [1, 2, 1, 2]


def test_of_several_drafters_the_racer_becomes_the_base() -> None:
    bench = Bench(drafter("eagle"), drafter("draft_model"), drafter("draft_model"), requests=2, race=RaceName.always)
    fast, slow = bench.rows
    bench.good("draft_model", 0.1)
    bench.good("eagle", 0.5)
    bench.good("eagle", 0.9, [fast])
    bench.good("eagle", 0.3, [slow])
    bench.step()
    assert (bench.seats(fast), bench.seats(slow)) == ([0, 2], [0, 1])
    bench.drafters[0].able = False
    assert bench.step(REVISE_EVERY) == [(0, fast, False), (0, slow, False)], "nobody has to read a request"


@pytest.mark.parametrize("race", list(RaceName))
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_room_is_kept_and_nobody_waits_beside_a_free_place(
    seed: int, race: RaceName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "WATCHED", seed % 3)
    rng = random.Random(seed)
    bench = Bench(race=race)
    joined = 0
    for _ in range(250):
        served = set(filter(bench.is_served, bench.rows))
        match rng.choice(["add", "add", "remove", "join", "leave", "lose", "learn", "step", "step", "step", "step"]):
            case "add" if len(bench.rows) < 12:
                bench.add(committed=rng.choice([0, 70, 3000]))
            case "remove" if bench.rows:
                bench.remove(rng.choice(bench.rows))
            case "join" if len(bench.drafters) < 5:
                joined += 1
                bench.join(drafter(rng.choice(METHODS), rng.randint(1, 5), joined))
                assert race is not RaceName.off or bench.is_level(), "drafters of a method share the load"
            case "leave" if bench.drafters and rng.random() < 0.5:
                seat = rng.choice(list(bench.drafters))
                bench.drafters[seat].able = False
                served = set(filter(bench.is_served, bench.rows))
                bench.leave(seat)
            case "lose" if bench.drafters:
                rng.choice(list(bench.drafters.values())).able = False
                served.clear()
            case "learn" if bench.rows and bench.acceptance.methods:
                bench.good(rng.choice(bench.acceptance.methods), rng.random(), rng.choice([None, bench.rows[:3]]))
            case "step":
                decoding = rng.sample(bench.rows, rng.randint(0, len(bench.rows)))
                bench.step(rng.choice([1, REVISE_EVERY]), decoding)
        assert all(map(bench.is_served, served & set(bench.rows))), "a base drafter was taken away"
        of_row: dict[int, list[Drafter]] = defaultdict(list)
        for seat, row in bench.open:
            of_row[row].append(bench.drafters[seat])
        for seat, one in bench.drafters.items():
            assert bench.loads[seat] <= one.spec.max_batch
        for row in bench.rows:
            methods = [one.spec.method for one in of_row[row] if one.able]
            assert len(methods) == len(set(methods)), "a method twice for one request"

    bench.step(2 * REVISE_EVERY)
    able = [(seat, one) for seat, one in bench.drafters.items() if one.able]
    free = {one.spec.method for seat, one in able if bench.loads[seat] < one.spec.max_batch}
    models = dict[int, int]()
    for row in bench.rows:
        here = [one for seat, one in able if (seat, row) in bench.open]
        assert free & {"ngram", "suffix"} <= {one.spec.method for one in here}
        assert not free & {"eagle", "draft_model"} or not all(one.spec.traits.looks_up for one in here)
        models[row] = sum(not one.spec.traits.looks_up for one in here)
    assert race is not RaceName.off or sum(count > 1 for count in models.values()) <= seed % 3
