"""When a step waits for first drafts: the rule against the long-run rates of always and never waiting."""

from __future__ import annotations

import numpy as np
import pytest

from specactor_ray.verify.table import RequestTable
from specactor_ray.verify.waiting import Waiting
from tests.unit.verify.tables import ints, request

STEP_S = 0.02


class Chain:
    """Rows whose tails come and go at random: after a plain step with probability `a`, after a wait with `b`, after a
    step with a tail with `c`. A tail brings `tokens` beside the target's own, a wait of `answer_s` one with chance `p`.
    """

    def __init__(
        self, p: float, tokens: float, a: float, b: float, c: float, answer_s: float, rows: int = 1, seed: int = 0
    ) -> None:
        self.p, self.tokens, self.next, self.answer_s = p, tokens, (a, b, c), answer_s
        self.table, self.rng = RequestTable(4), np.random.default_rng(seed)
        self.rows = ints([self.table.open(request(str(number))) for number in range(rows)])
        self.waiting, self.has_tail = Waiting(), np.zeros(rows, np.bool_)
        self.longest: list[float] = []
        """Seconds of each step with a row without a tail."""

    def run(self, steps: int, least_s: float = 0.0) -> None:
        for _ in range(steps):
            if self.waiting.rest:
                self.longest.append(0.0)
                self.waiting.record(len(self.rows), STEP_S)
                continue
            self.waiting.begin(self.table, self.rows, self.has_tail)
            lacking, waited_s = self.rows[~self.has_tail], 0.0
            did = np.where(self.has_tail, 2, 0)
            if len(lacking):
                longest_s = self.waiting.plan(np.full(len(lacking), self.p), 0.0, least_s)
                self.longest.append(longest_s)
                if longest_s > 0.0:
                    waited_s = min(longest_s, self.answer_s)
                    self.waiting.waited(lacking, waited_s)
                    did[~self.has_tail] = 1 if self.answer_s <= longest_s else 0
            draws = self.rng.random((2, len(self.rows)))
            with_tail = np.where(did == 2, self.rng.poisson(self.tokens, len(did)), 0)
            right = np.where(did == 1, draws[0] < self.p, with_tail)
            self.table.committed[self.rows] += 1 + right
            self.table.steps[self.rows] += 1
            self.has_tail = draws[1] < np.array(self.next)[did]
            self.waiting.record(len(self.rows) + int(right.sum()), STEP_S + waited_s)

    def rate(self, waits: bool) -> float:
        """Tokens per second of a row in the long run."""
        a, b, c = self.next
        enter, tokens, seconds = (b, 1.0 + self.p, STEP_S + self.answer_s) if waits else (a, 1.0, STEP_S)
        share = enter / (1.0 + enter - c)
        return float(((1 - share) * tokens + share * (1 + self.tokens)) / ((1 - share) * seconds + share * STEP_S))


HEAD = (0.34, 0.6, 0.45, 0.22, 0.2)
"""A weak drafter beside long steps: a plain step regains little."""
MODEL = (0.7, 1.8, 0.88, 0.6, 0.6)
"""A good one with branches: a step that waited loses its next tail."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("figures", [HEAD, MODEL])
@pytest.mark.parametrize("answer_s", [0.0005, 0.008, 0.015])
def test_the_rule_with_the_higher_long_run_rate_is_taken(
    figures: tuple[float, float, float, float, float], answer_s: float, seed: int
) -> None:
    chain = Chain(*figures, answer_s, seed=seed)
    gain = chain.rate(waits=True) / chain.rate(waits=False)
    assert abs(gain - 1.0) > 0.03, "the situations tell the rules apart"
    chain.run(3000)
    share = np.mean(np.array(chain.longest[-500:]) >= answer_s)
    assert share > 0.9 if gain > 1.0 else share < 0.1


def test_all_rows_wait_so_the_rows_without_a_tail_pay_for_them() -> None:
    waits = []
    for rows in (1, 16):
        chain = Chain(0.5, 0.5, 0.5, 0.5, 0.95, answer_s=0.004, rows=rows)
        chain.run(1500)
        waits.append(np.mean(np.array(chain.longest[-300:]) > 0.0))
    assert waits[0] > 0.9 and waits[1] < 0.1


def test_a_silent_drafter_is_waited_for_when_it_has_been_forgotten() -> None:
    chain = Chain(*HEAD, answer_s=60.0)
    chain.run(2000)
    waits = [longest_s for longest_s in chain.longest if longest_s > 0.0]
    assert 2 <= len(waits) <= 2000 / 128 and max(waits) < 2 * STEP_S


def test_where_the_least_answer_takes_too_long_no_wait_is_tried() -> None:
    chain = Chain(*HEAD, answer_s=0.001)
    chain.run(200, least_s=0.05)
    assert max(chain.longest) == 0.0 and 0 < chain.waiting.rest <= 16
    chain.run(200)
    assert max(chain.longest) > 0.0
    chain.run(20, least_s=0.05)
    assert max(chain.longest[-10:]) > 0.0, "what was measured counts"


def test_a_row_that_is_used_again_or_left_out_of_a_step_teaches_nothing() -> None:
    chain = Chain(*HEAD, answer_s=0.001, rows=2)
    chain.run(50)
    counts = chain.waiting._counts.copy()
    kept, row = chain.rows.tolist()
    chain.table.close(row)
    assert chain.table.open(request("new")) == row
    chain.table.steps[kept] += 1  # a step between, in which drafts were left alone
    chain.waiting.begin(chain.table, chain.rows, chain.has_tail)
    assert (chain.waiting._counts <= counts).all()
