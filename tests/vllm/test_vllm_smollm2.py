"""A real model: the tokens of vLLM with and without drafts, and those of the `hf` engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.prompts import encode_prompt, read_prompts
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.target.vllm import VllmEngine
from tests.unit.engine_conformance import Collected, Driver, answers, noisy_tails
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.e2e, pytest.mark.timeout(600)]

TARGET = TargetConfig(
    dtype="float32", max_model_len=384, max_batch=16, kv_cache_gb=0.5, compiled=False, record_margins=True
)
PROMPTS = Path(__file__).parents[2] / "conf" / "prompts"
NEAR_TIE = 1e-3
"""Perturbed margin, in logits: two ways of adding up the same float32 numbers differ by about a tenth of this."""


def batch() -> list[TargetRequest]:
    tokenizer = load_tokenizer(TARGET.model)
    prompts = [prompt for name in ("arithmetic", "chat") for prompt in read_prompts(PROMPTS / f"{name}.jsonl", 6)]
    sampling = [SamplingParams(temperature=i % 2 * 1.0, max_tokens=24, seed=50 + i) for i in range(len(prompts))]
    encoded = [tuple(encode_prompt(tokenizer, prompt, True)) for prompt in prompts]
    return [TargetRequest(f"p{i}", ids, s) for i, (ids, s) in enumerate(zip(encoded, sampling, strict=True))]


def collect(engine: Driver, requests: list[TargetRequest], drafted: Collected | None = None) -> Collected:
    return answers(engine, requests, noisy_tails(drafted.tokens, 1, engine.vocab_size) if drafted else None)


def test_12_prompts_are_answered_alike() -> None:
    requests = batch()
    assert len(requests) == 12
    hf = Driver(HfEngine.from_config(TARGET))
    theirs = collect(hf, requests)
    hf.close()
    vllm = Driver(VllmEngine(TARGET, 8))
    plain = collect(vllm, requests)
    drafted = collect(vllm, requests, plain)
    vllm.close()
    assert sum(output.num_accepted for output in drafted.outputs) > 30
    for ours in (plain, drafted):
        for request in requests:
            margins = [m for o in ours.outputs if o.request_id == request.request_id for m in o.margins or ()]
            pairs = zip(ours.tokens[request.request_id], theirs.tokens[request.request_id], strict=False)
            first = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
            if first is not None:
                assert margins[first] < NEAR_TIE, f"{request.request_id} differs at {first}, and that is no near-tie"
