"""An algorithm with all its values: the `algorithm` section, completed by the preset that its name stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmConfig, AlgorithmName, Importance, LossAggregation

ADVANTAGES, LOSSES = ("group", "leave_one_out", "batch"), ("clip", "sequence_clip", "cispo")
"""Shipped functions that `algorithm.advantages` and `algorithm.loss` name."""
FLOAT32 = "float32"
_VALUES = "values"
"""Advantages by the value head of ppo."""
_PRESETS: dict[AlgorithmName, dict[str, Any]] = {
    AlgorithmName.grpo: {"loss_aggregation": LossAggregation.sequence},
    AlgorithmName.dr_grpo: {"loss_aggregation": LossAggregation.constant, "scale_by_std": False},
    AlgorithmName.dapo: {"clip_high": 0.28, "dynamic_sampling": True},
    AlgorithmName.gspo: {
        "loss": "sequence_clip",
        "loss_aggregation": LossAggregation.sequence,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    AlgorithmName.cispo: {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    AlgorithmName.ppo: {"advantages": _VALUES},
    AlgorithmName.rloo: {"advantages": "leave_one_out"},
    AlgorithmName.reinforce_pp: {"advantages": "batch"},
}
"""Values that differ from the defaults of `make_recipe`. Sources: DAPO section 4.1 (ε_high), GSPO section 5.1 (ε), and
for CISPO, whose paper has no number, the cap of 5 of ScaleRL (arXiv 2510.13786) and no lower limit, as in the paper."""
_CAPS = {Importance.token: 2.0, Importance.sequence: 3.0, Importance.mask: 3.0}
"""That of tokens is the one of Yao et al. 2025, the others are TRL's default."""


def make_recipe(config: Config) -> AlgorithmConfig:
    """The `algorithm` section, with the values that it leaves to the algorithm."""
    section, buffer = config.algorithm, config.sampling.max_tokens // 5  # DAPO: 4,096 of 20,480
    is_exact = config.target.dtype == config.trainer.dtype == FLOAT32 and not config.trainer.max_staleness
    recipe = _completed(section, _PRESETS[section.name])
    importance = Importance.off if is_exact and section.importance_cap is None else Importance.token
    recipe = _completed(
        recipe,
        {
            "advantages": "group",
            "loss": "clip",
            "clip_low": 0.2,
            "loss_aggregation": LossAggregation.token,
            "scale_by_std": True,
            "dynamic_sampling": False,
            "overlong_buffer": buffer if section.name is AlgorithmName.dapo else 0,
            "importance": importance,
        },
    )
    assert recipe.importance is not None
    return _completed(recipe, {"clip_high": recipe.clip_low, "importance_cap": _CAPS.get(recipe.importance)})


def _completed(section: AlgorithmConfig, values: dict[str, Any]) -> AlgorithmConfig:
    return replace(section, **{name: value for name, value in values.items() if getattr(section, name) is None})


def uses_values(recipe: AlgorithmConfig) -> bool:
    """Whether the policy has a value head, which gives the advantages."""
    return recipe.advantages == _VALUES


def smallest_group(recipe: AlgorithmConfig) -> int:
    """Least number of samples of a prompt: two where they are compared with each other."""
    return 2 if recipe.advantages in ("group", "leave_one_out") else 1
