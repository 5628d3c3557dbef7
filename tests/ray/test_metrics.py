"""Metrics of a run at the port of Ray's metrics agent."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config.load import from_mapping
from specactor_ray.core.metrics import METRICS
from tests.tiny import tiny_draft, tiny_prompts, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 240.0


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the metrics agent of a cluster."""
    monkeypatch.setenv("RAY_enable_metrics_collection", "1")
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    ray.shutdown()


def scrape(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Metric → label values but the run's → value; by the names of this package."""
    try:
        with urllib.request.urlopen(address, timeout=10.0) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("ray_")
            if name in METRICS:
                assert sample.labels["run"] == "metered"
                labels = tuple(sample.labels[label] for label in METRICS[name].labels)
                found.setdefault(name, {})[labels] = sample.value
    return found


def test_the_agent_serves_every_metric(agent: str) -> None:
    """Counters appear with their first increment, so those of what did not happen are absent."""
    settings = {
        "mode": "decoupled",
        "run": {"name": "metered"},
        "target": {"model": str(tiny_target()), "replicas": 1, "max_batch": 4, "kv_cache_gb": 0.05},
        "drafters": [
            {"method": "suffix"},
            {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05},
        ],
        "cluster": {"pin_cores": False, "health_interval_s": 0.5},
        "speculation": {"verify": "all", "draft_wait_s": 0.02},
    }
    sampling = SamplingParams(temperature=1.0, max_tokens=48, seed=3)
    rare = ("reissued_total", "suspended_steps_total", "discarded_tokens_total")
    may_lack = {name for name in METRICS if name.endswith(rare)}
    with Rollout(from_mapping(settings)) as rollout:
        rollout.update_weights(tiny_target())

        def served() -> bool:
            rollout.generate(tiny_prompts(4), sampling)
            return scrape(agent).keys() >= METRICS.keys() - may_lack

        wait_until(served, "all metrics", LIMIT_S)
        truth = rollout.metrics()
        newest = {("verifier-0",): truth.committed_tokens}
        wait_until(lambda: scrape(agent)["specactor_committed_tokens_total"] == newest, "the newest values", LIMIT_S)
        found = scrape(agent)
        driver = {row.name: row for row in rollout.metric_rows() if "actor" not in row.labels}
        verifier = {row.name: row for row in rollout.metric_rows() if row.labels.get("actor") == "verifier-0"}
    assert found["specactor_weight_version"] == {("driver",): 1.0, ("verifier-0",): 1.0}
    assert found["specactor_weight_syncs_total"] == {(): 1.0} and found["specactor_weight_sync_seconds_total"][()] > 0.0
    assert found["specactor_row_steps_total"] == {("verifier-0",): truth.row_steps}
    assert found["specactor_accepted_tokens_total"] == {("verifier-0",): truth.accepted_tokens}
    assert set(found["specactor_drafter_alarm"]) == {("verifier-0", "suffix"), ("draft_model-0", "draft_model")}
    assert set(found["specactor_drafter_alarm"].values()) == {0.0}
    actors = {labels: count for labels, count in found["specactor_actors"].items() if count}
    assert actors == {("verifier", "", "ready"): 1.0, ("drafter", "draft_model", "ready"): 1.0}
    assert found["specactor_drafters_wanted"] == {("draft_model",): 1.0}
    # Those that the driver has without Ray.
    assert driver["specactor_requests_in_flight"].value == driver["specactor_requests_waiting"].value == 0.0
    assert driver["specactor_journaled_tokens_total"].value == truth.committed_tokens
    assert verifier["specactor_committed_tokens_total"].value == truth.committed_tokens
