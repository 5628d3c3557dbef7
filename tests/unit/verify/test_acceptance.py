"""How good drafts are thought to be: drawn to what is known of many, and forgotten by evidence."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specactor_ray.table import _kernels
from specactor_ray.table.table import RequestTable
from specactor_ray.verify.acceptance import BUCKET_NAMES, PRIOR, PRIOR_TRIES, Acceptance, bucket_of
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
        table.lengths[row] -= 1
        table.base[0, row] = -1


def test_methods_are_numbered() -> None:
    acceptance = Acceptance()
    assert [acceptance.number(method) for method in ("ngram", "eagle", "ngram", "eagle")] == [0, 1, 0, 1]


def test_a_request_is_drawn_to_its_range_this_to_the_method_and_this_to_the_prior() -> None:
    table, acceptance, rows = one_seat(10, 10, 100, 5000)
    assert acceptance.probability(table, rows)[0] == pytest.approx([PRIOR] * 4)
    acceptance.overall[:2, 0], acceptance.evidence[:, 0, 0], acceptance.evidence[:, 0, 1] = (40, 80), (40, 50), (0, 30)
    table.evidence[:2, 0, rows[0]], table.evidence[:2, 0, rows[2]] = (40, 50), (0, 30)
    overall = drawn(40, 80, PRIOR)
    here, later, never = drawn(40, 50, overall), drawn(0, 30, overall), overall
    assert acceptance.of_method()[0, [0, 1, 7]] == pytest.approx([here, later, never])
    expected = [drawn(40, 50, here), here, drawn(0, 30, later), never]
    assert acceptance.probability(table, rows)[0] == pytest.approx(expected)
    assert acceptance.probability(table, rows)[1] == pytest.approx([PRIOR] * 4), "of another method"
    doubt = acceptance.doubt(table, rows)
    assert (doubt[0] < doubt[1]).all() and doubt[0, 0] < doubt[0, 1], "tries remove it"


def test_only_the_first_wrong_token_counts_as_a_miss() -> None:
    """Else the estimate would depend on the length of tails."""
    table, acceptance, rows = one_seat(0)
    rng = random.Random(0)
    found = []
    for _ in range(3000):
        say(table, 0, rows[0], *[1] * rng.randint(1, 8))
        right = next(n for n in range(99) if rng.random() >= 0.6)
        commit(table, acceptance, {rows[0]: [1] * min(right, 8) + [2]})
        table.lengths[rows[0]] = table.prompts[rows[0]]
        table.base[0] = -1
        found.append(acceptance.probability(table, rows)[0, 0])
    assert np.mean(found) == pytest.approx(0.6, abs=0.02)


def test_what_is_no_longer_true_is_forgotten_by_tries_and_what_is_not_tried_stays() -> None:
    """Also for a request that was not drafted for meanwhile, if it changes for the others."""
    table, acceptance, rows = one_seat(0, 0, 0)
    for row in rows:
        observe(table, acceptance, row, hits=60, misses=0)
    for _ in range(100):
        commit(table, acceptance, {row: [1] for row in rows})
        table.lengths[rows] = table.prompts[rows]
    assert (acceptance.probability(table, rows)[0] > 0.9).all(), "steps without drafts are no evidence"
    for _ in range(5):
        for row in rows[:2]:
            say(table, 0, row, 1)
        commit(table, acceptance, {row: [2] for row in rows})
        table.lengths[rows], table.base[0] = table.prompts[rows], -1
    assert (acceptance.probability(table, rows)[0] < 0.5).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
def test_chance_alone_is_no_change(rate: float) -> None:
    evidence, rng, changes = np.zeros(4), np.random.default_rng(3), 0
    for right in rng.random(4000) < rate:
        changes += _kernels._observe(evidence, int(right), 1, _kernels.METHOD_TRIES)
    assert changes <= 6
    tries = 0
    while abs(evidence[0] / evidence[1] - (1.0 - rate)) > 0.15 and rate != 0.5:
        _kernels._observe(evidence, int(rng.random() > rate), 1, _kernels.METHOD_TRIES)
        tries += 1
    assert tries <= 60, "a real one is noticed"


def test_names_of_ranges_are_those_that_are_counted() -> None:
    for number, name in enumerate(BUCKET_NAMES):
        first, _, last = name.rstrip("+").partition("-")
        assert bucket_of(np.array([int(first), int(last or 10**6)])).tolist() == [number, number]
