"""Trial of a user's own advantages and loss on a made-up batch, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specactor_ray.config.methods import is_named
from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.core.errors import ConfigError, in_words
from specactor_ray.learner.algorithms import LossInputs, RewardedGroup, loss_function, step_advantages

OWN_METRICS = frozenset({"loss", "policy_loss", "value_loss", "entropy", "kl", "importance_weight", "importance_ess"})
"""Names that metrics of a loss function may not have; nor those with `logprob_gap` in front."""


def try_functions(recipe: AlgorithmConfig) -> None:
    """Call the functions of the user's own that `algorithm.advantages` and `algorithm.loss` name. Raises ConfigError,
    with the reason, if one cannot be imported, raises, or returns what cannot be trained on."""
    for key, name, trial, fix in (
        ("algorithm.advantages", str(recipe.advantages), _try_advantages, "return one tensor for each group"),
        ("algorithm.loss", str(recipe.loss), _try_loss, "return the loss of each token, and a dictionary of metrics"),
    ):
        if not is_named(name):
            continue
        try:
            trial(recipe)
        except ConfigError:
            raise
        except Exception as error:
            problem = f"{name} fails on a made-up batch: {in_words(error)}."
            raise ConfigError(key, problem, f"{fix} (docs/training.md has an example).") from error


def _try_advantages(recipe: AlgorithmConfig) -> None:
    rewards, lengths = ((0.0, 1.0, 0.5), (1.0, 0.0), (1.0, 1.0)), ((3, 1, 4), (2, 2), (1, 5))
    groups = [
        RewardedGroup(torch.tensor(r, dtype=torch.float64), torch.tensor(n), len(set(r)) > 1)
        for r, n in zip(rewards, lengths, strict=True)
    ]
    if not any(bool(one.any()) for one in step_advantages(groups, recipe)):
        raise ValueError("all advantages are 0, for groups with different rewards")


def _try_loss(recipe: AlgorithmConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    logprobs, old, rollout = (-torch.rand(mask.shape, generator=generator) * mask for _ in range(3))
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [0.0]]) * mask
    logprobs.requires_grad_(True)
    assert recipe.clip_low is not None and recipe.clip_high is not None  # filled by `make_recipe`
    clips = (recipe.clip_low, recipe.clip_high, recipe.clip_dual)
    loss, metrics = loss_function(recipe)(LossInputs(logprobs, old, rollout, advantages, mask, mask, *clips))
    if not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics are of type {type(metrics).__name__}, not a dictionary")
    for name, value in {"the loss": loss, **{f"the metric {name}": value for name, value in metrics.items()}}.items():
        if tuple(value.shape) != tuple(mask.shape):
            raise ValueError(
                f"{name} has the shape {tuple(value.shape)}, and the log-probabilities {tuple(mask.shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} is not finite")
    for name in metrics:
        if name in OWN_METRICS or name.startswith("logprob_gap"):
            raise ValueError(f"the metric {name} has the name of another one")
    gradient = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)[0] if loss.requires_grad else None
    if gradient is None or not bool((gradient * mask).any()):
        raise ValueError("the loss has no gradient with respect to the log-probabilities")
    if not bool(torch.isfinite(gradient).all()):
        raise ValueError("the gradient of the loss is not finite")
