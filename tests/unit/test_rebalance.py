"""Levelling loads at the tail: moves pay, end, never go back, and spare verifiers are really spare."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.rollout.rebalance import (
    MAX_MOVES,
    Pace,
    RunningRequest,
    are_missed,
    expected_remaining,
    gain,
    plan_moves,
    spare_verifiers,
)

VERIFIERS = ("a", "b", "c", "d")


def running(
    request_id: str, owner: str, context: int = 100, remaining: float = 1000.0, **more: object
) -> RunningRequest:
    return replace(RunningRequest(request_id, owner, context, remaining), **more)


@st.composite
def any_requests(draw: st.DrawFn) -> list[RunningRequest]:
    requests = []
    for number in range(draw(st.integers(0, 14))):
        requests.append(
            RunningRequest(
                f"r{number}",
                draw(st.sampled_from(VERIFIERS)),
                draw(st.integers(0, 4000)),
                draw(st.floats(0, 4000)),
                draw(st.integers(0, MAX_MOVES + 1)),
            )
        )
    return requests


def carried_out(requests: list[RunningRequest], moves: list[object]) -> list[RunningRequest]:
    by_id = {request.request_id: request for request in requests}
    for move in moves:
        old = by_id[move.request_id]
        by_id[move.request_id] = replace(old, owner=move.target, moves=old.moves + 1)
    return list(by_id.values())


@given(any_requests())
def test_every_move_is_allowed_pays_and_narrows_the_gap(requests: list[RunningRequest]) -> None:
    by_id = {request.request_id: request for request in requests}
    loads = {name: sum(request.owner == name for request in requests) for name in VERIFIERS}
    moves = plan_moves(requests, VERIFIERS)
    assert len({move.request_id for move in moves}) == len(moves)
    for move in moves:
        request = by_id[move.request_id]
        assert request.owner == move.source and request.moves < MAX_MOVES
        assert loads[move.source] - loads[move.target] >= 2
        assert gain(request, loads[move.source], loads[move.target]) > 0
        loads[move.source] -= 1
        loads[move.target] += 1


@given(any_requests())
def test_nothing_moves_for_ever_and_nothing_straight_back(requests: list[RunningRequest]) -> None:
    came_from: dict[str, str] = {}
    for _ in range(MAX_MOVES * len(requests) + 1):
        moves = plan_moves(requests, VERIFIERS)
        if not moves:
            break
        assert all(came_from.get(move.request_id) != move.target for move in moves)
        came_from |= {move.request_id: move.source for move in moves}
        requests = carried_out(requests, moves)
    assert plan_moves(requests, VERIFIERS) == []


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_fresh_long_requests_are_levelled_completely(loads: list[int]) -> None:
    names = [f"v{number}" for number in range(len(loads))]
    requests = [running(f"{name}-{n}", name) for name, load in zip(names, loads, strict=True) for n in range(load)]
    after = carried_out(requests, plan_moves(requests, names))
    level = [sum(request.owner == name for request in after) for name in names]
    assert max(level) - min(level) <= 1


def test_the_one_that_gains_most_moves() -> None:
    requests = [running("short", "a", remaining=60.0), running("long", "a"), running("old", "a", context=900)]
    (move,) = plan_moves(requests, ("a", "b"))
    assert (move.request_id, move.source, move.target) == ("long", "a", "b")


@pytest.mark.parametrize(
    "change",
    [
        {"context": 5000},
        {"remaining": 10.0},
        {"moves": MAX_MOVES},
        {"owner": "gone"},
    ],
)
def test_what_does_not_pay_or_was_moved_enough_stays(change: dict[str, object]) -> None:
    requests = [replace(running(name, "a"), **change) for name in ("x", "y")]
    assert plan_moves([running(name, "a") for name in ("x", "y")], ("a", "b"))
    assert plan_moves(requests, ("a", "b")) == []


@pytest.mark.parametrize(
    ("committed", "limit", "ignore_eos", "expected"),
    [(0, 1000, False, 32), (200, 1000, False, 200), (900, 1000, False, 100), (10, 1000, True, 990), (7, 5, False, 0)],
)
def test_expected_remaining(committed: int, limit: int, ignore_eos: bool, expected: float) -> None:
    assert expected_remaining(committed, limit, ignore_eos) == expected


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 3), min_size=1))
def test_only_verifiers_that_levelling_would_not_use_are_spare(loads: dict[str, int]) -> None:
    spare, requests = spare_verifiers(loads), sum(loads.values())
    assert all(loads[name] == 0 for name in spare)
    serving = len(loads) - len(spare)
    assert serving >= min(requests, len(loads))
    assert not are_missed(serving, len(spare), requests)
    assert len(spare) == max(len(loads) - requests, 0)
    # Whoever serves dies: with requests left, those that rest are called.
    assert are_missed(0, len(spare), requests) == bool(spare and requests)


def test_pace() -> None:
    pace = Pace()
    assert pace.remaining_s({"x": 100.0}) is None and not pace.begun("x")
    pace.progress("x", 10, now=5.0)
    assert pace.begun("x") and pace.remaining_s({"x": 100.0}) is None
    pace.progress("x", 30, now=7.0)
    pace.progress("y", 0, now=5.0)
    pace.progress("y", 80, now=7.0)
    assert pace.remaining_s({"x": 100.0, "y": 100.0}) == pytest.approx(10.0)
    assert pace.remaining_s({"y": 100.0, "new": 120.0}) == pytest.approx(3.0)  # as slow as the slowest known
    pace.forget("x")
    assert pace.remaining_s({"x": 100.0}) is None
