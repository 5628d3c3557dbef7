"""Rollouts with `target.backend: vllm`: real Ray, real vLLM, tokens equal to those of the `hf` backend."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.messages import SamplingParams
from specactor_ray.rollout.rollout import Rollout
from tests.exact_distribution import assert_sampled_from
from tests.tiny import tiny_draft, tiny_prompts, tiny_vllm_target
from tests.unit.test_hf_engine import load
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.ray, pytest.mark.timeout(400)]

PROMPTS, SAMPLES = 8, 3
NGRAM = {"method": "ngram"}
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config(mode: str, drafters: list[dict[str, Any]], backend: str = "vllm", verifiers: int = 1) -> Config:
    target: dict[str, Any] = {
        "model": str(tiny_vllm_target()),
        "max_model_len": 256,
        "max_batch": 6,
        "kv_cache_gb": 0.03,
    }
    target["compiled"] = backend != "vllm"  # starts faster
    settings: dict[str, Any] = {
        "mode": mode,
        "target": {**target, "backend": backend, "replicas": verifiers},
        "drafters": drafters,
        "cluster": {"address": "local", "pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 8.0},
        "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02, "coupled_wait_s": 0.5},
    }
    return from_mapping(settings)


def tokens_of(rollout: Rollout) -> dict[tuple[int, int], tuple[int, ...]]:
    done = rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
    assert len(done) == PROMPTS * SAMPLES and not any(t.error for t in done)
    return {(t.prompt_index, t.sample_index): t.token_ids for t in done}


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, int], tuple[int, ...]]:
    with Rollout.from_config(config("plain", [], backend="hf")) as rollout:
        return tokens_of(rollout)


@pytest.mark.parametrize("mode", ["plain", "coupled", "decoupled"])
def test_every_mode_gives_the_tokens_of_hf(truth: Any, mode: str) -> None:
    small = {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05}
    with Rollout.from_config(config(mode, [] if mode == "plain" else [NGRAM, small])) as rollout:
        assert tokens_of(rollout) == truth
        metrics = rollout.metrics()
    assert (metrics.accepted_tokens > 0) == (mode != "plain")
    assert metrics.forward_s > 0 and metrics.sampling_s > 0


def test_tokens_come_from_the_targets_distribution() -> None:
    """End to end, with drafts as two methods make them."""
    small = {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05}
    settings = config("decoupled", [NGRAM, small])
    settings.target.max_batch = 16
    accepted = 0
    with Rollout.from_config(settings) as rollout:
        for filters in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}):
            sampling = SamplingParams(**filters, max_tokens=12, seed=11)
            done = rollout.generate(tiny_prompts(4), sampling, n=60)
            before, accepted = accepted, rollout.metrics().accepted_tokens
            assert accepted - before > 300
            outputs = [(trajectory.prompt_token_ids, trajectory.token_ids) for trajectory in done]
            assert_sampled_from(load(tiny_vllm_target()), outputs, sampling)


def test_killed_and_frozen_draft_actors_change_no_token(truth: Any) -> None:
    settings = config("decoupled", [{**NGRAM, "replicas": 2}])
    settings.cluster.health_timeout_s = 3.0
    with Rollout.from_config(settings) as rollout:
        before = drafter_pids(rollout)
        assert len(before) == 2

        def meddle() -> None:
            while rollout.committed_tokens == 0:
                time.sleep(0.02)
            os.kill(before[0], signal.SIGKILL)
            os.kill(before[1], signal.SIGSTOP)

        thread = threading.Thread(target=meddle, daemon=True)
        thread.start()
        assert tokens_of(rollout) == truth
        thread.join(30)
        deadline = time.monotonic() + 60
        while set(before) & set(after := drafter_pids(rollout)) or len(after) < 2:
            assert time.monotonic() < deadline, f"draft actors {before} were not replaced: {after}"
            time.sleep(0.5)
        assert tokens_of(rollout) == truth


def drafter_pids(rollout: Rollout) -> list[int]:
    return [row["pid"] for row in rollout.status() if row["kind"] != "verifier" and row["phase"] == "ready"]


def test_a_killed_verifier_is_replaced_and_its_requests_go_on(truth: Any) -> None:
    with Rollout.from_config(config("decoupled", [NGRAM], verifiers=2)) as rollout:
        killed: list[int] = []

        def kill() -> None:
            while rollout.committed_tokens == 0:
                time.sleep(0.02)
            killed.append(next(row["pid"] for row in rollout.status() if row["kind"] == "verifier"))
            os.kill(killed[0], signal.SIGKILL)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        assert tokens_of(rollout) == truth
        thread.join(30)
        assert killed, "nothing was killed while the stream ran"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            ready = [row for row in rollout.status() if row["kind"] == "verifier" and row["phase"] == "ready"]
            if len(ready) == 2 and killed[0] not in [row["pid"] for row in ready]:
                break
            time.sleep(0.5)
        else:
            pytest.fail("the verifier was not replaced")
