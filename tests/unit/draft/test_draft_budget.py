"""How many rows a drafter with branches feeds: its loop learns what forwards cost, and drafts as many as pay."""

from __future__ import annotations

import numpy as np
import pytest

from specactor_ray.draft.model import DraftModelProposer
from tests.batches import news, opening
from tests.fakes.clocks import HandClock
from tests.unit.draft.test_draft_cost import loop_of, tiny_model


@pytest.mark.parametrize(("forward_s", "row_s"), [(0.05, 1e-4), (0.001, 0.05)])
def test_a_loop_learns_what_forwards_cost_and_comes_to_rest(forward_s: float, row_s: float) -> None:
    rows, budgets, clock = list[int](), list[int](), HandClock()

    class Timed(DraftModelProposer):
        def extend(self) -> np.ndarray:
            changed = super().extend()
            clock.seconds += forward_s + row_s * (self.rows_drafted or 50)
            rows.append(self.rows_drafted)
            budgets.append(self.budget)
            assert len(self.forward_s) == self.budget + 1 and (np.diff(self.forward_s) >= 0).all()
            return changed

    loop, told = loop_of(Timed(tiny_model(), branches=8), clock=clock)
    loop.deliver(news([opening(row, window=6) for row in range(2)]))
    while loop.run_once():
        pass
    assert set(budgets) == {0} and max(rows) == 2
    assert not any(len(batch.branches.tails) for batch in told), "nothing was committed yet"
    for start in range(20):
        bases, lengths, tokens, _ = loop.proposer.tails(np.arange(2, dtype=np.int32))
        assert bases.tolist() == [start, start] and lengths.tolist() == [6, 6]
        wrong = ((tokens[[0, 6]] + 1) % 500).tolist()
        loop.deliver(news(commits=[(row, start, wrong[row : row + 1]) for row in range(2)]))
        end = len(rows) + 100
        while loop.run_once():
            assert len(rows) < end, "it never comes to rest"
        assert not loop.run_once()
    many = sum(count > 4 for count in rows)
    if row_s > forward_s:
        assert 0 < many < 0.1 * len(rows), "a row costs as much as it brings, and more is tried once in a while"
    else:
        assert many > 0.3 * len(rows), "further rows are nearly free"
        assert any(len(batch.branches.tails) for batch in told)
    sent = [batch for batch in told if len(batch.branches.tails)]
    assert all(set(batch.branches.tails.tolist()) <= set(range(len(batch.rows))) for batch in sent)
