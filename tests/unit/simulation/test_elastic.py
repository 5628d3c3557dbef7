"""Draft actors by load in whole runs of the product on virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.simulation.comparison import describe
from specactor_ray.simulation.rollouts import Result
from specactor_ray.simulation.scenario import Arrival, WorkloadConfig, load_scenario
from specactor_ray.simulation.workload import draw_arrivals
from tests.unit.simulation.scenarios import compare, write_scenario

DAYS = """
description: Two days, drafters by load
hardware: h100
seed: 3
machines: {nodes: 1, gpus: 3, cpus: 32}
workload: {requests: 30, group: 1, prompt_tokens: 32, median_tokens: 40, sigma: 0.5, max_tokens: 120,
           arrival: daily, day_s: 15, night: 0.0}
skills:
  - {method: draft_model, mean: 0.8}
steps: {steps: 2, load_s: 0.5}
config:
  mode: decoupled
  cluster: {address: auto, health_interval_s: 0.5}
  target: {model: qwen2.5-32b, gpus: 1, replicas: 2, max_batch: 16}
  drafters: [{method: draft_model, model: qwen2.5-0.5b, gpus: 1, replicas: 0, max_replicas: 4}]
  speculation: {race: off}
  elastic: {up_s: 0.5, down_s: 1.5, devices_weight: 0.5}
variants:
  elastic: []
  fixed: [config.drafters.0.max_replicas=null, config.drafters.0.replicas=1]
"""


def held(result: Result) -> list[float]:
    """GPUs of draft actors, one number after the other."""
    return [gpus for _, gpus in result.draft_actors]


def test_draft_actors_come_by_day_and_go_by_night(tmp_path: Path) -> None:
    """There is room for one; those beyond it wait and hold up nothing."""
    path = write_scenario(tmp_path, DAYS)
    (elastic, fixed) = compare(path)
    assert "at the rates of a day of 15 s" in describe(load_scenario(path))
    assert held(elastic) == [0, 1, 0, 1] and held(fixed) == [1]
    assert elastic.tokens == fixed.tokens
    assert 0.0 < elastic.drafting_s < fixed.drafting_s
    assert elastic.metrics.accepted_tokens > 0
    assert elastic.devices == pytest.approx(2 + elastic.drafting_s / elastic.rollout_s) and fixed.devices == 3
    assert all(len(step.latency_s) == 30 for step in elastic.steps)


def test_a_day_has_its_requests_around_noon() -> None:
    workload = WorkloadConfig(requests=2000, arrival=Arrival.daily, day_s=100.0, night=0.0)
    arrivals = draw_arrivals(workload, "a day")
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0.0 and arrivals[-1] <= 100.0
    noon = sum(40.0 <= at < 60.0 for at in arrivals) / len(arrivals)
    assert 0.5 < noon < 0.65
    even = draw_arrivals(WorkloadConfig(requests=2000, arrival=Arrival.daily, day_s=100.0, night=1.0), "a day")
    assert 0.15 < sum(40.0 <= at < 60.0 for at in even) / len(even) < 0.25
