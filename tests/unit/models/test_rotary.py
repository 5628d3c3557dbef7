"""Positions that depend on a length: a sequence is the same alone, beside longer ones and across that length, in
target, drafter, trainer, and reference of new weights. The oracle is transformers' own forward beside a longest row."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import drafter_specs
from specactor_ray.config.schema import Config
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.eagle.head import EagleHead, EagleHeadConfig
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.learner.batching import Sample, collate
from specactor_ray.learner.deepspeed_engine import Rendezvous
from specactor_ray.learner.trainer import Trainer
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.models.rotary import depends_on_length, fix_positions
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.target.vllm_settings import engine_arguments
from tests.families import make_model as plain_model
from tests.unit.engine_conformance import Driver, answers, noisy_tails

ORIGINAL, CONTEXT, VOCAB = 64, 256, 96
_BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.5,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_THETA = {"rope_theta": 10_000.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 6.0, 12.0], **_THETA}
_OWN = {**_LONG, "original_max_position_embeddings": ORIGINAL}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **_THETA}
_NESTED = {"full_attention": _DYNAMIC, "sliding_attention": {"rope_type": "default", **_THETA}}
_GEMMA = {
    "head_dim": 8, "query_pre_attn_scalar": 1, "sliding_window": 300, "rope_parameters": _NESTED,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {**_BASE, "original_max_position_embeddings": ORIGINAL, "rope_parameters": _LONG}),
    "llama-longrope": ("Llama", {**_BASE, "rope_parameters": {**_OWN, "factor": 4.0}}),
    "llama-dynamic": ("Llama", {**_BASE, "max_position_embeddings": ORIGINAL, "rope_parameters": _DYNAMIC}),
    "phimoe": (
        "Phimoe",
        {**_BASE, "num_local_experts": 4, "rope_parameters": {**_OWN, "short_mscale": 1.0, "long_mscale": 1.3}},
    ),
    "gemma3-layers": ("Gemma3Text", {**_BASE, "max_position_embeddings": ORIGINAL, **_GEMMA}),
    "gemma3-nested": (
        "Gemma3",
        {
            "text_config": {**_BASE, "max_position_embeddings": ORIGINAL, **_GEMMA},
            "vision_config": {**_VISION, "image_size": 56, "patch_size": 14},
        },
    ),
}
"""Name → transformers' class of the configuration, and its settings."""
_ROUNDING = 3e-4
TOKENS = np.random.default_rng(5).integers(0, VOCAB, CONTEXT)


def make_model(name: str, seed: int = 0) -> Any:
    import transformers

    kind, settings = KINDS[name]
    torch.manual_seed(seed)
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Phi-3 with `longrope`."""
    folder = tmp_path_factory.mktemp("phi3")
    with quiet_transformers():
        make_model("phi3").save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def logprobs(model: Any, tokens: np.ndarray, beside: int = 0) -> np.ndarray:
    """`(n - 1,)`: transformers' log-probabilities of `tokens[1:]`, in a batch with a row of `beside` tokens."""
    rows = torch.zeros(1 + bool(beside), max(len(tokens), beside), dtype=torch.long)
    rows[0, : len(tokens)] = ids = torch.from_numpy(np.asarray(tokens, np.int64))
    found = model(input_ids=rows, use_cache=False).logits[0, : len(tokens) - 1].float().log_softmax(-1)
    return found.gather(1, ids[1:, None])[:, 0].numpy()


@functools.cache
def own_model() -> Any:
    """transformers' Phi-3, whose positions are chosen in each forward."""
    return make_model("phi3")


def by_length(tokens: np.ndarray, max_model_len: int) -> np.ndarray:
    """The oracle: what Phi-3 computes where the longest sequence has `max_model_len` tokens."""
    return logprobs(own_model(), tokens, max_model_len)


def config(folder: str, max_model_len: int | None, **sections: Any) -> Config:
    target = {"model": folder, "dtype": "float32", "kv_cache_gb": 0.01, "max_model_len": max_model_len}
    return from_mapping({"target": target, **sections})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("longest", [200, 48])
def test_a_row_does_not_depend_on_the_others(name: str, longest: int) -> None:
    model, row = make_model(name), TOKENS[:40]
    assert depends_on_length(model.config)
    alone, expected = logprobs(model, row), logprobs(make_model(name), row, longest)
    gap = float(np.abs(alone - expected).max())
    assert (gap > 0.1) == (longest > ORIGINAL), "transformers' own row changes beside one beyond the length"
    fix_positions(model, longest)
    fix_positions(model, CONTEXT)  # the first call holds
    for beside in (0, 45, longest):
        np.testing.assert_allclose(logprobs(model, row, beside), expected, atol=_ROUNDING)


def test_other_positions_are_left_alone(tmp_path: Path) -> None:
    model = plain_model("llama")
    assert not depends_on_length(model.config)
    before = logprobs(model, TOKENS[:100])
    fix_positions(model, CONTEXT)
    np.testing.assert_array_equal(logprobs(model, TOKENS[:100]), before)
    model.save_pretrained(tmp_path)
    assert engine_arguments(config(str(tmp_path), None).target, 0)["max_model_len"] is None, "vLLM chooses"


@pytest.mark.parametrize("longest", [None, 60])
def test_an_engine_is_exact_beside_long_rows_and_across_the_length(phi3: str, longest: int | None) -> None:
    """Rows that are short, long, and cross the length, one by one, all together, and with right and wrong drafts."""
    limit = longest or CONTEXT
    lengths = (5, 20, 30, 90) if limit > ORIGINAL else (5, 20, 30)
    batch = [
        TargetRequest(f"r{n}", tuple(TOKENS[n : 2 * n].tolist()), SamplingParams(1.0, max_tokens=min(64, limit - n)))
        for n in lengths
    ]
    engine, alone = Driver(HfEngine.from_config(config(phi3, longest).target)), dict[str, list[int]]()
    for request in batch:
        alone |= answers(engine, [request]).tokens
    for drafts in (None, noisy_tails(alone, 3, VOCAB)):
        found = answers(engine, batch, drafts)
        assert found.tokens == alone
        for request in batch:
            whole = np.array([*request.prompt_token_ids, *alone[request.request_id]])
            expected = by_length(whole, limit)[len(request.prompt_token_ids) - 1 :]
            np.testing.assert_allclose(found.logprobs[request.request_id], expected, atol=_ROUNDING)


def test_all_models_of_a_run_agree(phi3: str) -> None:
    """Drafters, trainers, and references of new weights."""
    limit, row = 200, TOKENS[:20]
    expected = by_length(row, limit)
    assert engine_arguments(config(phi3, limit).target, 0)["max_model_len"] == limit
    assert engine_arguments(config(phi3, None).target, 0)["max_model_len"] == CONTEXT
    drafters = [{"method": "draft_model", "model": phi3, "dtype": "float32", "kv_cache_gb": 0.01}]
    settings = config(phi3, limit, mode="coupled", drafters=drafters)
    proposer = DraftModelProposer.from_config(drafter_specs(settings)["draft_model"], settings.target, "cpu")
    np.testing.assert_allclose(HfEngine(proposer._runner).prompt_logprobs(row), expected, atol=_ROUNDING)

    trainer = Trainer(config(phi3, limit), None, Rendezvous(0, 1, "", 0), lambda: None)
    short, long = (
        Sample(TOKENS[:1], TOKENS[1:n], np.zeros(n - 1, np.float32), 0.0, 0.0, np.ones(n - 1, np.bool_))
        for n in (20, limit)
    )
    with torch.no_grad():
        for samples in ([short], [short, long]):
            scores = trainer.engine.policy(collate(samples, range(len(samples)))).logprobs[0, :19]
            np.testing.assert_allclose(scores.numpy(), expected, atol=_ROUNDING)

    probe = trainer.layout.probe(trainer.layout.buckets(make_model("phi3", seed=1).state_dict()))
    reference = logprobs(make_model("phi3", seed=1), probe.token_ids, limit)
    np.testing.assert_allclose(probe.logprobs, reference, atol=_ROUNDING)


def test_a_model_that_is_given_to_the_engine_has_the_positions_of_its_context(phi3: str) -> None:
    engine = HfEngine(RaggedModel(make_model("phi3"), 8 << 20), max_model_len=100)
    np.testing.assert_allclose(engine.prompt_logprobs(TOKENS[:20]), by_length(TOKENS[:20], CONTEXT), atol=_ROUNDING)
    np.testing.assert_allclose(logprobs(load_model(phi3), TOKENS[:20]), by_length(TOKENS[:20], CONTEXT), atol=_ROUNDING)


def test_heads_have_fixed_positions() -> None:
    shape = {key: _BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    layer = {**shape, "max_position_embeddings": CONTEXT, "rope_parameters": {**_OWN, "factor": 4.0}}
    head, near, far = EagleHead(EagleHeadConfig(layer, VOCAB, 32, (1, 2, 3))), torch.arange(20), torch.arange(90)
    features = torch.zeros(1, 1, 32)
    alone, beside = (head.rotary(features, positions[None])[0][0, :20] for positions in (near, far))
    assert torch.equal(alone, beside)
