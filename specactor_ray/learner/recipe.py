"""The algorithm with all its values: values left open in the configuration are set here. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmName, LossAggregation
from specactor_ray.learner.algorithms import group_advantages, leave_one_out_advantages, soft_overlong_penalty

DAPO_CLIP_HIGH = 0.28
"""Upper clip range ε_high (DAPO section 4.1)."""
STALE_IMPORTANCE_CAP = 2.0
"""Cap of importance weights of tokens from possibly older weights; the truncation of Yao et al. 2025."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Values of one algorithm; names as in the `algorithm` section."""

    name: str
    clip_low: float
    clip_high: float
    loss_aggregation: str
    scale_by_std: bool
    dynamic_sampling: bool
    overlong_buffer: int
    overlong_penalty: float
    entropy_coef: float
    kl_coef: float
    gamma: float
    gae_lambda: float
    value_coef: float
    value_clip: float | None
    importance_cap: float | None

    @property
    def uses_values(self) -> bool:
        return self.name == AlgorithmName.ppo.value

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """`(groups, G)` rewards → advantages of whole outputs; zeros for ppo, which estimates them per token."""
        if self.uses_values:
            return torch.zeros_like(rewards)
        if self.name == AlgorithmName.rloo.value:
            return leave_one_out_advantages(rewards)
        return group_advantages(rewards, self.scale_by_std)

    def shaped(self, rewards: Sequence[float], lengths: Sequence[int], max_tokens: int) -> torch.Tensor:
        """`(B,)` rewards with the overlong penalty added."""
        penalty = soft_overlong_penalty(torch.tensor(lengths), max_tokens, self.overlong_buffer)
        return torch.tensor(rewards, dtype=torch.float32) + self.overlong_penalty * penalty


def make_recipe(config: Config) -> Recipe:
    """Set the values that the configuration leaves to the algorithm."""
    section = config.algorithm
    dapo = section.name is AlgorithmName.dapo
    aggregation = section.loss_aggregation
    if aggregation is None:
        aggregation = LossAggregation.sequence if section.name is AlgorithmName.grpo else LossAggregation.token
    clip_high = section.clip_high
    if clip_high is None:
        clip_high = DAPO_CLIP_HIGH if dapo else section.clip_low
    buffer = section.overlong_buffer
    if buffer is None:
        buffer = config.sampling.max_tokens // 8 if dapo else 0
    importance_cap = section.importance_cap
    if importance_cap is None and config.trainer.max_staleness:
        importance_cap = STALE_IMPORTANCE_CAP
    filled = {
        "name": section.name.value,
        "clip_high": clip_high,
        "loss_aggregation": aggregation.value,
        "dynamic_sampling": dapo if section.dynamic_sampling is None else section.dynamic_sampling,
        "overlong_buffer": buffer,
        "importance_cap": importance_cap,
    }
    return Recipe(**{entry.name: getattr(section, entry.name) for entry in fields(Recipe)} | filled)
