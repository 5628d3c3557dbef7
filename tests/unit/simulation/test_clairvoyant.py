"""The clairvoyant: the same run, by a policy that knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.simulation.comparison import simulate_variant
from tests.unit.simulation.scenarios import write_scenario

SIZE = ["workload.requests=24", "workload.median_tokens=150", "workload.max_tokens=400", "config.target.max_batch=8"]


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("decoupled", []),
        ("decoupled", ["skills.0.mean=0.3", "skills.0.spread=1.0"]),
        ("decoupled", ["python.verify_row_us=0", "skills.0.forward_ms=4"]),
        ("coupled", []),
        ("coupled", ["skills.0.mean=0.1"]),
        ("coupled", ["skills.0.forward_ms=5", "skills.0.mean=0.5"]),
    ],
)
def test_nobody_is_much_faster_than_who_knows(tmp_path: Path, variant: str, overrides: list[str]) -> None:
    scenario = write_scenario(tmp_path)
    mine = simulate_variant(scenario, [*SIZE, *overrides], variant)
    limit = simulate_variant(scenario, [*SIZE, *overrides], variant, clairvoyant=True)
    plain = simulate_variant(scenario, [*SIZE, *overrides, "config.target.replicas=2"], "plain")
    assert limit.tokens == mine.tokens == plain.tokens
    assert mine.rollout_s >= 0.98 * limit.rollout_s
    assert limit.rollout_s <= 1.03 * plain.rollout_s
