"""The formulas against numbers worked out by hand. Those of a whole step are in `test_recomputation.py`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe
from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.learner.algorithms import (
    SAME_REWARD,
    LossInputs,
    clip_loss,
    generalized_advantages,
    kl_estimate,
    kl_loss,
    rewarded_group,
    step_advantages,
    value_loss,
)


def close(actual: torch.Tensor, expected: list, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual.float(), torch.tensor(expected, dtype=torch.float32), atol=atol, rtol=0)


def test_nearly_equal_rewards_give_no_advantage() -> None:
    """The mean of equal rewards is off by rounding, which the division by their deviation would make much of."""
    names = ("grpo", "rloo", "reinforce_pp")
    for name, reward, size in itertools.product(names, (10.1, -3.3, 1e6 / 3), (2, 31)):
        recipe, rewards = recipe_of(name), [reward + SAME_REWARD / 2, *[reward] * (size - 1)]
        (found,) = step_advantages([rewarded_group(recipe, rewards, [3] * size, 32)], recipe)
        close(found, [0.0] * size, atol=0)


def test_generalized_advantages() -> None:
    """Tokens with mask 0, of an environment or behind the output, take no time."""
    rewards = torch.tensor([[0.0, 9.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0]])
    values = torch.tensor([[0.5, 9.0, 0.25, 0.5], [1.0, 1.0, 7.0, 7.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    advantages, returns = generalized_advantages(rewards, values, mask, lam=0.5)
    # Row 0 from the end: δ = 1 - .5 = .5; δ = .5 - .25 = .25, A = .25 + .5*.5; δ = .25 - .5 = -.25, A = -.25 + .5*.5
    # Row 1 ends at its second token: δ = 2 - 1 = 1; δ = 1 - 1 = 0, A = .5
    close(advantages, [[0.0, 0.0, 0.5, 0.5], [0.5, 1.0, 0.0, 0.0]])
    close(returns, [[0.5, 0.0, 0.75, 1.0], [1.5, 2.0, 0.0, 0.0]])


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("width", [1, 2, 63, 1025])
def test_generalized_advantages_are_those_of_one_token_after_the_other(width: int, lam: float) -> None:
    torch.manual_seed(width)
    rewards, values = torch.randn(6, width), torch.randn(6, width)
    mask = (torch.rand(6, width) < torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0, 1.0])[:, None]).float()
    mask[-1, width // 2 + 1 :] = 0.0
    expected = torch.zeros(6, width, dtype=torch.float64)
    for row in range(6):
        later, next_value = 0.0, 0.0
        for t in reversed(range(width)):
            if mask[row, t]:
                later = float(rewards[row, t]) + next_value - float(values[row, t]) + lam * later
                next_value, expected[row, t] = float(values[row, t]), later
    advantages, returns = generalized_advantages(rewards, values, mask, lam)
    torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(returns, (expected + values) * mask, atol=1e-12, rtol=1e-12)


def recipe_of(algorithm: str, **more: Any) -> AlgorithmConfig:
    settings = {
        "algorithm": {"name": algorithm, **more},
        "sampling": {"max_tokens": 32},
        "target": {"dtype": "float32"},
    }
    return make_recipe(from_mapping({"mode": "plain", **settings}))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 1.0, -1.1, 0.0),
        (1.5, 1.0, -1.3, 1.0),  # a good token may not grow beyond 1 + ε_high
        (1.5, -1.0, 1.5, 0.0),  # a bad one that grew pays in full
        (0.5, -1.0, 0.8, 1.0),  # a bad token need not shrink below 1 - ε_low
        (0.5, 1.0, -0.5, 0.0),
        (2.5, -1.0, 2.0, 1.0),  # at most the dual clip
        (math.exp(700), -1.0, 2.0, 1.0),
        (math.exp(700), 1.0, -1.3, 1.0),
    ],
)
def test_clip_loss(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    old = torch.tensor([[-2.0]])
    logprobs, one = (old + math.log(ratio)).requires_grad_(True), torch.ones(1, 1)
    inputs = LossInputs(logprobs, old, old, advantage * one, one, one, clip_low=0.2, clip_high=0.3, clip_dual=2.0)
    got, metrics = clip_loss(inputs)
    close(got, [[loss]])
    close(metrics["clip_fraction"], [[clipped]])
    (gradient,) = torch.autograd.grad(got.sum(), logprobs)
    close(gradient, [[0.0 if clipped else -ratio * advantage]])


def test_value_loss() -> None:
    values, old, returns = torch.tensor([[2.0, 1.1]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]])
    close(value_loss(values, old, returns), [[0.5 * 0.64, 0.5 * 0.81]])  # the first is clipped to 1.2


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_kl(drift: float) -> None:
    """The estimate is unbiased, and the expected gradient of the loss is that of the divergence: sums over all tokens,
    weighted by the policy that sampled them."""
    torch.manual_seed(2)
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, dtype=torch.float64).log_softmax(0)
    old = (logits.detach() + drift * torch.randn(50, dtype=torch.float64)).log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference)).sum(), divergence, atol=1e-9, rtol=0)
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((old.exp() * kl_loss(policy, old, reference, cap=1e9)).sum(), logits)
    torch.testing.assert_close(expected, exact, atol=1e-12, rtol=1e-9)


def test_what_a_recipe_leaves_to_the_algorithm() -> None:
    defaults = {"dapo": (6, 0.28, True, "token", True), "grpo": (0, 0.2, False, "sequence", True)}
    defaults |= {"dr_grpo": (0, 0.2, False, "constant", False), "gspo": (0, 4e-4, False, "sequence", True)}
    for name, expected in defaults.items():
        recipe = recipe_of(name)
        found = (recipe.overlong_buffer, recipe.clip_high, recipe.dynamic_sampling, recipe.loss_aggregation)
        assert (*found, recipe.scale_by_std) == expected
    assert recipe_of("gspo", clip_low=0.1, loss="clip").loss == "clip", "a preset is only a default"


@pytest.mark.parametrize(
    ("given", "level", "cap"),
    [
        ({}, "off", None),
        ({"trainer": {"max_staleness": 1}}, "token", 2.0),
        ({"target": {"dtype": "bfloat16"}}, "token", 2.0),
        ({"trainer": {"dtype": "bfloat16"}}, "token", 2.0),
        ({"target": {"dtype": "bfloat16"}, "algorithm": {"importance": "off"}}, "off", None),
        ({"algorithm": {"importance_cap": 5.0}}, "token", 5.0),
        ({"algorithm": {"importance": "mask"}}, "mask", 3.0),
    ],
)
def test_rollout_and_trainer_of_different_arithmetic_are_corrected_for(
    given: dict[str, Any], level: str, cap: float | None
) -> None:
    recipe = make_recipe(from_mapping({"mode": "plain", "target": {"dtype": "float32"}, **given}))
    assert (recipe.importance, recipe.importance_cap) == (level, cap)
