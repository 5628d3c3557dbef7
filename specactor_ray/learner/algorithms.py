"""The formulas of policy-gradient post-training, as pure functions on tensors.

Shapes: `B` samples, `T` output positions (right-padded), `G` samples per prompt. Masks are float32, 1.0 for tokens of
the policy and 0.0 for those of an environment and padding. Losses are returned per token, not reduced: `token_weights`
gives the weight of each token, so that micro-batches and ranks add up to the whole batch exactly.

Sources: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; GRPO, DeepSeekMath, arXiv 2402.03300; DAPO, arXiv 2503.14476;
Dr. GRPO, arXiv 2503.20783; GSPO, arXiv 2507.18071; CISPO, MiniMax-M1, arXiv 2506.13585; RLOO, arXiv 2402.14740;
REINFORCE++, arXiv 2501.03262; dual clip, arXiv 1912.09729.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specactor_ray.config.methods import import_named, is_named
from specactor_ray.config.training_schema import AlgorithmConfig, Importance, LossAggregation

VALUE_CLIP = 0.2
"""Largest change of a value from its old one that counts, as the ratio's ε (PPO)."""
LOG_RATIO = 20.0
"""Largest absolute log-ratio that counts: float32 holds the exponential, and its square."""
_EPS = 1e-6
SAME_REWARD = 1e-6
"""Rewards of a group that differ by no more than this are equal."""
_ROUNDING = 1e-15


# ---- advantages ----


@dataclass(frozen=True, slots=True)
class RewardedGroup:
    """The outputs of one prompt; `G` is 1 or more."""

    rewards: torch.Tensor
    """`(G,)` float64, with the overlong punishment."""
    lengths: torch.Tensor
    """`(G,)` int64: tokens of the policy."""
    informative: bool
    """Whether the rewards differ, before and after the punishment. Outputs of equal reward would have the punishment
    alone as their advantage, divided by its own small deviation: the length would be trained at full size. DAPO leaves
    such groups out, too, as its eq. 11 is about correctness."""


Advantages = Callable[[Sequence[RewardedGroup], AlgorithmConfig], Sequence[torch.Tensor]]
"""From all groups of a step to the advantages of each: `(G,)` of whole outputs, or `(G, T)` of their tokens, where the
output at row i has `lengths[i]` of them and the rest does not count."""


def rewarded_group(
    recipe: AlgorithmConfig, rewards: Sequence[float], lengths: Sequence[int], max_tokens: int
) -> RewardedGroup:
    """With DAPO's soft overlong punishment (eq. 13): over the last `overlong_buffer` of `max_tokens`, linearly down to
    -1."""
    given, tokens, buffer = torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths), recipe.overlong_buffer
    shaped = given + ((max_tokens - buffer - tokens.double()) / buffer).clamp(-1.0, 0.0) if buffer else given
    return RewardedGroup(shaped, tokens, _differ(given) and _differ(shaped))


def _differ(rewards: torch.Tensor) -> bool:
    """Whether rewards `(G,)` differ by more than `SAME_REWARD` and the rounding of float64."""
    low, high = rewards.aminmax()
    return bool(high - low > torch.maximum(low.abs(), high.abs()).mul(_ROUNDING).clamp_min(SAME_REWARD))


def against_group(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    """`A_i = (r_i - mean(r)) / std(r)` within each group (DeepSeekMath section 4.1.2; DAPO eq. 9), without the division
    if not `scale_by_std` (Dr. GRPO). Exactly 0 in groups that are not informative, not the rounding of their mean,
    which a division by a tiny deviation would turn into advantages."""
    divisors = (one.rewards.std() + _EPS if recipe.scale_by_std else 1.0 for one in groups)
    return [_centred(one) / divisor for one, divisor in zip(groups, divisors, strict=True)]


def against_others(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    """`A_i = r_i - mean of the other rewards of the group` (RLOO section 3.3); 0 as in `against_group`."""
    return [_centred(one) * (len(one.rewards) / (len(one.rewards) - 1)) for one in groups]


def _centred(group: RewardedGroup) -> torch.Tensor:
    return (group.rewards - group.rewards.mean()) * group.informative


def against_batch(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    """Rewards with mean 0 and variance 1 over all tokens of the step, where each token has the reward of its output
    (REINFORCE++ section 3.1, without discount). 0 if all rewards of the step are equal."""
    rewards = torch.cat([one.rewards for one in groups])
    lengths = torch.cat([one.lengths for one in groups]).double()
    tokens, differ = lengths.sum(), _differ(rewards)
    mean = (rewards * lengths).sum() / tokens
    variance = ((rewards - mean).square() * lengths).sum() / (tokens - 1).clamp_min(1.0)
    return [(one.rewards - mean) / (variance + 1e-8).sqrt() * differ for one in groups]


def step_advantages(groups: Sequence[RewardedGroup], recipe: AlgorithmConfig) -> list[torch.Tensor]:
    """Advantages by `algorithm.advantages`, checked; `(G,)` or `(G, T)` float64 of each group. ValueError: a function
    of the user returned something else."""
    name, function = str(recipe.advantages), function_of(recipe, "advantages")
    found = [torch.as_tensor(one, dtype=torch.float64) for one in (function(groups, recipe) if groups else ())]
    if len(found) != len(groups):
        raise ValueError(f"{name} returned advantages of {len(found)} groups, and there are {len(groups)}")
    for advantages, group in zip(found, groups, strict=True):
        size, longest, shape = len(group.lengths), int(group.lengths.max()), tuple(advantages.shape)
        if shape != (size,) and not (len(shape) == 2 and shape[0] == size and shape[1] >= longest):
            wanted = f"({size},), or ({size}, {longest}) of its tokens"
            raise ValueError(f"{name} returned advantages of shape {shape} for a group that needs {wanted}")
        if not bool(torch.isfinite(advantages).all()):
            raise ValueError(f"{name} returned an advantage that is not finite")
    return found


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE without discount: `A_t = Σ_l λ^l δ_{t+l}`, `δ_t = r_t + V_{t+1} - V_t` (arXiv 1506.02438 eq. 16; PPO eqs. 11
    and 12 with γ = 1).

    `rewards` at each token and `values` before it are `(B, T)`. The value after the last token is 0; tokens with mask 0
    take no time: the first token behind them follows the last one before them. Returns the advantages, and the returns
    (advantage + value), 0 where the mask is 0; both float64.
    """
    rewards, values, inside = rewards.double(), values.double(), mask > 0
    order = torch.argsort(~inside, dim=1, stable=True)  # tokens inside first
    r, v = (torch.where(inside, x, 0.0).gather(1, order) for x in (rewards, values))
    running, step = r + _later(v, 1) - v, 1
    while step < running.shape[1]:  # then it has the next `2 * step` terms of the sum
        running, step = running + lam**step * _later(running, step), 2 * step
    advantages = torch.where(inside, torch.zeros_like(running).scatter(1, order, running), 0.0)
    return advantages, (advantages + values) * mask


def _later(values: torch.Tensor, steps: int) -> torch.Tensor:
    """The value of each column `steps` columns later; 0 behind the last one."""
    return torch.nn.functional.pad(values[:, steps:], (0, steps))


# ---- losses, per token ----


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss depends on; tensors are `(B, T)` float32, 0 where the mask is 0. Gradients flow through `logprobs`,
    and with `algorithm.entropy_coef` through `entropy`."""

    logprobs: torch.Tensor
    """Log-probabilities of the output tokens."""
    old_logprobs: torch.Tensor
    """Those at the start of the update."""
    rollout_logprobs: torch.Tensor
    """As computed by the verifier."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """1 for tokens of the policy, 0 for those of an environment and padding."""
    entropy: torch.Tensor
    """In nats."""
    clip_low: float
    clip_high: float
    clip_dual: float


TokenLoss = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss of each token, and metrics as tensors that are averaged over the tokens of the policy; all `(B, T)`."""
Loss = Callable[[LossInputs], TokenLoss]


def clip_loss(inputs: LossInputs) -> TokenLoss:
    """`-min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A)`, `ρ = exp(logprobs - old_logprobs)`: PPO eq. 7 with ε_low = ε_high;
    DAPO eq. 10 (clip-higher) with ε_high > ε_low. Where A < 0, at most `-c A` with c = `clip_dual` (dual clip eq. 5).
    `clip_fraction`: tokens without a gradient."""
    return _clipped(inputs, inputs.logprobs - inputs.old_logprobs)


def sequence_clip_loss(inputs: LossInputs) -> TokenLoss:
    """`clip_loss` with the ratio of the whole output, the geometric mean of those of its tokens; each token carries the
    gradient of its own log-probability (GSPO eqs. 5 and 7, and 14 for advantages of tokens)."""
    own = inputs.logprobs * inputs.mask
    mean = ((own - inputs.old_logprobs) * inputs.mask).sum(1, True) / inputs.mask.sum(1, True).clamp_min(1.0)
    return _clipped(inputs, own - own.detach() + mean.detach())


def _clipped(inputs: LossInputs, log_ratio: torch.Tensor) -> TokenLoss:
    advantages = inputs.advantages
    ratio = log_ratio.clamp(-LOG_RATIO, LOG_RATIO).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * advantages
    loss, most = torch.maximum(free, bounded), -inputs.clip_dual * advantages
    dual = (advantages < 0) & (loss > most)
    return torch.where(dual, most, loss), {"clip_fraction": ((bounded > free) | dual).float()}


def cispo_loss(inputs: LossInputs) -> TokenLoss:
    """`-sg(clip(ρ, 1 - ε_low, 1 + ε_high)) A log π` (MiniMax-M1 eqs. 4 and 5): the clip caps the weight of a token, and
    takes no gradient away. `clip_fraction`: tokens with another weight than their ratio."""
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().clamp(-LOG_RATIO, LOG_RATIO).exp()
    weight = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    return -weight * inputs.advantages * inputs.logprobs, {"clip_fraction": (weight != ratio).float()}


_SHIPPED: Mapping[str, Advantages | Loss] = {
    "group": against_group,
    "leave_one_out": against_others,
    "batch": against_batch,
    "values": lambda groups, recipe: [torch.zeros_like(one.rewards) for one in groups],  # the trainer estimates them
    "clip": clip_loss,
    "sequence_clip": sequence_clip_loss,
    "cispo": cispo_loss,
}


def function_of(recipe: AlgorithmConfig, key: str) -> Any:
    """The function that `algorithm.advantages` or `algorithm.loss` names. Raises ConfigError if a user's cannot be
    imported."""
    name = str(getattr(recipe, key))
    return import_named(name, f"algorithm.{key}") if is_named(name) else _SHIPPED[name]


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """`½ max((V - R)², (clip(V, V_old ± ε) - R)²)`, `(B, T)`: the value term of PPO eq. 9, clipped as the policy is.
    `old_values` are those at the start of the update."""
    bounded = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns).square(), (bounded - returns).square())


def kl_estimate(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate `(B, T)` of KL(policy ‖ other) from tokens sampled by the policy: Schulman's k3,
    `exp(d) - d - 1` with `d = log π_other - log π`, unbiased and never negative (DeepSeekMath eq. 4). A figure to
    report: its gradient is not that of the divergence, see `kl_loss`."""
    d = (other_logprobs - logprobs).clamp(-LOG_RATIO, LOG_RATIO)
    return torch.exp(d) - d - 1.0


def kl_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """A loss per token `(B, T)` whose expected gradient is that of KL(policy ‖ reference), exactly while no ratio
    exceeds the cap: `min(ρ, cap) ½ d²` with `d = log π_ref - log π` and the ratio `ρ = π / π_old` without gradient
    (DeepSeek-V3.2, arXiv 2512.02556). The tokens were sampled by `π_old`. As losses, k1 has the expected gradient zero,
    and k3 that of KL(reference ‖ policy)."""
    ratio = (logprobs - old_logprobs).detach().clamp_max(LOG_RATIO).exp().clamp_max(cap)
    return ratio * 0.5 * (ref_logprobs - logprobs).square()


def importance_weights(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, level: Importance, cap: float
) -> torch.Tensor:
    """Weights by `π_train / π_rollout` at the start of the update, without gradient; `(B, T)`. They correct for an
    engine whose probabilities differ from the trainer's (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"). `Importance` has the levels; truncation as in Ionides 2008."""
    gap = (logprobs.detach() - rollout_logprobs) * mask
    if level is not Importance.token:
        gap = gap.sum(dim=1, keepdim=True).expand_as(mask)
    ratio = gap.clamp(-LOG_RATIO, LOG_RATIO).exp()
    return ratio * (ratio <= cap) if level is Importance.mask else ratio.clamp_max(cap)


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
