"""The trainer's forwards: those of transformers in evaluation mode for each row alone, in a micro-batch with longer and
shorter rows, with and without gradient checkpointing; a model of which that is not true is refused."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.learner.batching import MicroBatch, Sample, collate
from specactor_ray.learner.deepspeed_engine import Rendezvous
from specactor_ray.learner.engine import PolicyModel, TorchEngine, trunk_of
from specactor_ray.learner.trainer import Trainer, attend_as_in_eager_mode, recompute_layers
from specactor_ray.models.probe import eager_logprobs
from tests.families import PROVED, REFUSED, VOCAB_SIZE, make_model, save_model

torch.set_num_threads(1)
NOISY = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
    "gemma2": {"attn_logit_softcapping": 1.0, "sliding_window": 8},
    "vaultgemma": {"attn_logit_softcapping": 1.0, "sliding_window": 8},
}
"""Family → settings that transformers' training mode, or SDPA, computes otherwise."""
PADDED = {
    *(kind for kind, settings in PROVED.items() if "sliding_window" in settings or kind in ("gemma3_text", "afmoe")),
    *REFUSED,
} - {"diffllama", "minimax_m3_vl_text", "youtu"}
"""Families with windows, convolutions, recurrence, or attention of their own: their samples share no row."""
TRAINED = [kind for kind in (*PROVED, *REFUSED) if kind != "cpmant"]
"""The trainer refuses it, too: `test_ranks.py`."""


def samples() -> list[Sample]:
    """Outputs of several lengths, which share a micro-batch; paddings are longer than any window."""
    rng = np.random.default_rng(0)
    tokens = [(rng.integers(3, VOCAB_SIZE, p), rng.integers(3, VOCAB_SIZE, n)) for p, n in ((5, 30), (9, 4), (3, 60))]
    return [Sample(p, n, np.zeros(len(n), np.float32), 1.0, 1.0, np.ones(len(n), np.bool_)) for p, n in tokens]


def scored(
    policy: PolicyModel, *groups: list[Sample], chunks: int = 1
) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Log-probabilities of each output, and the gradients of their sum."""
    policy.requires_grad_(True).zero_grad()
    found = []
    for chosen in groups:
        batch = collate(chosen, range(len(chosen)))
        scores = policy(batch, chunks).logprobs
        scores.sum().backward()
        found += [scores[row].detach().numpy()[batch.mask[row].numpy() > 0] for row in range(len(chosen))]
    gradients = {name: one.grad.clone() for name, one in policy.model.named_parameters() if one.grad is not None}
    return found, gradients


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in TRAINED), *NOISY.items()])
def test_scores_and_gradients_are_those_of_each_row_alone_in_transformers(kind: str, settings: dict[str, Any]) -> None:
    policy = PolicyModel(make_model(kind, **settings))
    attend_as_in_eager_mode(policy)
    assert policy.packed == (kind not in PADDED)
    together, gradients = scored(policy, samples())
    recompute_layers(policy.model)
    again, gradients_again = scored(policy, samples(), chunks=5)
    assert not any(module.training for module in policy.model.modules())

    plain = PolicyModel(make_model(kind, **settings))
    plain.model.set_attn_implementation("eager")
    for sample, ours, ours_again in zip(samples(), together, again, strict=True):
        theirs = eager_logprobs(plain.model, np.concatenate([sample.prompt, sample.output]).astype(np.int32))
        theirs = theirs[len(sample.prompt) - 1 :]
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
        np.testing.assert_allclose(ours_again, theirs, atol=1e-3)
    _, expected = scored(plain, *([sample] for sample in samples()))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert gradients.keys() == gradients_again.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4 * largest, rtol=0)
        torch.testing.assert_close(gradients_again[name], gradients[name], atol=1e-6 * largest, rtol=0)


CAPPED = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
    "minicpm3": {},
    "llama-tied": {},
    "gpt2": {},
}
"""Family → settings of what it does with its logits."""


def holes(sample: Sample, share: float) -> Sample:
    """Tokens of an environment in between, or, without any of its own, an idle rank's."""
    mask = np.random.default_rng(len(sample.output)).random(len(sample.output)) < share
    return replace(sample, loss_mask=mask)


def scored_at_once(policy: PolicyModel, batch: MicroBatch) -> list[torch.Tensor]:
    """`TokenScores` from all logits of transformers."""
    known: dict[str, torch.Tensor] = {}
    hook = trunk_of(policy.model).register_forward_hook(lambda _, __, output: known.update(output))
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    hook.remove()
    assert policy.value_head is not None
    rows, mask = torch.arange(len(logits))[:, None], batch.mask
    logprobs = torch.log_softmax(logits[rows, batch.positions] / policy.temperature, dim=-1)
    chosen = logprobs.gather(2, batch.targets[:, :, None])[:, :, 0]
    entropy = torch.distributions.Categorical(logits=logprobs).entropy()
    return [
        x * mask
        for x in (chosen, entropy, policy.value_head(known["last_hidden_state"])[rows, batch.positions][..., 0])
    ]


@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("kind", CAPPED)
def test_chunks_have_the_scores_and_gradients_of_all_logits_at_once(kind: str, share: float) -> None:
    """With an entropy bonus and a value head; chunks of one position, and more chunks than positions, too."""
    model = make_model(kind, **CAPPED[kind]).requires_grad_(True)
    policy = PolicyModel(model, 0.7, value_head=True, entropy_gradient=True)
    attend_as_in_eager_mode(policy)
    with torch.no_grad():
        policy.value_head.weight.normal_()
    batch = collate([holes(sample, share) for sample in samples()], range(3))
    weights, outcomes = torch.randn(3, *batch.mask.shape), []
    count = int(batch.mask.sum())
    plain = PolicyModel(make_model(kind, **CAPPED[kind]).requires_grad_(True), 0.7, value_head=True)
    plain.load_state_dict(policy.state_dict())
    plain.model.set_attn_implementation("eager")
    for model, score in [(plain, scored_at_once)] + [
        (policy, functools.partial(PolicyModel.forward, chunks=chunks))
        for chunks in (1, 2, 7, max(count, 1), count + 3)
    ]:
        model.zero_grad()
        scores = torch.stack(list(score(model, batch)))
        (scores * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            torch.testing.assert_close(torch.stack(list(score(model, batch))), scores, atol=1e-5, rtol=1e-5)
        outcomes.append((scores.detach(), gradients))
    (expected, gradients), *others = outcomes
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert (largest > 0) == (share > 0)
    for scores, found in others:
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4 * largest + 1e-30, rtol=0)


@pytest.mark.parametrize(("settings", "temperature"), [({"max_position_embeddings": 5}, 1.0), ({}, 0.01)])
def test_short_contexts_and_low_temperatures_are_no_difference(settings: dict[str, Any], temperature: float) -> None:
    policy = PolicyModel(make_model("llama", **settings), temperature)
    attend_as_in_eager_mode(policy)
    assert policy.temperature == temperature and policy.packed


def test_the_reference_attends_as_the_policy_does(tmp_path: Path) -> None:
    target = {"model": save_model("gemma2", tmp_path), "dtype": "float32"}
    config = from_mapping({"target": target, "algorithm": {"kl_coef": 0.1}})
    trainer = Trainer(config, None, Rendezvous(0, 1, "", 0), lambda: None)
    (reference,) = trainer.engine._frozen
    assert reference.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("tied", [True, False])
def test_a_rounded_reference_has_the_log_probabilities_of_the_policy_under_autocast(tied: bool) -> None:
    policy = PolicyModel(make_model("llama", tie_word_embeddings=tied).requires_grad_(True))
    engine = TorchEngine(policy, TrainerConfig(dtype="bfloat16"))
    kept, before = copy.deepcopy(policy), sum(parameter.nbytes for parameter in policy.parameters())
    reference, batch = engine.frozen(kept), collate(samples(), range(3))
    assert kept.model.get_input_embeddings().weight.dtype == torch.float32
    assert sum(parameter.nbytes for parameter in kept.parameters()) < 0.8 * before
    with torch.no_grad():
        assert torch.equal(engine.score(batch).logprobs, engine.score(batch, reference).logprobs)


def test_less_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    for recomputed in (False, True):
        model = make_model("llama").requires_grad_(True)
        if recomputed:
            recompute_layers(model)
        seen: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x) or x, lambda x: x):
            model(torch.arange(20)[None], use_cache=False)
        kept.append(len(seen))
    assert kept[1] < kept[0] / 3
    with pytest.raises(ModelLoadError, match="gradient_checkpointing=false"):
        recompute_layers(torch.nn.Linear(2, 2))
