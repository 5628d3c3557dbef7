"""How many rows a drafter with branches may feed: by brute force, and as its loop learns and keeps to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.draft.budget import FORWARDS, reach, row_budget
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import NO_LIMIT, Reach
from specactor_ray.spec.cost import StepCost
from tests.batches import news, opening
from tests.clocks import HandClock
from tests.unit.test_draft_cost import loop_of, tiny_model

FORWARD_S = st.tuples(st.integers(1, 300), st.floats(1e-4, 1.0))


@given(st.lists(FORWARD_S, min_size=1, max_size=40), st.floats(1e-4, 8.0), st.integers(1, 400))
def test_the_most_rows_of_which_the_forwards_fit(forwards: list[tuple[int, float]], step_s: float, most: int) -> None:
    cost = StepCost()
    for rows, seconds in forwards:
        cost.record(rows, seconds)
    budget, curve = row_budget(cost, step_s, most), cost.curve(0, most)
    allowed_s = max(step_s / FORWARDS, 1.1 * cost.curve(1, 0)[0])
    assert 0 <= budget <= most and curve[budget] <= allowed_s * (1 + 1e-9)
    assert budget == most or curve[budget + 1] >= allowed_s * (1 - 1e-9)


def test_what_is_unknown_allows_no_branches_and_larger_forwards_are_tried() -> None:
    cost = StepCost()
    assert row_budget(cost, 1.0, 100) == 0
    cost.record(4, 0.01)
    assert row_budget(cost, 0.0, 100) == 0 and row_budget(cost, 0.1, 100) == 100
    cost.record(100, 0.05)
    assert row_budget(cost, 0.1501, 100) == 40
    assert row_budget(cost, 0.015, 100) == 1
    cost.record(1, 0.01)
    assert row_budget(cost, 0.015, 100) == 6, "as fast as over one row"


def test_windows_are_long_while_a_forward_has_room_for_four_chains_of_each_request() -> None:
    few, many = NO_LIMIT, Reach(3, 1)
    assert reach(16, 4, many) == few and reach(15, 4, many) == reach(0, 4, many) == many
    clock = HandClock()

    class Timed(DraftModelProposer):
        def extend(self) -> np.ndarray:
            changed = super().extend()
            clock.seconds += 1e-3 * self.rows_drafted
            return changed

    for of_many, lengths in ((many, (6, 3)), (few, (6, 6))):
        loop, _ = loop_of(Timed(tiny_model(), branches=8), clock=clock, of_many=of_many)
        for count, length in zip((1, 8), lengths, strict=True):  # in 24 ms fit six forwards of four rows
            loop.deliver(replace(news([opening(row, window=6) for row in range(count)]), step_s=0.024))
            while loop.run_once():
                pass
            assert loop.proposer.tails(np.arange(count, dtype=np.int32)).lengths.tolist() == [length] * count


def test_a_loop_learns_what_forwards_cost_and_comes_to_rest() -> None:
    """A millisecond a row: of 60 ms ten rows are six forwards."""
    rows, budgets, clock = list[int](), list[int](), HandClock()

    class Timed(DraftModelProposer):
        def extend(self) -> np.ndarray:
            changed = super().extend()
            clock.seconds += 1e-3 * (self.rows_drafted or 50)
            rows.append(self.rows_drafted)
            budgets.append(self.budget)
            return changed

    loop, told = loop_of(Timed(tiny_model(), branches=8), clock=clock)
    loop.deliver(news([opening(row, window=6) for row in range(2)]))
    while loop.run_once():
        pass
    assert set(budgets) == {0} and max(rows) == 2
    assert not any(len(batch.branches.tails) for batch in told), "the verifier's pace is unknown"
    for start in range(20):
        bases, lengths, tokens, _ = loop.proposer.tails(np.arange(2, dtype=np.int32))
        assert bases.tolist() == [start, start] and lengths.tolist() == [6, 6]
        wrong = ((tokens[[0, 6]] + 1) % 500).tolist()
        loop.deliver(replace(news(commits=[(row, start, wrong[row : row + 1]) for row in range(2)]), step_s=0.0606))
        end = len(rows) + 100
        while loop.run_once():
            assert len(rows) < end, "it never comes to rest"
        assert not loop.run_once()
    assert max(rows) > 10 and Counter(budgets).most_common(1)[0][0] == 10, "more is tried once in a while"
    assert sum(count > 10 for count in rows) < 0.05 * len(rows)
    sent = [batch for batch in told if len(batch.branches.tails)]
    assert sent and all(set(batch.branches.tails.tolist()) <= set(range(len(batch.rows))) for batch in sent)
