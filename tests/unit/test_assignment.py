"""Which drafters draft for which request: room is never exceeded, and drafters are told exactly what changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.loops.assignment import AssignmentChange, DrafterAssignment, DraftSeat, Wish
from specactor_ray.speculation.race import Straggler

METHODS = ("ngram", "draft_model", "eagle")
DRAFTERS = {"n0": "ngram", "n1": "ngram", "n2": "ngram", "s0": "draft_model", "s1": "draft_model", "e0": "eagle"}
REQUESTS = [f"r{number}" for number in range(9)]
MAX_BATCH = {"n0": 2, "n1": 2, "n2": 1, "s0": 3, "s1": 1, "e0": 2}

preferences = st.permutations(METHODS).flatmap(lambda order: st.integers(1, 3).map(lambda n: tuple(order[:n])))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(REQUESTS)),
        st.tuples(st.just("remove"), st.sampled_from(REQUESTS)),
        st.tuples(st.just("set"), st.dictionaries(st.sampled_from(sorted(DRAFTERS)), st.booleans())),
        st.tuples(
            st.just("revise"),
            st.tuples(st.dictionaries(st.sampled_from(REQUESTS), preferences), st.sets(st.sampled_from(REQUESTS))),
        ),
    ),
    max_size=30,
)


class Mirrors:
    """What drafters would have open, by what they are told."""

    def __init__(self) -> None:
        self.open: set[tuple[str, str]] = set()

    def take(self, change: AssignmentChange) -> None:
        for pair in change.closed:
            assert pair in self.open, "closed what was not open"
            self.open.discard(pair)
        for pair in change.opened:
            assert pair not in self.open, "opened twice"
            self.open.add(pair)


@given(ACTIONS, st.permutations(METHODS))
def test_whatever_happens_room_is_kept_and_no_base_is_lost(actions: list[tuple[str, Any]], ranking: list[str]) -> None:
    assignment, mirrors, requests = DrafterAssignment(), Mirrors(), set()
    for action, what in actions:
        bases = {request: assignment.of(request)[:1] for request in requests}
        if action == "set":
            seats = {name: DraftSeat(DRAFTERS[name], MAX_BATCH[name], usable) for name, usable in what.items()}
            mirrors.open = {pair for pair in mirrors.open if pair[0] in seats}  # what left has forgotten all
            assignment.set_seats(seats)
        elif action == "add":
            requests.add(what)
            assignment.add(what)
        elif action == "remove":
            requests.discard(what)
            mirrors.take(assignment.remove(what))
        else:
            preferred, racing = what
            wishes = [Wish(request, methods) for request, methods in preferred.items() if request in requests]
            racers = [Straggler(request, 0.5) for request in sorted(racing & requests)]
            mirrors.take(assignment.revise(wishes, racers, ranking, level=len(racing) % 2 == 0))
            for request, base in bases.items():
                assert assignment.of(request) or not base, "a race took the base drafter of a request"
                if request not in racing:
                    assert len(assignment.of(request)) <= 1, "it races no more"
        assert mirrors.open == {(d, r) for r in requests for d in assignment.of(r)}
        loads = Counter(drafter for drafter, _ in mirrors.open)
        assert all(loads[name] <= seat.max_batch for name, seat in assignment.seats.items())
        for request in requests:
            methods = [assignment.seats[drafter].method for drafter in assignment.of(request)]
            assert len(methods) == len(set(methods)), "a method twice for one request"


def made(requests: int, **seats: DraftSeat) -> DrafterAssignment:
    assignment = DrafterAssignment()
    assignment.set_seats(seats)
    for number in range(requests):
        assignment.add(f"r{number}")
    return assignment


def wishes(requests: int, *methods: str) -> list[Wish]:
    return [Wish(f"r{number}", methods) for number in range(requests)]


def loads(assignment: DrafterAssignment) -> dict[str, int]:
    taken = Counter(drafter for number in range(10) for drafter in assignment.of(f"r{number}"))
    return {drafter: taken[drafter] for drafter in assignment.seats}


def test_the_best_method_with_room_is_taken_and_its_drafters_share_the_load() -> None:
    assignment = made(8, e0=DraftSeat("eagle", 3), e1=DraftSeat("eagle", 3), n0=DraftSeat("ngram", 1))
    change = assignment.revise(wishes(8, "eagle", "ngram"))
    assert loads(assignment) == {"e0": 3, "e1": 3, "n0": 1}
    assert len(change.opened) == 7 and assignment.of("r7") == []
    assignment.remove("r0")
    assert assignment.revise(wishes(0)).opened == []
    assert assignment.revise([Wish("r7", ("eagle", "ngram"))]).opened == [("e0", "r7")]


def test_nothing_changes_when_nothing_has_to() -> None:
    assignment = made(6, e0=DraftSeat("eagle", 3), e1=DraftSeat("eagle", 3), n0=DraftSeat("ngram", 9))
    racers = [Straggler(f"r{number}", 0.1 * number) for number in range(6)]
    assignment.revise(wishes(6, "eagle"), racers, METHODS)
    for level in (False, True):
        assert assignment.revise(wishes(6, "eagle", "ngram"), racers, METHODS, level) == AssignmentChange()


def test_newcomers_take_their_share() -> None:
    assignment = made(6, n0=DraftSeat("ngram", 9))
    assignment.revise(wishes(6, "ngram"))
    assignment.set_seats({name: DraftSeat("ngram", 9) for name in ("n0", "n1", "n2")})
    change = assignment.revise(wishes(6, "ngram"), level=True)
    assert loads(assignment) == {"n0": 2, "n1": 2, "n2": 2}
    assert len(change.closed) == len(change.opened) == 4


def test_racers_give_way_to_base_drafters() -> None:
    assignment = made(3, e0=DraftSeat("eagle", 2), n0=DraftSeat("ngram", 9))
    assignment.revise(
        [Wish("r0", ("ngram",)), Wish("r1", ("ngram",))], [Straggler("r0", 0.2), Straggler("r1", 0.1)], METHODS
    )
    assert loads(assignment) == {"e0": 2, "n0": 2}
    change = assignment.revise([Wish("r2", ("eagle",))], [Straggler("r0", 0.2), Straggler("r1", 0.1)], METHODS)
    assert assignment.of("r2") == ["e0"]
    assert change.closed == [("e0", "r0")], "the faster of the two gives way"


def test_a_racer_that_becomes_the_base_is_not_opened_again() -> None:
    assignment = made(1, e0=DraftSeat("eagle", 2), e1=DraftSeat("eagle", 2), n0=DraftSeat("ngram", 2))
    racers = [Straggler("r0", 0.5)]
    assignment.revise([Wish("r0", ("ngram",))], racers, METHODS)
    racing = assignment.of("r0")
    assert assignment.revise([Wish("r0", ("eagle",))], racers, METHODS) == AssignmentChange()
    assert assignment.of("r0") == racing[::-1] and assignment.base_method("r0") == "eagle"
    assert assignment.revise([], [], METHODS).closed == [("n0", "r0")]


def test_requests_leave_a_drafter_that_is_off_if_there_is_another() -> None:
    assignment = made(2, n0=DraftSeat("ngram", 9))
    assignment.revise(wishes(2, "ngram"))
    assignment.set_seats({"n0": DraftSeat("ngram", 9, usable=False)})
    assert assignment.revise(wishes(2)) == AssignmentChange(), "it may come back"
    assignment.set_seats({"n0": DraftSeat("ngram", 9, usable=False), "n1": DraftSeat("ngram", 1)})
    assignment.revise(wishes(2, "ngram"))
    assert loads(assignment) == {"n0": 1, "n1": 1}


def test_unknown_requests_have_no_drafters() -> None:
    assignment = made(0, n0=DraftSeat("ngram", 9))
    assert assignment.of("nobody") == [] and assignment.base_method("nobody") is None
    assert assignment.remove("nobody").closed == []
