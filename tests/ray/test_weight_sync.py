"""New weights reach everyone who follows the policy, also those who join later, and no output mixes two versions."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray
import torch
from rich.console import Console

from specactor_ray import Rollout, SamplingParams
from specactor_ray.cli.report import status_table
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.learner.batching import Sample
from specactor_ray.models.loading import load_model
from specactor_ray.trainer.trainer_ranks import TrainerGroup
from tests.tiny import tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
PROMPTS = ["Tell me about the red fox.", "Count from 3 to 9.", "Add 3 and 4."]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=24, seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def config(mode: str = "plain", **more: Any) -> Config:
    target = {"model": str(tiny_target()), "dtype": "float32", "kv_cache_gb": 0.05}
    cluster = {"pin_cores": False, "health_interval_s": 0.5}
    trainer = {"learning_rate": 0.003, "prompts_per_step": 2, "weight_bucket_mb": 1}
    return from_mapping({"mode": mode, "target": target, "cluster": cluster, "trainer": trainer, **more})


def samples() -> list[Sample]:
    rng, zeros, own = np.random.default_rng(0), np.zeros(12, dtype=np.float32), np.ones(12, dtype=np.bool_)
    ids = [(rng.integers(4, 400, 6), rng.integers(4, 400, 12)) for _ in range(8)]
    return [Sample(*one, zeros, 1.0, 1.0 - 2.0 * (number % 2), own) for number, one in enumerate(ids)]


def tokens(rollout: Rollout) -> list[Sequence[int]]:
    done = rollout.generate(PROMPTS, SAMPLING)
    assert not any(trajectory.error for trajectory in done)
    return [trajectory.token_ids for trajectory in done]


def verifier(rollout: Rollout) -> dict[str, Any]:
    return next(row for row in rollout.status() if row["kind"] == "verifier" and row["phase"] == "ready")


def test_updates_reach_verifiers_also_a_replacement_for_a_killed_one() -> None:
    settings = config()
    with Rollout(settings) as rollout, TrainerGroup(settings, rollout.run_name) as trainer:
        before = tokens(rollout)
        rollout.sleep()
        rollout.wake()
        assert tokens(rollout) == before
        rollout.sleep()
        assert tokens(rollout) == before, "a stream wakes them"
        trainer.update(samples(), 0, 0)
        rollout.update_weights(trainer.export_weights(1))
        after = tokens(rollout)
        assert after != before
        assert {t.weight_version for t in rollout.generate(PROMPTS, SAMPLING)} == {1}

        old = verifier(rollout)
        os.kill(old["pid"], signal.SIGKILL)
        assert tokens(rollout) == after  # from its replacement, which had to be given the weights first
        new = verifier(rollout)
        assert new["id"] != old["id"] and new["weight_version"] == 1

        trainer.update(samples(), 1, 1)
        rollout.update_weights(trainer.export_weights(2))
        assert tokens(rollout) != after


def test_drafters_that_follow_the_policy_get_every_version() -> None:
    method = "tests.fakes.own_proposers:Brittle"
    drafter = {"method": method, "model": str(tiny_target()), "kv_cache_gb": 0.05, "follow_policy": True}
    settings = config("decoupled", drafters=[drafter], speculation={"verify": "all", "draft_wait_s": 1.0})
    policy = load_model(str(tiny_target())).state_dict()
    noise = torch.Generator().manual_seed(1)
    changed = {
        name: value + 0.1 * value.std() * torch.randn(value.shape, generator=noise) for name, value in policy.items()
    }
    with Rollout(settings) as rollout:
        before = tokens(rollout)
        rollout.update_weights(changed)
        rollout.reset_metrics()
        assert tokens(rollout) != before
        metrics = rollout.metrics()
        # The drafter has the target's own weights, so it is nearly always right.
        assert metrics.drafted_tokens > 0 and metrics.acceptance_rate > 0.9
        for version, alarm in ((2, True), (3, False)):
            assert rollout.update_weights(changed) == version
            assert await_alarm(rollout, version, alarm)["alarm"] is alarm
        rollout.scale({method: 2})
        deadline = time.monotonic() + 60
        while [row["phase"] for row in rollout.status() if row["kind"] == "drafter"] != ["ready", "ready"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)
        late = [row["weight_version"] for row in rollout.status() if row["kind"] == "drafter"]
        assert late == [3, 3]
        while {one["version"] for one in rollout.drafters()} != {3}:
            assert time.monotonic() < deadline, rollout.drafters()
            time.sleep(0.1)
        assert len({one["checksum"] for one in rollout.drafters()}) == 1


def await_alarm(rollout: Rollout, version: int, alarm: bool) -> dict[str, Any]:
    """Rolls out until the only drafter has the version, and its alarm is on, or off. The same tokens all the time."""
    greedy, outputs, end = SamplingParams(temperature=0.0, max_tokens=24), set(), time.monotonic() + 90
    while True:
        outputs.add(str([trajectory.token_ids for trajectory in rollout.generate(PROMPTS, greedy)]))
        (drafter,) = rollout.drafters()
        assert len(outputs) == 1 and time.monotonic() < end, (outputs, drafter)
        if drafter["version"] == version and drafter["tried"] and drafter["alarm"] is alarm:
            console = Console(file=io.StringIO(), width=250)
            console.print(status_table(rollout.status()))
            assert ("NONE RIGHT" in console.file.getvalue()) is alarm  # type: ignore[attr-defined]
            return drafter
