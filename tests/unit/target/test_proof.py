"""Proofs of engines: every tensor of an update reaches the engine, and one that does not is found; and the proof at the
start of vLLM, here with `hf` in its place: both are engines that computed something."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ModelLoadError, WeightsError
from specactor_ray.core.types import Probe, SamplingParams
from specactor_ray.models.probe import eager_logprobs, probe_of, probe_tokens
from specactor_ray.models.weight_buckets import WeightLayout, unpack
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target import build
from specactor_ray.target.build import reference_of, require_equal
from specactor_ray.target.hf import HfEngine
from specactor_ray.target.proof import prove
from tests.fakes.dropping import DroppingEngine
from tests.families import FAMILIES, VOCAB_SIZE, make_model, one_of_each, save_model

TOKENS = probe_tokens(VOCAB_SIZE)


def target(folder: str, dtype: str = "float32", **more: Any) -> TargetConfig:
    return TargetConfig(folder, "vllm", **{"dtype": dtype, "kv_cache_gb": 0.01, "max_model_len": 120, **more})


def make_engine(folder: str, dtype: str = "float32", kind: type[HfEngine] = HfEngine) -> HfEngine:
    return kind.from_config(target(folder, dtype))


@functools.cache
def moved(name: str) -> dict[str, torch.Tensor]:
    """Another seed's tensors, without the second names of tied ones."""
    return make_model(name, seed=1).state_dict()


def sent(layout: WeightLayout, weights: Mapping[str, Any]) -> tuple[Probe, dict[str, torch.Tensor]]:
    """The weights as an engine gets them, and their probe."""
    buckets = list(layout.buckets(weights))
    return layout.probe(buckets), {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}


@pytest.mark.parametrize("name", FAMILIES)
def test_one_tensor_at_a_time_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    folder, first = save_model(name, tmp_path), make_model(name).state_dict()
    engine, layout = make_engine(folder), WeightLayout.of(folder, "float32", 10_000)
    before = engine.prompt_logprobs(TOKENS)
    np.testing.assert_allclose(before, eager_logprobs(make_model(name), TOKENS), atol=1e-4)
    own = [key for key in first if key not in layout.tied]
    for version, key in enumerate(one_of_each(own), start=1):
        ties = {other: moved(name)[key] for other, owner in layout.tied.items() if owner == key}
        probe, tensors = sent(layout, {**first, key: moved(name)[key], **ties})
        assert tensors.keys() == set(own) and all(torch.equal(tensors[other], first[other]) for other in {*own} - {key})
        engine.load_weights(version, tensors)
        found = engine.prompt_logprobs(TOKENS)
        np.testing.assert_allclose(found, probe.logprobs, atol=1e-4, err_msg=key)
        assert np.abs(found - before).max() > 1e-3, f"{key} has no effect in this test"
        prove(engine, probe, "")
    engine.load_weights(len(own) + 1, sent(layout, moved(name))[1])
    fresh = make_engine(save_model(name, tmp_path / "new", seed=1))
    assert np.array_equal(engine.prompt_logprobs(TOKENS), fresh.prompt_logprobs(TOKENS))


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("llama-tied", "model.embed_tokens.weight"),
        ("llama-biases", "model.layers.1.mlp.down_proj.bias"),
        ("qwen3-tied", "model.layers.0.self_attn.k_norm.weight"),
        ("gpt2-tied", "transformer.ln_f.bias"),
        ("qwen3-moe", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_a_dropped_tensor_is_found(name: str, dropped: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path)
    engine, layout = make_engine(folder, kind=DroppingEngine), WeightLayout.of(folder, "float32", 10_000)
    engine.dropped = dropped  # type: ignore[attr-defined]
    probe, tensors = sent(layout, moved(name))
    engine.load_weights(1, tensors)
    with pytest.raises(WeightsError, match=r"^version 1"):
        prove(engine, probe, "version 1")


@pytest.mark.parametrize("name", ["llama-biases", "gemma3-tied", "gpt2-tied", "glm4-moe"])
def test_rounding_to_bfloat16_is_no_lost_weight(name: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path)
    engine, layout = make_engine(folder, "bfloat16"), WeightLayout.of(folder, "bfloat16", 10_000)
    probe, tensors = sent(layout, moved(name))
    with pytest.raises(WeightsError):
        prove(engine, probe, "")
    engine.load_weights(1, tensors)
    prove(engine, probe, "")


def test_a_probe_refuses_what_is_no_model(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    _, tensors = sent(WeightLayout.of(folder, "float32", 10_000), moved("llama"))
    with pytest.raises(WeightsError, match=r"lack lm_head\.weight"):
        probe_of(folder, "float32", {key: tensor for key, tensor in tensors.items() if key != "lm_head.weight"})
    with pytest.raises(WeightsError, match="diverged"):
        probe_of(folder, "float32", {**tensors, "model.norm.weight": tensors["model.norm.weight"] * float("nan")})


def test_a_probe_leaves_requests_and_cache_as_they_were(tmp_path: Path) -> None:
    engine = make_engine(save_model("llama", tmp_path))
    request = TargetRequest("r", (3, 4, 5), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))

    def outputs(probing: bool) -> list[int]:
        found: list[int] = []
        engine.table.clear()
        engine.add(engine.table.open(request))
        while engine.has_work():
            found += engine.step().tokens.tolist()
            if probing:
                free = engine._model.cache.free_slots
                engine.prompt_logprobs(TOKENS)
                assert engine._model.cache.free_slots == free
        engine.reset_prefix_cache()
        return found

    alone = outputs(False)
    assert outputs(True) == alone and len(alone) == 20
    long = np.tile(TOKENS, 20)[:119]
    assert engine.prompt_logprobs(long).shape == (118,)


# ---- the start of vLLM ----


def start(config: TargetConfig, engine: Any) -> None:
    require_equal(engine, config, *reference_of(config))


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("name", ["llama-tied", "glm4-moe"])
def test_an_engine_with_the_weights_passes_and_one_with_others_does_not(
    name: str, updates: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = target(save_model(name, tmp_path / "own"), updates=updates)
    with caplog.at_level(logging.WARNING):
        start(config, engine := HfEngine.from_config(config))
    assert not caplog.messages and engine.weight_version == 0
    with pytest.raises(ModelLoadError, match=r"transformers.* 0\.001"):
        start(config, make_engine(save_model(name, tmp_path / "other", seed=1)))


def change_config(folder: str, **facts: Any) -> None:
    file = Path(folder, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize("window", [8, 64])
def test_a_window_that_the_engine_ignores_is_found(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, f"windowed-{window}", ("mistral", {"sliding_window": window}))
    config = target(save_model(f"windowed-{window}", tmp_path / "own"))
    whole = save_model(f"windowed-{window}", tmp_path / "whole")
    change_config(whole, sliding_window=None)
    with pytest.raises(ModelLoadError, match=rf"token ({window + 1}|{window + 2}) of \d+"):
        start(config, make_engine(whole))
    start(config, HfEngine.from_config(config))


def test_an_engine_that_takes_no_new_weights_is_refused_if_they_will_come(tmp_path: Path) -> None:
    class Refusing(DroppingEngine):
        def load_weights(self, version: int, state_dict: Any) -> None:
            super().load_weights(version, {name: tensor + 1 for name, tensor in state_dict.items()})

    folder = save_model("llama", tmp_path)
    start(target(folder), Refusing.from_config(target(folder)))
    with pytest.raises(ModelLoadError, match="new weights"):
        start(target(folder, updates=True), Refusing.from_config(target(folder)))


@pytest.mark.parametrize(
    ("facts", "more", "free", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, 1e12, r"its weights are quantized (fp8)"),
        ({}, {}, 1000.0, "it takes 0.0 GiB, and a verifier may use 0.0 GiB"),
        ({}, {"engine_arguments": {"kv_cache_dtype": "fp8"}}, 1e12, "kv_cache_dtype changes what vLLM computes"),
    ],
)
def test_what_is_not_compared_is_logged(
    facts: Any, more: Any, free: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Quantized weights cannot be replaced."""
    folder = save_model("llama", tmp_path)
    change_config(folder, **facts)
    monkeypatch.setattr(build, "available_bytes", lambda: free)
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("its weights were loaded"))
    start(target(folder, **more), None)
    assert reason in caplog.text
    if facts:
        with pytest.raises(ModelLoadError, match="fp8"):
            reference_of(target(folder, updates=True))


def test_a_model_that_transformers_cannot_run_is_logged_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = save_model("llama", tmp_path)

    def fail(model: Any) -> Probe:
        raise NotImplementedError("no kernel for it")

    monkeypatch.setattr(build, "probe_model", fail)
    start(target(folder), None)
    assert "not compared with transformers: transformers cannot run it (no kernel for it)" in caplog.text
    with pytest.raises(NotImplementedError):
        reference_of(target(folder, updates=True))


def test_a_context_of_two_tokens_has_nothing_to_compare(tmp_path: Path) -> None:
    config = target(save_model("llama", tmp_path), max_model_len=2)
    start(config, HfEngine.from_config(config))


def test_a_gap_is_that_of_the_worst_part() -> None:
    truth = np.zeros(95, np.float32)
    probe = Probe(np.zeros(96, np.int32), truth, 0.001)
    late = np.where(np.arange(95) >= 60, 1.0, 0.0).astype(np.float32)
    assert probe.gap(late) > 0.5
    few = np.where(np.arange(95) % 5 == 0, 1.0, 0.0).astype(np.float32)
    assert probe.gap(few) == 0.0, "a quarter of the positions may move far"
    assert probe.gap(late[:47]) == 0.0 and np.isnan(probe.gap(truth * np.nan))
