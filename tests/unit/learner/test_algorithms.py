"""The formulas against numbers worked out by hand, and against TRL's where it has the same one."""

from __future__ import annotations

import math

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.training_schema import LossAggregation
from specactor_ray.learner.algorithms import (
    SAME_REWARD,
    clipped_policy_loss,
    generalized_advantages,
    group_advantages,
    kl_estimate,
    kl_loss,
    leave_one_out_advantages,
    make_recipe,
    soft_overlong_penalty,
    token_weights,
    truncated_importance_weights,
    value_loss,
)


def close(actual: torch.Tensor, expected: list, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), atol=atol, rtol=0)


def test_group_advantages() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    spread = math.sqrt(4 * 0.25 / 3)  # four deviations of a half, three degrees of freedom
    close(group_advantages(rewards), [[0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread], [0.0] * 4])
    close(group_advantages(rewards, scale_by_std=False), [[0.5, -0.5, -0.5, 0.5], [0.0] * 4])


def test_leave_one_out_advantages() -> None:
    # 4 - mean(1, 1) = 3; 1 - mean(4, 1) = -1.5
    close(leave_one_out_advantages(torch.tensor([[4.0, 1.0, 1.0]])), [[3.0, -1.5, -1.5]])


@pytest.mark.parametrize("reward", [10.1, 0.1, -3.3, 1e6 / 3])
@pytest.mark.parametrize("size", [2, 8, 31])
def test_equal_rewards_give_no_advantage(reward: float, size: int) -> None:
    """The mean of equal rewards is off by rounding, which the division by their deviation would make much of."""
    rewards = torch.full((1, size), reward)
    for advantages in (group_advantages(rewards), group_advantages(rewards, False), leave_one_out_advantages(rewards)):
        close(advantages, [[0.0] * size], atol=0)
    rewards[0, 0] += SAME_REWARD / 2
    close(group_advantages(rewards), [[0.0] * size], atol=0)


def test_generalized_advantages() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    values = torch.tensor([[0.5, 0.25, 0.5], [1.0, 1.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    # Row 0 from the end: δ2 = 1 - .5 = .5; δ1 = .5*.5 - .25 = 0, A1 = .25*.5; δ0 = .5*.25 - .5 = -.375
    # Row 1 ends at its second token: δ1 = 2 - 1 = 1; δ0 = .5*1 - 1 = -.5, A0 = -.5 + .25
    close(advantages, [[-0.375 + 0.25 * 0.125, 0.125, 0.5], [-0.25, 1.0, 0.0]])
    close(returns, [[-0.34375 + 0.5, 0.375, 1.0], [0.75, 2.0, 0.0]])


def test_tokens_of_an_environment_take_no_time() -> None:
    """Advantages are those of the policy's tokens alone, one after the other."""
    torch.manual_seed(1)
    own = torch.tensor([True, True, False, False, False, True, False, True])
    rewards, values, junk = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 8)
    spread = {name: junk.clone() for name in ("rewards", "values")}
    spread["rewards"][:, own], spread["values"][:, own] = rewards, values
    mask = own.float().expand(2, 8)
    alone = generalized_advantages(rewards, values, torch.ones(2, 4), gamma=0.9, lam=0.8)
    among = generalized_advantages(spread["rewards"], spread["values"], mask, gamma=0.9, lam=0.8)
    for expected, found in zip(alone, among, strict=True):
        close(found[:, own], expected.tolist(), atol=0)
        assert not found[:, ~own].any()


def test_soft_overlong_penalty() -> None:
    lengths = torch.tensor([5, 8, 9, 10, 12, 20])
    close(soft_overlong_penalty(lengths, max_tokens=12, buffer=4), [0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    close(soft_overlong_penalty(lengths, max_tokens=12, buffer=0), [0.0] * 6)


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
    close(value_loss(values, old, returns, clip=None), [[0.0, 0.5 * 0.81]])
    close(value_loss(values, old, returns, clip=0.2), [[0.5 * 0.64, 0.5 * 0.81]])  # clipped to 1.2


def test_kl_estimate_is_unbiased() -> None:
    torch.manual_seed(1)
    policy, reference = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * kl_estimate(policy, reference)).sum()) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_expected_gradient_of_the_kl_loss_is_that_of_the_divergence(drift: float) -> None:
    """The expectation is a sum over all tokens, weighted by the policy that sampled them."""
    torch.manual_seed(2)
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, dtype=torch.float64).log_softmax(0)
    old = (logits.detach() + drift * torch.randn(50, dtype=torch.float64)).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((old.exp() * kl_loss(policy, old, reference)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(expected, exact, atol=1e-12, rtol=1e-9)
    # Token for token the gradient of the ratio times k3.
    (ours,) = torch.autograd.grad(kl_loss(policy, old, reference)[7], logits, retain_graph=True)
    weighted = torch.exp(policy - old) * kl_estimate(policy, reference)
    torch.testing.assert_close(ours, torch.autograd.grad(weighted[7], logits)[0], atol=1e-12, rtol=1e-9)


def test_truncated_importance_weights() -> None:
    train, rollout = torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-1.0, -3.0, -1.0]])
    close(truncated_importance_weights(train, rollout, cap=2.0), [[1.0, 2.0, math.exp(-2.0)]])


def test_token_weights() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    close(token_weights(mask, LossAggregation.token, 10), [[0.25, 0.25, 0.25, 0.0], [0.25, 0.0, 0.0, 0.0]])
    close(token_weights(mask, LossAggregation.sequence, 10), [[1 / 6, 1 / 6, 1 / 6, 0.0], [0.5, 0.0, 0.0, 0.0]])
    close(token_weights(mask, LossAggregation.constant, 10), [[0.05, 0.05, 0.05, 0.0], [0.05, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("staleness", "algorithm", "cap"), [(0, {}, None), (1, {}, 2.0), (1, {"importance_cap": 5.0}, 5.0)]
)
def test_older_weights_are_corrected_for(staleness: int, algorithm: dict[str, float], cap: float | None) -> None:
    config = from_mapping({"mode": "plain", "trainer": {"max_staleness": staleness}, "algorithm": algorithm})
    assert make_recipe(config).importance_cap == cap
