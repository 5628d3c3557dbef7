"""Counters are read from other threads while the loop counts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.table.table import RequestTable
from specactor_ray.target.base import StepResult
from specactor_ray.verify.metrics import PlainEstimate, StepMetrics
from specactor_ray.verify.policy import Seconds


def parts() -> list[dict[str, Any]]:
    """Counters of three verifiers: rows with (verified, right) draft tokens."""
    found = []
    for number, rows in enumerate(([(4, 2), (1, 1), (0, 0)], [(6, 6)], [])):
        metrics, table = StepMetrics(), RequestTable(9)
        for drafted, accepted in rows:
            table.counts[:6] += (1, accepted + 1, drafted, drafted > 0, drafted, accepted)
            table.reached[0, :drafted] += 1
            table.reached[1, :accepted] += 1
        metrics.record_step(StepResult(forward_s=0.5, sampling_s=0.1), Seconds(1.0, 0.6, 0.1 * number))
        metrics.take(table.counts, table.reached)
        assert not table.counts.any() and not table.reached.any()
        found.append(metrics.to_dict())
    return found


def test_merge_adds_up_at_any_length_and_derives_ratios() -> None:
    counts = parts()
    total = RolloutMetrics.merge([*counts, {"steps": 1}])
    assert (total.steps, total.committed_tokens, total.drafted_tokens, total.accepted_tokens) == (4, 13, 11, 9)
    assert (total.row_steps, total.supplied_row_steps) == (4, 3)
    assert total.acceptance_rate == 9 / 11 and total.acceptance_length == 13 / 4
    assert total.supply == 11 / 4 and total.supply_share == 3 / 4
    assert abs(total.protocol_s - 0.9) < 1e-9
    assert total.drafted_by_position == [3, 2, 2, 2, 1, 1]
    assert total.accepted_by_position == [3, 2, 1, 1, 1, 1]
    assert counts[0]["drafted_by_position"] == [2, 1, 1, 1], "merging leaves the parts alone"


class Batch:
    """A batch with `slots` for requests of given lengths. Each step commits a random number of tokens per request."""

    def __init__(self, lengths: list[int], slots: int, base_s: float, position_s: float) -> None:
        self.lengths, self.slots, self.base_s, self.position_s = lengths, slots, base_s, position_s

    def step_s(self, positions: int) -> float:
        return self.base_s + self.position_s * positions

    def plain_s(self, prompt: int, own_s: float) -> float:
        """Of plain decoding; prompts are prefilled in the step after the one in which their slot became free."""
        waiting, left, total = list(self.lengths), list[int](), 0.0
        while waiting or left:
            begun = [waiting.pop(0) for _ in range(min(self.slots - len(left), len(waiting)))]
            total += self.step_s(len(left) + prompt * len(begun)) + own_s
            left = [tokens - 1 for tokens in left + begun if tokens > 1]
        return total

    def run(self, estimate: PlainEstimate, prompt: int, own_s: float, most: int, seed: int) -> None:
        """Drafts of up to `most` tokens, each request with an acceptance of its own."""
        rng, waiting, free = random.Random(seed), list(self.lengths), list(range(self.slots))[::-1]
        left, chance = dict[int, int](), dict[int, float]()
        while waiting or left:
            begun = {free.pop(): waiting.pop(0) for _ in range(min(len(free), len(waiting)))}
            chance |= {row: rng.random() for row in begun}
            drafted = [rng.randint(0, min(most, tokens - 1)) for tokens in left.values()]
            accepted = [sum(rng.random() < chance[row] for _ in range(n)) for row, n in zip(left, drafted, strict=True)]
            positions, zeros = len(left) + sum(drafted) + prompt * len(begun), [0] * len(begun)
            columns = ([*left, *begun], [1 + n for n in accepted] + [1] * len(begun), drafted + zeros, accepted + zeros)
            rows, lengths, drafts, right = (np.array(column, np.int32) for column in columns)
            result = StepResult(rows, lengths=lengths, drafted=drafts, accepted=right, num_tokens=positions)
            engine_s, waiting_s = self.step_s(positions), 0.02 * any(drafted)
            estimate.commit(result)
            left = {row: n - int(count) for (row, n), count in zip({**left, **begun}.items(), lengths, strict=True)}
            for row in [row for row, tokens in left.items() if not tokens]:
                del left[row]
                free.append(row)
                estimate.end(row)
            estimate.record(result, Seconds(engine_s + own_s + waiting_s, engine_s, waiting_s))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(0, 6), st.integers(2, 30), st.floats(0.0, 0.1), st.floats(0.0, 0.01), st.integers(0, 1000),
)  # fmt: skip
def test_plain_decoding_is_estimated_exactly_where_no_request_waits(
    lengths: list[int], most: int, prompt: int, base_s: float, position_s: float, seed: int
) -> None:
    """Steps lie on a line."""
    estimate, batch = PlainEstimate(), Batch(lengths, len(lengths), base_s, position_s)
    for tokens in (1, 2):  # two sizes are measured
        Batch([tokens] * tokens, tokens, base_s, position_s).run(estimate, 4, 0.001, 0, 0)
    before = estimate.seconds
    for _ in range(2):  # one rollout after the other
        batch.run(estimate, prompt, 0.001, most, seed)
    assert estimate.seconds - before == pytest.approx(2 * batch.plain_s(prompt, 0.001), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("most", [0, 2, 8])
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_plain_decoding_is_estimated_where_requests_wait(slots: int, most: int) -> None:
    """Without drafts the estimate is exact; with drafts requests end, and those that wait enter, in another order."""
    rng = random.Random(slots)
    lengths = [min(round(rng.lognormvariate(5.0, 0.9)), 2000) for _ in range(6 * slots)]
    estimate, batch = PlainEstimate(), Batch(lengths, slots, 0.02, 0.001)
    batch.run(estimate, 16, 0.001, most, 1)
    assert estimate.seconds == pytest.approx(batch.plain_s(16, 0.001), rel=0.08 if most else 1e-6)


def test_without_a_plain_step_the_slope_decides() -> None:
    estimate = PlainEstimate()
    assert estimate.seconds == 0.0
    one = StepResult(np.arange(1, dtype=np.int32), lengths=np.full(1, 5, np.int32), drafted=np.full(1, 4, np.int32))
    two = StepResult(np.arange(2, dtype=np.int32), lengths=np.full(2, 5, np.int32), drafted=np.full(2, 4, np.int32))
    one.num_tokens, two.num_tokens = 5, 10
    for _ in range(4):  # the first one is taken for the prompt's
        estimate.commit(one)
        estimate.record(one, Seconds(0.01, 0.01, 0.0))
    assert estimate.seconds == pytest.approx((1 + 3 * 5) * 0.01), "one size alone says nothing of smaller steps"
    estimate.end(0)
    for _ in range(2):
        estimate.commit(two)
        estimate.record(two, Seconds(0.02, 0.02, 0.0))
    assert estimate.seconds == pytest.approx((1 + 3 * 5) * 0.002 + (1 + 5) * 0.004), "in proportion"
