"""Counters are read from other threads while the loop counts."""

from __future__ import annotations

from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.target.base import StepResult
from specactor_ray.verify.metrics import StepMetrics
from specactor_ray.verify.policy import Seconds
from specactor_ray.verify.table import RequestTable


def record_rows(metrics: StepMetrics, *rows: tuple[int, int, int, int]) -> None:
    """One step, by row: tokens committed, draft tokens there, verified, and right."""
    table = RequestTable(9)
    for committed, supplied, drafted, accepted in rows:
        table.counts[:6] += (1, committed, supplied, supplied > 0, drafted, accepted)
        table.reached[0, :drafted] += 1
        table.reached[1, :accepted] += 1
    metrics.take(table.counts, table.reached)
    assert not table.counts.any() and not table.reached.any()


def test_merge_adds_up_and_derives_ratios() -> None:
    parts = []
    for scale in (1, 2):
        metrics = StepMetrics()
        metrics.record_step(StepResult(forward_s=0.5, sampling_s=0.1), Seconds(1.0, 0.6, 0.1 * scale))
        record_rows(metrics, (3 * scale, 4, 4, 2))
        parts.append(metrics.to_dict())
    total = RolloutMetrics.merge(parts)
    assert (total.steps, total.committed_tokens, total.drafted_tokens) == (2, 9, 8)
    assert total.acceptance_rate == 0.5 and total.acceptance_length == 4.5
    assert total.supply == 4.0 and total.supply_share == 1.0
    assert abs(total.protocol_s - 0.5) < 1e-9


def test_positions_are_counted_separately_and_merge_at_any_length() -> None:
    parts = []
    for rows in ([(4, 2), (1, 1), (0, 0)], [(6, 6)], []):
        metrics = StepMetrics()
        record_rows(metrics, *((accepted + 1, drafted, drafted, accepted) for drafted, accepted in rows))
        parts.append(metrics.to_dict())
    total = RolloutMetrics.merge([*parts, {"steps": 1}])
    assert total.drafted_by_position == [3, 2, 2, 2, 1, 1]
    assert total.accepted_by_position == [3, 2, 1, 1, 1, 1]
    assert parts[0]["drafted_by_position"] == [2, 1, 1, 1], "merging leaves the parts alone"
    assert sum(total.drafted_by_position) == total.drafted_tokens == 11
    assert (total.row_steps, total.supplied_row_steps, total.accepted_tokens) == (4, 3, 9)
