"""Every tensor of an update reaches the engine, one at a time and all at once; one that does not is found by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import WeightsError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.probe import eager_logprobs, probe_of, probe_tokens
from specactor_ray.models.weight_buckets import WeightLayout, unpack
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.target.proof import prove
from specactor_ray.transport.messages import WeightSet
from tests.fakes.dropping import DroppingEngine
from tests.families import FAMILIES, VOCAB_SIZE, make_model, one_of_each, save_model

TOKENS = probe_tokens(VOCAB_SIZE)


def make_engine(folder: str, dtype: str = "float32", kind: type[HfEngine] = HfEngine) -> HfEngine:
    target = from_mapping({"target": {"model": folder, "dtype": dtype, "kv_cache_gb": 0.01, "max_model_len": 120}})
    return kind.from_config(target.target)


@functools.cache
def moved(name: str) -> dict[str, torch.Tensor]:
    """Another seed's tensors, without the second names of tied ones."""
    return make_model(name, seed=1).state_dict()


def sent(layout: WeightLayout, weights: Mapping[str, Any]) -> tuple[WeightSet, dict[str, torch.Tensor]]:
    """The weights as an engine gets them."""
    buckets = list(layout.buckets(weights))
    tensors = {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}
    return WeightSet(1, (), probe=layout.probe(buckets)), tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_one_tensor_at_a_time_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    folder, first = save_model(name, tmp_path), make_model(name).state_dict()
    engine, layout = make_engine(folder), WeightLayout.of(folder, "float32", 10_000)
    before = engine.prompt_logprobs(TOKENS)
    np.testing.assert_allclose(before, eager_logprobs(make_model(name), TOKENS), atol=1e-4)
    own = [key for key in first if key not in layout.tied]
    for version, key in enumerate(one_of_each(own), start=1):
        ties = {other: moved(name)[key] for other, owner in layout.tied.items() if owner == key}
        weights, tensors = sent(layout, {**first, key: moved(name)[key], **ties})
        engine.load_weights(version, tensors)
        found = engine.prompt_logprobs(TOKENS)
        assert weights.probe is not None
        np.testing.assert_allclose(found, weights.probe.logprobs, atol=1e-4, err_msg=key)
        assert np.abs(found - before).max() > 1e-3, f"{key} has no effect in this test"
        prove(engine, weights.probe, "weights of version 1 did not arrive", tensors)
        assert not engine.stale_weights(tensors)
    weights, tensors = sent(layout, moved(name))
    engine.load_weights(len(own) + 1, tensors)
    fresh = make_engine(save_model(name, tmp_path / "new", seed=1))
    assert np.array_equal(engine.prompt_logprobs(TOKENS), fresh.prompt_logprobs(TOKENS))


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("llama-tied", "model.embed_tokens.weight"),
        ("llama-biases", "model.layers.1.self_attn.q_proj.bias"),
        ("qwen3-tied", "model.layers.0.self_attn.k_norm.weight"),
        ("gpt2-tied", "transformer.ln_f.bias"),
        ("qwen3-moe", "model.layers.0.mlp.experts.down_proj"),
        ("glm4-moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dropped_tensor_is_found_by_name(name: str, dropped: str, dtype: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path)
    engine, layout = make_engine(folder, dtype, DroppingEngine), WeightLayout.of(folder, dtype, 10_000)
    engine.dropped = dropped  # type: ignore[attr-defined]
    weights, tensors = sent(layout, {**moved(name)})
    engine.load_weights(1, tensors)
    with pytest.raises(WeightsError, match=rf"version 1 .*{dropped}"):
        prove(engine, weights.probe, "weights of version 1 did not arrive", tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_rounding_to_bfloat16_is_no_lost_weight(name: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path)
    engine, layout = make_engine(folder, "bfloat16"), WeightLayout.of(folder, "bfloat16", 10_000)
    weights, tensors = sent(layout, moved(name))
    with pytest.raises(WeightsError):
        prove(engine, weights.probe, "weights of version 1 did not arrive", tensors)
    engine.load_weights(1, tensors)
    prove(engine, weights.probe, "weights of version 1 did not arrive", tensors)


def test_a_probe_copies_no_weights_and_refuses_what_is_no_model(tmp_path: Path) -> None:
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
