"""The trainer's forwards: those of transformers in evaluation mode, with and without gradient checkpointing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.learner.batching import Sample, collate
from specactor_ray.learner.engine import PolicyModel
from specactor_ray.models.probe import eager_logprobs
from specactor_ray.models.training import attend_as_in_eager_mode, recompute_layers
from tests.proved_families import PROVED, make

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


def samples() -> list[Sample]:
    """Outputs of several lengths, which share a micro-batch."""
    rng = np.random.default_rng(0)
    shapes = [(5, 30), (9, 4), (3, 12)]
    return [
        Sample(rng.integers(3, 96, p), rng.integers(3, 96, n), np.zeros(n, np.float32), 1.0, 1.0, np.ones(n, np.bool_))
        for p, n in shapes
    ]


def scored(model: Any, chosen: list[Sample]) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Log-probabilities of each output, and the gradients of their mean."""
    policy = PolicyModel(model.requires_grad_(True))
    batch = collate(chosen, range(len(chosen)))
    scores = policy(batch).logprobs
    scores.sum().backward()
    found = [scores[row].detach().numpy()[batch.mask[row].numpy() > 0] for row in range(len(chosen))]
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return found, gradients


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("recomputed", [False, True])
def test_scores_and_gradients_are_those_of_evaluation_mode(kind: str, recomputed: bool) -> None:
    settings = {**PROVED[kind], **NOISY[kind]}
    model = make(kind, settings)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    attend_as_in_eager_mode(model)
    if recomputed:
        recompute_layers(model)
    found, gradients = scored(model, samples())
    assert not any(module.training for module in model.modules())
    plain = make(kind, settings)
    for sample, ours in zip(samples(), found, strict=True):
        theirs = eager_logprobs(plain, np.concatenate([sample.prompt, sample.output]).astype(np.int32))
        np.testing.assert_allclose(ours, theirs[len(sample.prompt) - 1 :], atol=1e-4)
    plain.set_attn_implementation("eager")
    _, expected = scored(plain, samples())
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-4, rtol=1e-3)


def test_less_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    for recomputed in (False, True):
        model = make("llama", {}).requires_grad_(True)
        if recomputed:
            recompute_layers(model)
        seen: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x) or x, lambda x: x):
            model(torch.arange(20)[None], use_cache=False)
        kept.append(len(seen))
    assert kept[1] < kept[0] / 3


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="gradient_checkpointing=false"):
        recompute_layers(torch.nn.Linear(2, 2))
