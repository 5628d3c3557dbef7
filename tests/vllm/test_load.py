"""The start of a vLLM engine: one that does not compute what transformers computes is refused, and before a training
one that takes no new weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ModelLoadError, WeightsError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.probe import probe_tokens
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.build import build_engine
from specactor_ray.target.vllm import VllmEngine
from tests.unit.engine_conformance import Collected, Driver
from tests.vllm import needs_vllm
from tests.vllm.test_vllm_engine import raw
from tests.vllm.test_weights import TOKENS, make_model, no_groups

__all__ = ["no_groups"]
pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

_FACTORS = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 64}
_LONG = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **_FACTORS},
    "original_max_position_embeddings": 64,
}


def start(family: str, folder: Path, settings: dict[str, Any], **more: Any) -> VllmEngine:
    with quiet_transformers():
        make_model(family, 0, **settings).save_pretrained(folder)
    limits: dict[str, Any] = {"max_model_len": 120, "max_batch": 4, "max_step_tokens": 128, "kv_cache_gb": 1 / 64}
    config = TargetConfig(str(folder), "vllm", dtype="float32", compiled=False, **limits, **more)
    engine = build_engine(config, "cpu", 8)
    assert isinstance(engine, VllmEngine)
    return engine


@pytest.mark.parametrize(("family", "settings"), [("llama-tied", {}), ("qwen3-moe", {}), ("phi3", _LONG)])
def test_a_model_that_takes_new_weights_is_served(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    engine = start(family, tmp_path, settings, updates=True)
    assert engine.weight_version == 0 and not engine.has_work()
    engine.close()


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("qwen2-moe", {"use_sliding_window": True}, "from token 9 of 56"),
        ("cohere2", {"logit_scale": 1.0}, "as transformers does"),
        ("qwen3", {}, "AssertionError Sliding window for some but all layers"),
    ],
)
def test_what_vllm_computes_otherwise_is_refused(family: str, settings: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        start(family, tmp_path, settings)


def test_experts_that_a_reload_does_not_see_are_named(tmp_path: Path) -> None:
    """At the start if new weights will come, else at the first update."""
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.mlp\.experts"):
        start("gpt_oss", tmp_path, {}, updates=True)
    no_groups_now()
    engine = start("gpt_oss", tmp_path, {})
    with pytest.raises(WeightsError):
        engine.load_weights(1, make_model("gpt_oss", 1).state_dict())
    engine.close()


_BFLOAT16 = """
import sys
from specactor_ray.config.schema import TargetConfig
from specactor_ray.target.build import build_engine

limits = {"max_model_len": 120, "max_batch": 4, "max_step_tokens": 128, "kv_cache_gb": 1 / 64}
config = TargetConfig(sys.argv[1], "vllm", dtype="bfloat16", compiled=False, updates=True, **limits)
build_engine(config, "cpu", 8).close()
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels with tiles need AMX")
def test_a_new_process_serves_bfloat16_on_cpus_with_amx(tmp_path: Path) -> None:
    """Nothing else in it has asked Linux for the tiles."""
    with quiet_transformers():
        make_model("llama-tied", 0).save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", _BFLOAT16, str(tmp_path)], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def no_groups_now() -> None:
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.mark.parametrize("kv_cache_gb", [1 / 64, 400 / (1 << 20)], ids=["room", "no room beside the requests"])
def test_a_probe_holds_requests_and_changes_none(kv_cache_gb: float) -> None:
    sampling = [SamplingParams(1.0, max_tokens=40, seed=i, ignore_eos=True, prompt_logprobs=i == 1) for i in range(6)]
    requests = [TargetRequest(f"r{i}", tuple(range(3 + i, 40 + i)), one) for i, one in enumerate(sampling)]

    def outputs(probes: bool) -> tuple[Collected, list[np.ndarray]]:
        driver, collected, found = Driver(engine), Collected(), []
        for request in requests:
            driver.add(request)
        steps = 0
        while driver.has_work():
            collected.step(driver, {name: [5, 6] for name in driver.decoding()})
            steps += 1
            if probes and steps % 5 == 1:
                found.append(engine.prompt_logprobs(tokens))
        return collected, found

    engine = raw(max_model_len=120, max_batch=4, max_step_tokens=64, kv_cache_gb=kv_cache_gb)
    tokens = probe_tokens(engine.vocab_size, len(TOKENS))
    alone = engine.prompt_logprobs(tokens)
    (plain, _), (probed, found) = outputs(False), outputs(True)
    assert probed.tokens == plain.tokens and probed.reasons == plain.reasons
    np.testing.assert_allclose(probed.prompt_logprobs["r1"], plain.prompt_logprobs["r1"], atol=1e-4)
    assert len(found) > 3
    for one in found:
        np.testing.assert_allclose(one, alone, atol=1e-4)
