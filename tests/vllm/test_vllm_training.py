"""RL training with vLLM as the target: weights change with every step, and the rollout says what the trainer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests import tiny
from tests.ray.test_training import records, run, settings
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def run_training(tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    """Three steps of 8 prompts with 8 samples each; returns their records."""
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"Tell me about the {colour} {animal}."} for colour in tiny.COLOURS for animal in tiny.ANIMALS]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vllm = [
        f"target.model={tiny.tiny_vllm_target()}",
        "target.backend=vllm",
        "target.compiled=false",
        "target.max_model_len=256",
        "target.max_batch=32",
        "trainer.steps=3",
    ]
    outcome = run(settings(tasks, tmp_path / "runs", "vllm", *vllm, *overrides))
    assert outcome.status == "complete"
    return records(outcome.folder)


def test_log_probabilities_are_the_trainers_after_every_update(tmp_path: Path) -> None:
    done = run_training(tmp_path)
    assert len(done) == 3
    assert all(record["gap"]["mean"] < 1e-4 for record in done), [record["gap"] for record in done]
    assert all(record["train"]["grad_norm"] > 0 for record in done), "nothing was learnt, so no weights changed"
    assert sum(pair[0] for record in done for pair in record["speed"]["by_method"].values()) > 0


def test_drafts_that_go_bad_are_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method = "tests.misbehaving:Souring"
    speculation = ["sampling.temperature=0.2", "speculation.verify=all", "speculation.breaker.min_drafted=100000"]
    done = run_training(tmp_path, f"drafters=[{{method: '{method}'}}]", "trainer.steps=8", *speculation)
    counts = [record["speed"]["by_method"].get(method, (0, 0)) for record in done]
    assert counts[0][1] > 20 and sum(accepted for _, accepted in counts[2:]) == 0, counts
    (alarm,) = [line for line in caplog.messages if "does not follow the policy any more" in line]
    assert alarm.startswith("step") and method in alarm
