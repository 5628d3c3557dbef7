"""RL training with vLLM as the target: weights change with every step, and the rollout says what the trainer says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.local_ray import local_ray
from tests.ray.test_training import records, run, settings
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


cluster = local_ray(2)


def test_log_probabilities_are_the_trainers_after_every_update(tmp_path: Path) -> None:
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
        "mode=coupled",  # its drafts are deterministic
        "drafters=[{method: ngram}]",
        "speculation.verify=all",
    ]
    outcome = run(settings(tasks, tmp_path / "runs", "vllm", *vllm))
    assert outcome.status == "complete"
    done = records(outcome.folder)
    assert len(done) == 3
    assert all(record["gap"]["mean"] < 1e-4 for record in done), [record["gap"] for record in done]
    assert all(record["train"]["grad_norm"] > 0 for record in done), "nothing was learnt, so no weights changed"
    assert sum(pair[0] for record in done for pair in record["speed"]["by_method"].values()) > 0
