"""The proof at the start of an engine, with `hf` in the place of vLLM: both are engines that computed something."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.types import Probe
from specactor_ray.target import vllm_proof
from specactor_ray.target.hf import HfEngine
from specactor_ray.target.vllm_proof import LoadProof
from tests.fakes.dropping import DroppingEngine
from tests.families import FAMILIES, save_model


def target(folder: str, **more: Any) -> TargetConfig:
    return TargetConfig(folder, "vllm", dtype="float32", kv_cache_gb=0.01, max_model_len=120, **more)


def change_config(folder: str, **facts: Any) -> None:
    file = Path(folder, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("name", ["llama-tied", "gemma3-tied", "glm4-moe"])
def test_an_engine_with_the_weights_passes_and_one_with_others_does_not(
    name: str, updates: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = target(save_model(name, tmp_path / "own"), updates=updates)
    with caplog.at_level(logging.WARNING):
        LoadProof(config).require(engine := HfEngine.from_config(config))
    assert not caplog.messages and engine.weight_version == 0
    other = HfEngine.from_config(target(save_model(name, tmp_path / "other", seed=1)))
    with pytest.raises(ModelLoadError, match=r"transformers.* 0\.001"):
        LoadProof(config).require(other)


@pytest.mark.parametrize("window", [8, 40, 64])
def test_a_window_that_the_engine_ignores_is_found(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, f"windowed-{window}", ("mistral", {"sliding_window": window}))
    config = target(save_model(f"windowed-{window}", tmp_path / "own"))
    whole = save_model(f"windowed-{window}", tmp_path / "whole")
    change_config(whole, sliding_window=None)
    message = rf"window of {window} .* token ({window + 1}|{window + 2}) of \d+"
    with pytest.raises(ModelLoadError, match=message):
        LoadProof(config).require(HfEngine.from_config(target(whole)))
    LoadProof(config).require(HfEngine.from_config(config))


def test_an_engine_that_takes_no_new_weights_is_refused_if_they_will_come(tmp_path: Path) -> None:
    class Refusing(DroppingEngine):
        def load_weights(self, version: int, state_dict: Any) -> None:
            super().load_weights(version, {name: tensor + 1 for name, tensor in state_dict.items()})

    folder = save_model("llama", tmp_path)
    LoadProof(target(folder)).require(Refusing.from_config(target(folder)))
    with pytest.raises(ModelLoadError, match="new weights"):
        LoadProof(target(folder, updates=True)).require(Refusing.from_config(target(folder)))


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "bitsandbytes"])
def test_quantized_weights_are_not_compared_and_cannot_be_replaced(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model("llama", tmp_path)
    change_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(ModelLoadError, match=method):
        LoadProof(target(folder, updates=True))
    LoadProof(target(folder))
    assert f"not compared with transformers: its weights are quantized ({method})" in caplog.text


@pytest.mark.parametrize(
    ("more", "free", "reason"),
    [
        ({}, 1000.0, "it takes 0.0 GiB, and a verifier may use 0.0 GiB"),
        ({"engine_arguments": {"kv_cache_dtype": "fp8"}}, 1e12, "kv_cache_dtype changes what vLLM computes"),
    ],
)
def test_what_is_not_compared_is_said(
    more: Any, free: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = save_model("llama", tmp_path)
    monkeypatch.setattr(vllm_proof, "available_bytes", lambda: free)
    monkeypatch.setattr(vllm_proof, "load_model", lambda *_, **__: pytest.fail("its weights were loaded"))
    LoadProof(target(folder, **more)).require(None)  # type: ignore[arg-type]
    assert reason in caplog.text


def test_a_model_that_transformers_cannot_run_is_said_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = save_model("llama", tmp_path)

    def fail(model: Any) -> Probe:
        raise NotImplementedError("no kernel for it")

    monkeypatch.setattr(vllm_proof, "probe_model", fail)
    LoadProof(target(folder)).require(None)  # type: ignore[arg-type]
    assert "not compared with transformers: transformers cannot run it (no kernel for it)" in caplog.text
    with pytest.raises(NotImplementedError):
        LoadProof(target(folder, updates=True))


def test_a_context_of_two_tokens_has_nothing_to_compare(tmp_path: Path) -> None:
    config = replace(target(save_model("llama", tmp_path)), max_model_len=2)
    LoadProof(config).require(HfEngine.from_config(config))


def test_a_gap_is_that_of_the_worst_part() -> None:
    truth = np.zeros(95, np.float32)
    probe = Probe(np.zeros(96, np.int32), truth, 0.001)
    late = np.where(np.arange(95) >= 60, 1.0, 0.0).astype(np.float32)
    assert probe.gap(late) > 0.5
    few = np.where(np.arange(95) % 5 == 0, 1.0, 0.0).astype(np.float32)
    assert probe.gap(few) == 0.0, "a quarter of the positions may move far"
    assert probe.gap(late[:47]) == 0.0 and np.isnan(probe.gap(truth * np.nan))
