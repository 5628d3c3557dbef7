"""Counters are read from other threads while the loop counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.target.base import StepResult
from specactor_ray.verify.metrics import PlainEstimate, StepMetrics
from specactor_ray.verify.policy import Seconds
from specactor_ray.verify.table import RequestTable


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


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 6), st.integers(0, 30), st.floats(0.0, 1.0)),
        min_size=1,
        max_size=40,
    ),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.01),
)
def test_plain_decoding_is_estimated_exactly_where_steps_lie_on_a_line(
    steps: list[tuple[int, int, int, float]], base_s: float, position_s: float
) -> None:
    estimate, expected = PlainEstimate(), 0.0
    for rows, drafts, prefill, share in [(1, 0, 0, 0.0), (4, 2, 0, 0.5), *steps]:
        positions, accepted = rows * (1 + drafts) + prefill, int(rows * drafts * share)
        if positions:
            engine_s, own_s, waiting_s = base_s + position_s * positions, 0.001, 0.02 * bool(drafts)
            result = StepResult(num_tokens=positions, num_prefill_tokens=prefill)
            seconds = Seconds(engine_s + own_s + waiting_s, engine_s, waiting_s)
            estimate.record(result, rows, accepted, seconds)
            more = accepted / rows if rows else 0.0
            expected += base_s + position_s * (rows + prefill) + more * (base_s + position_s * rows)
            expected += own_s * (1.0 + more)
    assert estimate.seconds == pytest.approx(expected, rel=1e-6)


def test_without_a_plain_step_the_slope_decides() -> None:
    estimate = PlainEstimate()
    assert estimate.seconds == 0.0
    for _ in range(3):
        estimate.record(StepResult(num_tokens=5), 1, 4, Seconds(0.01, 0.01, 0.0))
    assert estimate.seconds == pytest.approx(3 * 5 * 0.01), "one size alone says nothing of smaller steps"
    estimate.record(StepResult(num_tokens=10), 2, 8, Seconds(0.02, 0.02, 0.0))
    assert estimate.seconds == pytest.approx(3 * 5 * 0.002 + 5 * 0.004), "in proportion"
