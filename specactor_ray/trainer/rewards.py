"""Reward functions, from one output to a number, and scoring of outputs in worker processes."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specactor_ray.config.methods import import_named
from specactor_ray.config.training_schema import RewardConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.workers import Work


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One output, with the data of its task."""

    prompt: Any
    text: str
    """The whole output."""
    answer: str | None
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other keys of the row."""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    max_tokens: int = 0
    response: str = ""
    """The part of the output that counts as the answer (`reward.answer_pattern`); set by the `Scorer`."""


def reward_sample(task: Task, output: Trajectory, token_ids: tuple[int, ...], max_tokens: int) -> RewardSample:
    """Input of the reward functions for an output, or for a turn after which the sample has these own tokens."""
    return RewardSample(
        task.prompt, output.text, task.answer, task.metadata, token_ids, output.finish_reason, max_tokens
    )


RewardFunction = Callable[[RewardSample], float]


def exact_match(sample: RewardSample) -> float:
    """1.0 if the answer is the reference answer, ignoring surrounding white space."""
    return float(sample.response.strip() == _reference(sample).strip())


def length(sample: RewardSample) -> float:
    """Output tokens as a share of `sampling.max_tokens`; a negative weight prefers short outputs."""
    return len(sample.token_ids) / max(sample.max_tokens, 1)


def math_equal(sample: RewardSample) -> float:
    """1.0 if the answer is mathematically equal to the reference (`math-verify`); see `math_answers`."""
    from specactor_ray.trainer.math_answers import equal_answers

    return float(equal_answers(_reference(sample), sample.response))


def reasoning_gym_score(sample: RewardSample) -> float:
    """Score in [0, 1] of the task's own scorer; partial credit depends on the task."""
    import reasoning_gym

    entry = sample.metadata["entry"]
    return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(sample.response, entry))


def _reference(sample: RewardSample) -> str:
    if sample.answer is None:
        raise ValueError("the task has no reference answer (data.answer_key)")
    return sample.answer


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "length": length,
    "math": math_equal,
    "reasoning_gym": reasoning_gym_score,
}
NEED_ANSWERS = ("exact_match", "math")
"""Rewards that compare with the reference answer of the task."""
_NEEDS = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
"""Reward → the module that it imports."""


def find_reward(name: str) -> RewardFunction:
    """The reward function with this name, or the user's own `package.module:function`. Raises ConfigError if it does
    not exist, or a module that it needs cannot be imported."""
    if ":" not in name:
        if name not in REWARDS:
            known = ", ".join(sorted(REWARDS))
            fix = f"use one of {known}, or package.module:function."
            raise ConfigError("reward.functions", f"{name!r} is not known.", fix)
        if name in _NEEDS:
            try:
                importlib.import_module(_NEEDS[name])
            except ImportError:
                problem = f"{name!r} needs the package {_NEEDS[name]}."
                raise ConfigError("reward.functions", problem, f"pip install {_NEEDS[name]}.") from None
        return REWARDS[name]
    function = import_named(name, "reward.functions")
    if not callable(function):
        raise ConfigError("reward.functions", f"{name} is not a function.", "name one that takes a RewardSample.")
    return function  # type: ignore[no-any-return]


def extract_answer(text: str, pattern: str | None) -> str:
    """The last match of `pattern` in `text` (its first group, if it has one), empty without a match; without a pattern
    the text. White space around it is stripped."""
    if pattern is None:
        return text.strip()
    *_, found = [None, *re.finditer(pattern, text)]
    return "" if found is None else found.group(1 if found.re.groups else 0).strip()


class Scorer:
    """Finds the answer in an output and sums the configured reward functions, weighted. Raises ConfigError if one of
    them is not available."""

    def __init__(self, config: RewardConfig) -> None:
        self._pattern = config.answer_pattern
        self._terms: Sequence[tuple[float, RewardFunction]] = [
            (term.weight, find_reward(term.name)) for term in config.functions
        ]

    def __call__(self, sample: RewardSample) -> float:
        """The reward. Raises ValueError if it is not a finite number, and the errors of the functions."""
        sample = replace(sample, response=extract_answer(sample.text, self._pattern))
        reward = sum(weight * float(function(sample)) for weight, function in self._terms)
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}")
        return reward


def reward_work(config: RewardConfig) -> Work:
    """Work of reward processes: `RewardSample` → reward."""
    return Work("reward", config.timeout_s, partial(Scorer, config))
