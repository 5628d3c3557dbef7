"""The formulas of policy-gradient post-training, as pure functions on tensors.

Shapes: `B` samples, `T` output positions (right-padded), `G` samples per prompt. Masks are float32, 1.0 for tokens of
the policy and 0.0 for those of an environment and padding. Losses are returned per token, not reduced: `token_weights`
gives the weight of each token, so that micro-batches and ranks add up to the whole batch exactly.

Sources: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; GRPO, DeepSeekMath, arXiv 2402.03300; DAPO, arXiv 2503.14476;
Dr. GRPO, arXiv 2503.20783.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmConfig, AlgorithmName, LossAggregation

DAPO_CLIP_HIGH = 0.28
"""Upper clip range ε_high (DAPO section 4.1)."""
VALUE_CLIP = 0.2
"""Largest change of a value from its old one that counts, as the ratio's ε (PPO)."""
STALE_IMPORTANCE_CAP = 2.0
"""Cap of importance weights of tokens from possibly older weights; the truncation of Yao et al. 2025."""
_EPS = 1e-6
SAME_REWARD = 1e-6
"""Rewards of a group that differ by no more than this are equal."""
_ROUNDING = 1e-15


# ---- advantages ----


def group_advantages(
    recipe: AlgorithmConfig, rewards: Sequence[float], lengths: Sequence[int], max_tokens: int
) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Whether the outputs of one prompt are informative, their rewards with the overlong punishment, and their
    advantages; `(G,)` float64.

    A group is informative if its rewards differ, before and after the punishment; else its advantages are 0. Outputs of
    equal reward would have the punishment alone as their advantage, divided by its own small deviation: the length
    would be trained at full size. DAPO leaves such groups out, too, as its eq. 11 is about correctness.
    """
    shaped = shaped_rewards(recipe, rewards, lengths, max_tokens)
    informative = bool(_differ(torch.tensor(rewards, dtype=torch.float64)) & _differ(shaped))
    return informative, shaped, output_advantages(recipe, shaped[None])[0] * informative


def _differ(rewards: torch.Tensor) -> torch.Tensor:
    """Whether rewards `(..., G)` differ by more than `SAME_REWARD` and the rounding of float64; `(..., 1)` bool."""
    low, high = rewards.aminmax(dim=-1, keepdim=True)
    return high - low > torch.maximum(low.abs(), high.abs()).mul(_ROUNDING).clamp_min(SAME_REWARD)


def output_advantages(recipe: AlgorithmConfig, rewards: torch.Tensor) -> torch.Tensor:
    """`(groups, G)` rewards → advantages of whole outputs; float64.

    GRPO and DAPO: `A_i = (r_i - mean(r)) / std(r)` within each group (DeepSeekMath section 4.1.2; DAPO eq. 9), without
    the division if not `scale_by_std` (Dr. GRPO); RLOO: `A_i = r_i - mean of the other rewards of the group`
    (arXiv 2402.14740, section 3.3); G is at least 2 for these.
    Zeros for a group whose rewards are all equal, not the rounding of their mean, which a division by a tiny deviation
    would turn into advantages; and for PPO, which estimates advantages per token.
    """
    rewards = rewards.double()
    if uses_values(recipe):
        return torch.zeros_like(rewards)
    centred = (rewards - rewards.mean(dim=1, keepdim=True)) * _differ(rewards)
    if recipe.name is AlgorithmName.rloo:
        return centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    return centred / (rewards.std(dim=1, keepdim=True) + _EPS) if recipe.scale_by_std else centred


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE without discount: `A_t = Σ_l λ^l δ_{t+l}`, `δ_t = r_t + V_{t+1} - V_t` (arXiv 1506.02438 eq. 16; PPO eqs. 11
    and 12 with γ = 1).

    `rewards` at each token and `values` before it are `(B, T)`. The value after the last token is 0; tokens with mask 0
    take no time: the first token behind them follows the last one before them. Returns the advantages, and the returns
    (advantage + value), 0 where the mask is 0; both float64.
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(running)
    for t in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, t] > 0
        delta = rewards[:, t] + next_value - values[:, t]
        running = torch.where(inside, delta + lam * running, running)
        next_value = torch.where(inside, values[:, t], next_value)
        advantages[:, t] = torch.where(inside, running, 0.0)
    return advantages, (advantages + values) * mask


def shaped_rewards(
    recipe: AlgorithmConfig, rewards: Sequence[float], lengths: Sequence[int], max_tokens: int
) -> torch.Tensor:
    """`(B,)` float64 rewards with DAPO's soft overlong punishment (eq. 13): over the last `overlong_buffer` of
    `max_tokens`, linearly down to -1."""
    shaped, buffer = torch.tensor(rewards, dtype=torch.float64), recipe.overlong_buffer
    if buffer:
        shaped += ((max_tokens - buffer - torch.tensor(lengths).double()) / buffer).clamp(-1.0, 0.0)
    return shaped


# ---- losses, per token ----


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`-min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A)`, `ρ = exp(logprobs - old_logprobs)`, `(B, T)`; and 1.0 where the
    clipped term was the smaller one. PPO eq. 7 with ε_low = ε_high; DAPO eq. 10 (clip-higher) with ε_high > ε_low.
    `old_logprobs` are those at the start of the update."""
    ratio = torch.exp(logprobs - old_logprobs)
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(free, bounded), (bounded < free).float()


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """`½ max((V - R)², (clip(V, V_old ± ε) - R)²)`, `(B, T)`: the value term of PPO eq. 9, clipped as the policy is.
    `old_values` are those at the start of the update."""
    bounded = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns).square(), (bounded - returns).square())


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate `(B, T)` of KL(policy ‖ reference) from tokens sampled by the policy: Schulman's k3,
    `exp(d) - d - 1` with `d = log π_ref - log π`, unbiased and never negative (DeepSeekMath eq. 4). A figure to report:
    its gradient is not that of the divergence, see `kl_loss`."""
    d = ref_logprobs - logprobs
    return torch.exp(d) - d - 1.0


def kl_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """A loss per token `(B, T)` whose expected gradient is that of KL(policy ‖ reference), exactly: `ρ ½ d²` with
    `d = log π_ref - log π` and the ratio `ρ = π / π_old` without gradient (DeepSeek-V3.2, arXiv 2512.02556). The tokens
    were sampled by `π_old`. As losses, k1 has the expected gradient zero, and k3 that of KL(reference ‖ policy)."""
    ratio = torch.exp(logprobs - old_logprobs).detach()
    return ratio * 0.5 * (ref_logprobs - logprobs).square()


def truncated_importance_weights(
    train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float
) -> torch.Tensor:
    """`min(π_train / π_rollout, cap)` per token, without gradient; `(B, T)`: corrects for an engine whose probabilities
    differ from the trainer's (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; truncation as in Ionides 2008)."""
    return torch.exp(train_logprobs - rollout_logprobs).clamp_max(cap).detach()


# ---- reduction ----


def token_weights(recipe: AlgorithmConfig, mask: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Weight of each token in the loss of the whole (mini-)batch, `loss = Σ weights * loss_per_token`; `(B, T)`.
    `sequence`: every sample has the same weight, and its tokens are averaged (DeepSeekMath eq. 3); `token`: every token
    has the same weight (DAPO eq. 12); both have the sum 1. `constant`: `1 / (B * max_tokens)` each (Dr. GRPO)."""
    if recipe.loss_aggregation is LossAggregation.sequence:
        return mask / mask.sum(dim=1, keepdim=True).clamp_min(1.0) / mask.shape[0]
    if recipe.loss_aggregation is LossAggregation.constant:
        return mask / float(mask.shape[0] * max_tokens)
    return mask / mask.sum().clamp_min(1.0)


# ---- one algorithm with all its values ----


def make_recipe(config: Config) -> AlgorithmConfig:
    """The `algorithm` section, with the values that it leaves to the algorithm."""
    section = config.algorithm
    dapo = section.name is AlgorithmName.dapo
    by_name: dict[str, Any] = {
        "loss_aggregation": LossAggregation.sequence if section.name is AlgorithmName.grpo else LossAggregation.token,
        "overlong_buffer": config.sampling.max_tokens // 8 if dapo else 0,
        "clip_high": DAPO_CLIP_HIGH if dapo else section.clip_low,
        "dynamic_sampling": dapo,
        "importance_cap": STALE_IMPORTANCE_CAP if config.trainer.max_staleness else None,
    }
    return replace(section, **{name: value for name, value in by_name.items() if getattr(section, name) is None})


def uses_values(recipe: AlgorithmConfig) -> bool:
    return recipe.name is AlgorithmName.ppo
