"""A run as others see it: `specactor status --watch` in a terminal and without one, and the port of Ray's metrics."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

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
CLEAR_LINE = "\x1b[2K"
"""What rich redraws with."""


class Watcher:
    """The command, and what it has written so far. It is given the address and the token of the run's cluster: other
    clusters come and go beside these tests."""

    def __init__(self, in_terminal: bool, address: str) -> None:
        command = [sys.executable, "-m", "specactor_ray", "status", "--watch", "--every", "0.2", "--address", address]
        master, slave = os.openpty() if in_terminal else os.pipe()
        size = {"COLUMNS": "400", "LINES": "50"} | ({"TERM": "xterm"} if in_terminal else {})  # no cell is wrapped
        repository = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=slave, env={**os.environ, **size, "PYTHONPATH": repository}
        )
        os.close(slave)
        self.text = ""
        self._reader = threading.Thread(target=self._read, args=(master,), daemon=True)
        self._reader.start()

    def _read(self, file: int) -> None:
        with contextlib.suppress(OSError):  # a terminal ends by an error
            while data := os.read(file, 65536):
                self.text += data.decode(errors="replace")
        os.close(file)

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.process.poll() is not None or self.text.count(text) >= times, text, LIMIT_S)
        assert self.process.poll() is None, self.text

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the metrics agent of a cluster."""
    monkeypatch.setenv("RAY_enable_metrics_collection", "1")
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
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
                assert sample.labels["run"] == "watched"
                labels = tuple(sample.labels[label] for label in METRICS[name].labels)
                found.setdefault(name, {})[labels] = sample.value
    return found


def test_a_run_is_watched_until_it_ends(agent: str) -> None:
    """The controller asks actors for counters every ten minutes; the command asks them itself, and they export then."""
    settings = {
        "mode": "decoupled",
        "run": {"name": "watched"},
        "target": {"model": str(tiny_target()), "max_batch": 4, "kv_cache_gb": 0.05},
        "drafters": [
            {"method": "suffix"},
            {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05},
        ],
        "cluster": {"pin_cores": False, "health_interval_s": 600.0, "health_timeout_s": 1200.0},
        "speculation": {"verify": "all", "draft_wait_s": 0.02},
    }
    watchers: list[Watcher] = []
    try:
        with Rollout(from_mapping(settings)) as rollout:
            watchers += [Watcher(shown, rollout.address) for shown in (True, False)]
            rollout.update_weights(tiny_target())
            check_metrics(rollout, agent)
            for watcher in watchers:
                watcher.wait_for("draft_model-0#", times=3)
                watcher.wait_for(f"{rollout.metrics().committed_tokens:,} tokens")
            watchers[1].process.send_signal(signal.SIGINT)
            assert watchers[1].end() == 0
        assert watchers[0].end() == 0
    finally:
        for watcher in watchers:
            if watcher.process.poll() is None:
                watcher.process.kill()
    terminal, pipe = (watcher.text for watcher in watchers)
    assert "run watched has ended" in terminal
    assert CLEAR_LINE in terminal and "\x1b" not in pipe


def check_metrics(rollout: Rollout, agent: str) -> None:
    """Counters appear with their first increment, so those of what did not happen are absent."""
    rare = ("reissued_total", "suspended_steps_total", "discarded_tokens_total")
    wanted = {name for name in METRICS if not name.endswith(rare)}

    def served() -> bool:
        rollout.generate(tiny_prompts(4), SamplingParams(temperature=1.0, max_tokens=48, seed=3))
        return scrape(agent).keys() >= wanted

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
    assert found["specactor_drafter_alarm"] == {("verifier-0", "suffix"): 0.0, ("draft_model-0", "draft_model"): 0.0}
    actors = {labels: count for labels, count in found["specactor_actors"].items() if count}
    assert actors == {("verifier", "", "ready"): 1.0, ("drafter", "draft_model", "ready"): 1.0}
    assert found["specactor_drafters_wanted"] == {("draft_model",): 1.0}
    # Those that the driver has without Ray.
    assert driver["specactor_requests_in_flight"].value == driver["specactor_requests_waiting"].value == 0.0
    assert driver["specactor_journaled_tokens_total"].value == truth.committed_tokens
    assert verifier["specactor_committed_tokens_total"].value == truth.committed_tokens
