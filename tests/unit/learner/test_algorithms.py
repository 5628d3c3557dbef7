"""The formulas against numbers worked out by hand. Those of a whole step are in `test_recomputation.py`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.learner.algorithms import (
    SAME_REWARD,
    clipped_policy_loss,
    generalized_advantages,
    kl_estimate,
    kl_loss,
    make_recipe,
    output_advantages,
    value_loss,
)


def close(actual: torch.Tensor, expected: list, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual.float(), torch.tensor(expected, dtype=torch.float32), atol=atol, rtol=0)


def test_nearly_equal_rewards_give_no_advantage() -> None:
    """The mean of equal rewards is off by rounding, which the division by their deviation would make much of."""
    for name, reward, size in itertools.product(("grpo", "rloo"), (10.1, -3.3, 1e6 / 3), (2, 31)):
        rewards = torch.full((1, size), reward, dtype=torch.float64)
        rewards[0, 0] += SAME_REWARD / 2
        close(output_advantages(recipe_of(name), rewards), [[0.0] * size], atol=0)


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


def recipe_of(algorithm: str, **more: Any) -> AlgorithmConfig:
    settings = {"mode": "plain", "algorithm": {"name": algorithm, **more}, "sampling": {"max_tokens": 32}}
    return make_recipe(from_mapping(settings))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 1.0, -1.1, 0.0),
        (1.5, 1.0, -1.3, 1.0),  # a good token may not grow beyond 1 + ε_high
        (1.5, -1.0, 1.5, 0.0),  # a bad one that grew pays in full
        (0.5, -1.0, 0.8, 1.0),  # a bad token need not shrink below 1 - ε_low
        (0.5, 1.0, -0.5, 0.0),
    ],
)
def test_clipped_policy_loss(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    old = torch.tensor([[-2.0]])
    got, hit = clipped_policy_loss(old + math.log(ratio), old, torch.tensor([[advantage]]), 0.2, 0.3)
    close(got, [[loss]])
    close(hit, [[clipped]])


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
    (expected,) = torch.autograd.grad((old.exp() * kl_loss(policy, old, reference)).sum(), logits)
    torch.testing.assert_close(expected, exact, atol=1e-12, rtol=1e-9)


def test_what_a_recipe_leaves_to_the_algorithm() -> None:
    defaults = {"dapo": (4, 0.28, True, "token"), "grpo": (0, 0.2, False, "sequence")}
    for name, expected in defaults.items():
        recipe = recipe_of(name)
        found = (recipe.overlong_buffer, recipe.clip_high, recipe.dynamic_sampling, recipe.loss_aggregation)
        assert found == expected
    for staleness, given, cap in ((0, {}, None), (1, {}, 2.0), (1, {"importance_cap": 5.0}, 5.0)):
        config = from_mapping({"mode": "plain", "trainer": {"max_staleness": staleness}, "algorithm": given})
        assert make_recipe(config).importance_cap == cap, "older weights are corrected for"
