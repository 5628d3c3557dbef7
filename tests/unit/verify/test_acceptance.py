"""How good drafts are thought to be: drawn to what is known of many, and forgotten by steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specactor_ray.verify.table import (
    BUCKET_NAMES,
    HALF_LIFE_STEPS,
    PRIOR,
    PRIOR_TRIES,
    Acceptance,
    RequestTable,
    bucket_of,
)
from tests.unit.verify.tables import commit, ints, request, say


def drawn(hits: float, tries: float, prior: float) -> float:
    return (hits + PRIOR_TRIES * prior) / (tries + PRIOR_TRIES)


def one_seat(*committed: int) -> tuple[RequestTable, Acceptance, np.ndarray]:
    """A drafter that drafts for requests with these numbers of output tokens."""
    table, acceptance = RequestTable(8), Acceptance()
    table.clear_seat(0, acceptance.number("eagle"))
    rows = [table.open(request(str(number), [1] * length)) for number, length in enumerate(committed)]
    for row in rows:
        table.assign(0, row)
    return table, acceptance, ints(rows)


def observe(table: RequestTable, acceptance: Acceptance, row: int, hits: int, misses: int) -> None:
    """Draft tokens one by one; the request stays where it is."""
    for right in [True] * hits + [False] * misses:
        say(table, 0, row, 1)
        commit(table, acceptance, {row: [1 if right else 2]})
        table.committed[row] -= 1
        table.base[0, row] = -1


def test_methods_are_numbered() -> None:
    acceptance = Acceptance()
    assert [acceptance.number(method) for method in ("ngram", "eagle", "ngram", "eagle")] == [0, 1, 0, 1]


def test_a_request_is_drawn_to_its_range_this_to_the_method_and_this_to_the_prior() -> None:
    table, acceptance, rows = one_seat(10, 10, 100, 5000)
    assert acceptance.probability(table, rows)[0] == pytest.approx([PRIOR] * 4)
    observe(table, acceptance, rows[0], hits=40, misses=10)
    observe(table, acceptance, rows[2], hits=0, misses=30)
    overall = drawn(40, 80, PRIOR)
    here, later, never = drawn(40, 50, overall), drawn(0, 30, overall), overall
    assert acceptance.of_method()[0, [0, 1, 7]] == pytest.approx([here, later, never])
    expected = [drawn(40, 50, here), here, drawn(0, 30, later), never]
    assert acceptance.probability(table, rows)[0] == pytest.approx(expected)
    assert acceptance.probability(table, rows)[1] == pytest.approx([PRIOR] * 4), "of another method"


def test_only_the_first_wrong_token_counts_as_a_miss() -> None:
    """Else the estimate would depend on the length of tails."""
    table, acceptance, rows = one_seat(0)
    rng = random.Random(0)
    for _ in range(3000):
        say(table, 0, rows[0], *[1] * rng.randint(1, 8))
        right = next(n for n in range(99) if rng.random() >= 0.6)
        commit(table, acceptance, {rows[0]: [1] * min(right, 8) + [2]})
        table.committed[rows[0]] = 0
        table.base[0] = -1
    assert acceptance.probability(table, rows)[0, 0] == pytest.approx(0.6, abs=0.02)


def test_an_observation_counts_half_after_its_half_life_whatever_happens_since() -> None:
    table, acceptance, rows = one_seat(0, 0)
    observe(table, acceptance, rows[0], hits=0, misses=64)
    low = acceptance.probability(table, rows)[0]
    for _ in range(int(HALF_LIFE_STEPS)):
        acceptance.fade(table)
    for evidence in (acceptance.evidence[1, 0, 0], table.evidence[1, 0, rows[0]]):
        assert evidence == pytest.approx(32.0)
    half = drawn(0, 32, drawn(0, 32, drawn(0, 32, PRIOR)))
    assert acceptance.probability(table, rows)[0, 0] == pytest.approx(half)
    for _ in range(20 * int(HALF_LIFE_STEPS)):
        acceptance.fade(table)
    forgotten = acceptance.probability(table, rows)[0]
    assert forgotten == pytest.approx([PRIOR] * 2, abs=1e-3) and (forgotten > low).all()


def test_names_of_ranges_are_those_that_are_counted() -> None:
    for number, name in enumerate(BUCKET_NAMES):
        first, _, last = name.rstrip("+").partition("-")
        assert bucket_of(np.array([int(first), int(last or 10**6)])).tolist() == [number, number]
