"""A real model from end to end: SmolLM2-135M-Instruct, 16 real prompts, all modes, fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config import load_config
from specactor_ray.rollout.prompts import read_prompts
from specactor_ray.rollout.trajectory import Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
NEAR_TIE = 1e-4
"""A perturbed top-2 margin below this may flip between a verify and a decode forward."""
TWIN = (
    "speculation.draft_wait_s=1",  # a drafter as slow as the target is never ahead of one that does not wait
    "drafters=[{method: draft_model, model: smollm2-135m, kv_cache_gb: 0.3, window: 3}]",
)


def roll(mode: str, temperature: float, *overrides: str) -> tuple[list[Trajectory], dict[str, float]]:
    settings = [
        f"mode={mode}",
        "cluster.num_cpus=4",
        "cluster.pin_cores=false",
        "target.record_margins=true",
        "speculation.verify=all",
        *overrides,
    ]
    config = load_config(ROOT / "conf" / "local_cpu.yaml", settings)
    prompts = read_prompts(ROOT / "conf" / "prompts" / "demo.jsonl", limit=16)
    assert len(prompts) == 16
    with Rollout.from_config(config) as rollout:
        done = rollout.generate(prompts, SamplingParams(temperature=temperature, max_tokens=24, seed=7))
        return done, rollout.metrics().to_dict()


def assert_same(plain: list[Trajectory], other: list[Trajectory]) -> None:
    """Equal token for token; a first difference is accepted only where the margin was recorded as a near-tie."""
    for expected, got in zip(plain, other, strict=True):
        if expected.token_ids == got.token_ids:
            continue
        pairs = zip(expected.token_ids, got.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert first is not None, f"{expected.request_id}: lengths differ"
        assert expected.margins is not None and expected.margins[first] < NEAR_TIE, (
            f"{expected.request_id} differs at {first} with margin {expected.margins and expected.margins[first]}"
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_modes_are_identical(temperature: float) -> None:
    plain, metrics = roll("plain", temperature)
    assert metrics["drafted_tokens"] == 0 and metrics["acceptance_length"] == 1.0
    assert all(t.text and not t.error for t in plain)
    for mode, drafters in (("coupled", ()), ("decoupled", ()), ("decoupled", TWIN)):
        done, metrics = roll(mode, temperature, *drafters)
        assert_same(plain, done)
        assert metrics["drafted_tokens"] > 0, (mode, metrics)
        if drafters:  # the target as its own drafter, with the target's noise, is right but for near-ties
            assert metrics["accepted_tokens"] > 0.9 * metrics["drafted_tokens"]
