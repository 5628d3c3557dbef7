"""Levelling loads at the tail: moves pay, end and never go back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.backlog import MAX_MOVES, Move, expected_remaining, gain, plan_moves
from specactor_ray.rollout.journal import JournalEntry

VERIFIERS = ("a", "b", "c", "d")
Placed = dict[str, list[JournalEntry]]
"""Verifier → the requests it has."""


def running(request_id: str, context: int = 100, remaining: int = 1000, moves: int = 0) -> JournalEntry:
    sampling = SamplingParams(max_tokens=remaining, ignore_eos=True)
    return JournalEntry(request_id, (0,) * context, sampling, moves=moves, has_begun=True)


@st.composite
def any_requests(draw: st.DrawFn) -> Placed:
    placed: Placed = {name: [] for name in VERIFIERS}
    for number in range(draw(st.integers(0, 14))):
        context, remaining = draw(st.integers(0, 4000)), draw(st.integers(1, 4000))
        request = running(f"r{number}", context, remaining, draw(st.integers(0, MAX_MOVES + 1)))
        placed[draw(st.sampled_from(VERIFIERS))].append(request)
    return placed


def plan(placed: Placed) -> list[Move]:
    return plan_moves({name: len(requests) for name, requests in placed.items()}, placed.__getitem__)


def carry_out(placed: Placed, moves: list[Move]) -> None:
    for move in moves:
        (request,) = [one for one in placed[move.source] if one.request_id == move.request_id]
        placed[move.source].remove(request)
        placed[move.target].append(replace(request, moves=request.moves + 1))


def plan_by_trying_all(placed: Placed) -> list[Move]:
    """One move after the other, each the best of the first pair of verifiers, by difference of loads, that has any."""
    placed, moves = {name: list(requests) for name, requests in placed.items()}, []
    while True:
        for source, target in product(
            sorted(placed, key=lambda name: (-len(placed[name]), name)),
            sorted(placed, key=lambda name: len(placed[name])),
        ):
            loads = len(placed[source]), len(placed[target])
            able = [one for one in placed[source] if one.moves < MAX_MOVES and gain(one, *loads) > 0]
            if loads[0] - loads[1] >= 2 and able:
                break
        else:
            return moves
        best = max(able, key=lambda one: gain(one, *loads))
        placed[source].remove(best)
        placed[target].append(replace(best, moves=MAX_MOVES))
        moves.append(Move(best.request_id, source, target))


@given(any_requests())
def test_the_plan_is_that_of_trying_all_pairs(placed: Placed) -> None:
    assert plan(placed) == plan_by_trying_all(placed)


@given(any_requests())
def test_every_move_is_allowed_pays_and_narrows_the_gap(placed: Placed) -> None:
    loads = {name: len(requests) for name, requests in placed.items()}
    moves = plan(placed)
    assert len({move.request_id for move in moves}) == len(moves)
    for move in moves:
        (request,) = [one for one in placed[move.source] if one.request_id == move.request_id]
        assert request.moves < MAX_MOVES
        assert loads[move.source] - loads[move.target] >= 2
        assert gain(request, loads[move.source], loads[move.target]) > 0
        loads[move.source] -= 1
        loads[move.target] += 1


@given(any_requests())
def test_nothing_moves_for_ever_and_nothing_straight_back(placed: Placed) -> None:
    came_from: dict[str, str] = {}
    for _ in range(MAX_MOVES * sum(map(len, placed.values())) + 1):
        moves = plan(placed)
        if not moves:
            break
        assert all(came_from.get(move.request_id) != move.target for move in moves)
        came_from |= {move.request_id: move.source for move in moves}
        carry_out(placed, moves)
    assert plan(placed) == []


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_fresh_long_requests_are_levelled_completely(loads: list[int]) -> None:
    placed = {f"v{n}": [running(f"{n}-{index}") for index in range(load)] for n, load in enumerate(loads)}
    carry_out(placed, plan(placed))
    level = [len(requests) for requests in placed.values()]
    assert max(level) - min(level) <= 1


def test_the_one_that_gains_most_moves() -> None:
    requests = [running("short", remaining=60), running("long"), running("old", context=900)]
    assert plan({"a": requests, "b": []}) == [Move("long", "a", "b")]


@pytest.mark.parametrize("change", [{"context": 5000}, {"remaining": 10}, {"moves": MAX_MOVES}])
def test_what_does_not_pay_or_was_moved_enough_stays(change: dict[str, int]) -> None:
    assert plan({"a": [running("x"), running("y")], "b": []})
    assert plan({"a": [running("x", **change), running("y", **change)], "b": []}) == []


def test_without_verifiers_nothing_moves() -> None:
    assert plan({}) == []


@pytest.mark.parametrize(
    ("committed", "limit", "ignore_eos", "expected"),
    [(0, 1000, False, 32), (200, 1000, False, 200), (900, 1000, False, 100), (10, 1000, True, 990), (7, 5, False, 0)],
)
def test_expected_remaining(committed: int, limit: int, ignore_eos: bool, expected: float) -> None:
    assert expected_remaining(committed, limit, ignore_eos) == expected


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 6), min_size=1))
def test_only_verifiers_that_are_too_full_are_asked_for_their_requests(loads: dict[str, int]) -> None:
    asked: list[str] = []

    def running_at(verifier: str) -> list[JournalEntry]:
        asked.append(verifier)
        return [running(f"{verifier}{n}", 5000, 1) for n in range(loads[verifier])]  # no move pays

    assert plan_moves(loads, running_at) == []
    assert sorted(asked) == sorted(name for name, load in loads.items() if load - min(loads.values()) >= 2)
