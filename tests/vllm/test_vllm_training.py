"""RL training with vLLM as the target: weights change with every step, and the rollout says what the trainer says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from specactor_ray.config import load_config
from specactor_ray.observability.console import make_console
from specactor_ray.training.loop import train
from specactor_ray.training.run_folder import read_metrics
from tests import tiny
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def test_log_probabilities_are_the_trainers_after_every_update(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"Tell me about the {colour} {animal}."} for colour in tiny.COLOURS for animal in tiny.ANIMALS]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        None,
        [
            f"run.dir={tmp_path / 'runs'}",
            f"data.path={tasks}",
            f"target.model={tiny.tiny_vllm_target()}",
            "target.backend=vllm",
            "target.compiled=false",
            "target.max_model_len=256",
            "target.kv_cache_gb=0.05",
            "target.max_batch=32",
            "drafters=[{method: ngram}]",
            "reward.functions=[{name: 'tests.reward_functions:sleepy'}]",
            "data.n=8",
            "sampling.max_tokens=32",
            "trainer.prompts_per_step=8",
            "trainer.learning_rate=0.002",
            "trainer.steps=3",
            "tracking.tensorboard=false",
        ],
    )
    outcome = train(config, make_console(sys.stderr))
    records = read_metrics(outcome.folder / "metrics.jsonl")
    assert outcome.status == "complete" and len(records) == 3
    assert all(record["gap"]["mean"] < 1e-4 for record in records), [record["gap"] for record in records]
    assert all(record["train"]["grad_norm"] > 0 for record in records), "nothing was learnt, so no weights changed"
    assert sum(pair[0] for record in records for pair in record["speed"]["by_method"].values()) > 0
