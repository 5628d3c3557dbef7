"""Rollouts with `target.backend: vllm`: real Ray, real vLLM, tokens equal to those of the `hf` backend."""

from __future__ import annotations

import time
from typing import Any

import pytest

from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.rollout import Rollout
from tests.local_ray import local_ray
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_prompts, tiny_vllm_target
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.ray, pytest.mark.timeout(400)]

PROMPTS, SAMPLES = 8, 3
NGRAM = {"method": "ngram"}
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


cluster = local_ray(8, log_to_driver=False)


def config(mode: str, drafters: list[dict[str, Any]]) -> Config:
    settings: dict[str, Any] = {
        "mode": mode,
        "target": {
            "model": str(tiny_vllm_target()),
            "backend": "vllm",
            "compiled": False,  # starts faster
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


def test_decoupled_gives_the_tokens_of_hf(truth: Any) -> None:
    settings = config("decoupled", [{**NGRAM, "hosted": False}, small()])
    settings.target.max_batch = 16
    with Rollout.from_config(settings) as rollout:
        deadline = time.monotonic() + 120
        while not rollout.metrics().accepted_tokens:
            assert time.monotonic() < deadline, "no draft arrives in time"
            assert tokens_of(rollout) == truth
