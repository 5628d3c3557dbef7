"""Counters are read from other threads while the loop counts."""

from __future__ import annotations

from typing import Any

from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.target.base import StepResult
from specactor_ray.verify.metrics import StepMetrics
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
