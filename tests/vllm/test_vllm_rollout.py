"""Rollouts with `target.backend: vllm`: real Ray, real vLLM, tokens equal to those of the `hf` backend."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.rollout import Rollout
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_prompts, tiny_vllm_target
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


def config(mode: str, drafters: list[dict[str, Any]], verifiers: int = 1) -> Config:
    settings: dict[str, Any] = {
        "mode": mode,
        "target": {
            "model": str(tiny_vllm_target()),
            "backend": "vllm",
            "compiled": False,  # starts faster
            "replicas": verifiers,
            "max_model_len": 256,
            "max_batch": 6,
            "kv_cache_gb": 0.03,
            "dtype": "float32",
        },
        "drafters": drafters,
        "cluster": {"address": "local", "pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 5.0},
        "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02},
    }
    return from_mapping(settings)


def small() -> dict[str, Any]:
    return {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05}


def plain_truth() -> dict[tuple[int, int], tuple[int, ...]]:
    """What `tokens_of` has to give."""
    return plain_tokens(tiny_vllm_target(), tiny_prompts(PROMPTS), SAMPLING, SAMPLES)


def tokens_of(rollout: Rollout) -> dict[tuple[int, int], tuple[int, ...]]:
    done = rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
    assert len(done) == PROMPTS * SAMPLES and not any(t.error for t in done)
    return {(t.prompt_index, t.sample_index): t.token_ids for t in done}


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, int], tuple[int, ...]]:
    return plain_truth()


def test_coupled_gives_the_tokens_of_hf(truth: Any) -> None:
    with Rollout.from_config(config("coupled", [NGRAM, small()])) as rollout:
        assert tokens_of(rollout) == truth
        metrics = rollout.metrics()
    assert metrics.accepted_tokens > 0
    assert metrics.forward_s > 0, "sampling is part of it: nothing waits between them"


@pytest.fixture(scope="class")
def rollout() -> Iterator[Rollout]:
    settings = config("decoupled", [{**NGRAM, "hosted": False, "replicas": 2}, small()], verifiers=2)
    settings.target.max_batch = 16
    with Rollout.from_config(settings) as rollout:
        yield rollout


class TestDecoupled:
    """What one rollout goes through, in this order."""

    def test_tokens_are_those_of_hf(self, truth: Any, rollout: Rollout) -> None:
        deadline = time.monotonic() + 120
        while not rollout.metrics().accepted_tokens:
            assert time.monotonic() < deadline, "no draft arrives in time"
            assert tokens_of(rollout) == truth

    def test_killed_and_frozen_draft_actors_change_no_token(self, truth: Any, rollout: Rollout) -> None:
        before = ready_pids(rollout, "drafter")
        assert len(before) == 3
        tokens = tokens_under(rollout, lambda: (os.kill(before[0], signal.SIGKILL), os.kill(before[1], signal.SIGSTOP)))
        assert tokens == truth
        deadline = time.monotonic() + 90
        while set(before[:2]) & set(after := ready_pids(rollout, "drafter")) or len(after) < 3:
            assert time.monotonic() < deadline, f"draft actors {before} were not replaced: {after}"
            time.sleep(0.5)
        assert tokens_of(rollout) == truth

    def test_a_killed_verifier_is_replaced_and_its_requests_go_on(self, truth: Any, rollout: Rollout) -> None:
        (victim, other) = ready_pids(rollout, "verifier")
        assert tokens_under(rollout, lambda: os.kill(victim, signal.SIGKILL)) == truth
        deadline = time.monotonic() + 120
        while len(ready := ready_pids(rollout, "verifier")) < 2 or victim in ready:
            assert time.monotonic() < deadline, "the verifier was not replaced"
            time.sleep(0.5)
        assert other in ready and tokens_of(rollout) == truth


def tokens_under(rollout: Rollout, meddle: Callable[[], Any]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The tokens of a stream in whose midst something is done."""
    start = rollout.committed_tokens
    meddled: list[bool] = []

    def watch() -> None:
        while rollout.committed_tokens == start:
            time.sleep(0.02)
        meddle()
        meddled.append(True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    tokens = tokens_of(rollout)
    thread.join(120)
    assert meddled, "the stream ended before anything was done"
    return tokens


def ready_pids(rollout: Rollout, kind: str) -> list[int]:
    return [row["pid"] for row in rollout.status() if row["kind"] == kind and row["phase"] == "ready"]
