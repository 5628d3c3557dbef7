"""The estimate that a rollout prints ("about 1.31x of plain decoding") beside a plain rollout of the same requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.simulation.scenarios import results_of, write_scenario

SCENARIO = """
hardware: h100
seed: 3
machines: {nodes: 1, gpus: 2, cpus: 16}
workload: {requests: 24, group: 4, prompt_tokens: 64, median_tokens: 120, sigma: 0.5, max_tokens: 400}
skills: [{method: draft_model, mean: 0.5}]
load_s: 1.0
config:
  target: {model: qwen2.5-7b, gpus: 1, max_batch: 12}
  drafters: [{method: draft_model, model: qwen2.5-0.5b, gpus: 1}]
variants:
  plain: [config.mode=plain]
  coupled: [config.mode=coupled]
  decoupled: [config.mode=decoupled]
"""


@pytest.mark.parametrize(("batch", "skill"), [(1, 0.9), (12, 0.2), (12, 0.8)])
def test_the_estimate_is_that_of_a_paired_plain_run(batch: int, skill: float, tmp_path: Path) -> None:
    overrides = [f"config.target.max_batch={batch}", f"skills.0.mean={skill}", f"workload.requests={3 * batch + 6}"]
    plain, *drafted = results_of(write_scenario(tmp_path, SCENARIO), overrides)
    assert plain.metrics.speedup == pytest.approx(1.0, abs=1e-6)
    for one in drafted:
        assert one.metrics.speedup == pytest.approx(plain.rollout_s / one.rollout_s, rel=0.05), one.variant
