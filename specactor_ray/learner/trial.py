"""Trial of a user's own advantages and loss on a made-up batch, before anything is started."""

from __future__ import annotations

import torch

from specactor_ray.config.methods import is_named
from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.core.errors import ConfigError, in_words
from specactor_ray.learner.algorithms import LossInputs, RewardedGroup, function_of, step_advantages

TAKEN = ("loss", "policy_loss", "value_loss", "entropy", "kl", "importance_weight", "importance_ess", "grad_norm")
"""Names of the update's own metrics, beside those with `logprob_gap` in front."""


def try_functions(recipe: AlgorithmConfig) -> None:
    """Call the user's functions that `algorithm.advantages` and `algorithm.loss` name. Raises ConfigError, with the
    reason, if one cannot be imported, raises, or returns what cannot be trained on."""
    for key, trial, fix in (
        ("advantages", _try_advantages, "return one tensor for each group"),
        ("loss", _try_loss, "return the loss of each token, and a dictionary of metrics"),
    ):
        if not is_named(name := str(getattr(recipe, key))):
            continue
        function_of(recipe, key)
        try:
            trial(recipe)
        except Exception as error:
            problem = f"{name} fails on a made-up batch: {in_words(error)}."
            raise ConfigError(f"algorithm.{key}", problem, f"{fix} (docs/training.md has an example).") from error


def _try_advantages(recipe: AlgorithmConfig) -> None:
    rewards, lengths = ((0.0, 1.0, 0.5), (1.0, 0.0), (1.0, 1.0)), ((3, 1, 4), (2, 2), (1, 5))
    groups = [
        RewardedGroup(torch.tensor(r).double(), torch.tensor(n), len(set(r)) > 1)
        for r, n in zip(rewards, lengths, strict=True)
    ]
    if not any(bool(one.any()) for one in step_advantages(groups, recipe)):
        raise ValueError("all advantages are 0, for groups with different rewards")


def _try_loss(recipe: AlgorithmConfig) -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    old = -torch.arange(1.0, 17.0).reshape(4, 4).sqrt() * mask
    logprobs = (0.9 * old).requires_grad_(True)
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [0.0]]) * mask
    assert recipe.clip_low is not None and recipe.clip_high is not None  # filled by `make_recipe`
    clips = (recipe.clip_low, recipe.clip_high, recipe.clip_dual)
    loss, metrics = function_of(recipe, "loss")(LossInputs(logprobs, old, 1.1 * old, advantages, mask, mask, *clips))
    for name, value in (("the loss", loss), *((f"the metric {name}", value) for name, value in metrics.items())):
        if value.shape != mask.shape:
            raise ValueError(
                f"{name} has the shape {tuple(value.shape)}, and the log-probabilities {tuple(mask.shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} is not finite")
    if taken := [name for name in metrics if name in TAKEN or name.startswith("logprob_gap")]:
        raise ValueError(f"the metric {taken[0]} has the name of another one")
    gradient = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)[0] if loss.requires_grad else None
    if gradient is None or not bool((gradient * mask).any()):
        raise ValueError("the loss has no gradient with respect to the log-probabilities")
    if not bool(torch.isfinite(gradient).all()):
        raise ValueError("the gradient of the loss is not finite")
