"""Advantages and losses of a user, some of them wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.learner.algorithms import LossInputs, RewardedGroup, TokenLoss, clip_loss

not_callable = 3.0


def by_place(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    """Advantages of tokens: group * 1000 + output * 100 + token."""
    return [
        number * 1000.0 + torch.arange(len(one.lengths))[:, None] * 100.0 + torch.arange(int(one.lengths.max()) + 2)
        for number, one in enumerate(groups)
    ]


def of_one_group(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    return [groups[0].rewards]


def of_one_output(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    return [one.rewards[:1] for one in groups]


def of_few_tokens(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    return [one.rewards[:, None] for one in groups]


def divided_by_zero(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    return [one.rewards / one.rewards.min() for one in groups]


def nothing(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    return [one.rewards * 0.0 for one in groups]


def raises(*arguments: Any) -> Any:
    raise RuntimeError("lost")


def likelihood(inputs: LossInputs) -> TokenLoss:
    """REINFORCE without a ratio, and the ratio as a metric."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp().detach()
    return -inputs.logprobs * inputs.advantages, {"ratio": ratio}


def mean(inputs: LossInputs) -> TokenLoss:
    return clip_loss(inputs)[0].mean(), {}


def without_metrics(inputs: LossInputs) -> Any:
    return clip_loss(inputs)[0]


def without_gradient(inputs: LossInputs) -> TokenLoss:
    return clip_loss(inputs)[0].detach(), {}


def of_others_gradient(inputs: LossInputs) -> TokenLoss:
    return (inputs.logprobs.detach() * inputs.logprobs.sum() * 0.0), {}


def infinite(inputs: LossInputs) -> TokenLoss:
    return inputs.logprobs / inputs.mask, {}


def infinite_gradient(inputs: LossInputs) -> TokenLoss:
    return (inputs.logprobs - inputs.logprobs.detach()).clamp_min(0.0).sqrt(), {}


def of_a_known_name(inputs: LossInputs) -> TokenLoss:
    return clip_loss(inputs)[0], {"entropy": inputs.entropy}


def of_one_number(inputs: LossInputs) -> TokenLoss:
    return clip_loss(inputs)[0], {"ratio": inputs.entropy.mean()}
