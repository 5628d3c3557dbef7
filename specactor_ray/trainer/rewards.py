"""Reward functions, from one output to a number, and scoring of outputs in worker processes."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specactor_ray.config.fields import reject_unlisted
from specactor_ray.config.methods import import_named
from specactor_ray.config.training_schema import LARGEST_REWARD, RewardConfig, RewardFunctionConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ConfigError, clipped, counted_by_kind, place_of
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.trainer.data import Task, has_reference, is_blank
from specactor_ray.trainer.workers import Work, WorkerPool

logger = logging.getLogger(__name__)


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
    return float(sample.response.strip() == _reference(sample))


def length(sample: RewardSample) -> float:
    """Output tokens as a share of `sampling.max_tokens`, 0.0 for a blank text; a negative weight prefers short
    outputs, the empty one most of all, so it needs a reward for answers beside it."""
    return len(sample.token_ids) / max(sample.max_tokens, 1) if not is_blank(sample.text) else 0.0


def math_equal(sample: RewardSample) -> float:
    """1.0 if the answer is mathematically equal to the reference (`math-verify`); see `math_answers`."""
    from specactor_ray.trainer.math_answers import equal_answers

    return float(equal_answers(_reference(sample), sample.response))


def reasoning_gym_score(sample: RewardSample) -> float:
    """Score in [0, 1] of the task's own scorer; partial credit depends on the task. 0.0 for an empty answer, to which
    many scorers give some."""
    if is_blank(sample.response):
        return 0.0
    import reasoning_gym

    entry = sample.metadata["entry"]
    return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(sample.response, entry))


def _reference(sample: RewardSample) -> str:
    if sample.answer is None or not has_reference(sample.answer):
        raise ValueError("the task has no reference answer (data.answer_key), or an empty one")
    return sample.answer.strip()


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
_SIGNATURE = (
    "def reward(sample) returns a number for any output, such as 0.0 for one that it cannot read; it takes one output "
    "(sample.text, sample.answer, sample.metadata), where a function of TRL takes a batch"
)


def find_reward(name: str) -> RewardFunction:
    """The reward function with this name, or the user's own `package.module:function`. Raises ConfigError if it does
    not exist, cannot be called with a sample, or needs a module that cannot be imported."""
    if ":" not in name:
        reject_unlisted("reward.functions", name, (*sorted(REWARDS), "package.module:function"))
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
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        problem = f"{name}{place_of(function)} cannot be called with one argument, a RewardSample ({error})."
        raise ConfigError("reward.functions", problem, f"{_SIGNATURE}.") from None
    except ValueError:  # functions of C have no signature
        pass
    return function  # type: ignore[no-any-return]


def extract_answer(text: str, pattern: str | None) -> str:
    """Last match of `pattern` in `text` that is not blank (its first group, if it has one); empty without a match, or
    if the group has none. Without a pattern the text. White space around it is stripped."""
    if pattern is None:
        return text.strip()
    *_, found = [None, *(match for match in re.finditer(pattern, text) if match[0].strip())]
    return "" if found is None else (found[1 if found.re.groups else 0] or "").strip()


def checked_reward(reward: float) -> float:
    """The reward. Raises ValueError if it is not finite, or too large for the update's arithmetic."""
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, which is no finite number")
    if abs(reward) > LARGEST_REWARD:
        raise ValueError(
            f"the reward is {reward:g}, and the update, in float32, takes none beyond {LARGEST_REWARD:g}. Fix: a "
            "smaller scale in the reward function, or a smaller weight of it (reward.functions)"
        )
    return reward


class Scorer:
    """Finds the answer in an output and sums the configured reward functions, weighted. Raises ConfigError if one of
    them is not available."""

    def __init__(self, config: RewardConfig) -> None:
        self._pattern = config.answer_pattern
        self._terms: Sequence[tuple[RewardFunctionConfig, RewardFunction]] = [
            (term, find_reward(term.name)) for term in config.functions
        ]

    def __call__(self, sample: RewardSample) -> float:
        """The reward. Raises ValueError if it is no number of `checked_reward`, and the errors of the functions."""
        sample = replace(sample, response=extract_answer(sample.text, self._pattern))
        values = [term.weight * _number(term.name, function, function(sample)) for term, function in self._terms]
        return checked_reward(sum(values))


def _number(name: str, function: RewardFunction, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}{place_of(function)} returned {clipped(value)}, which is no number") from None


def reward_work(config: RewardConfig) -> Work:
    """Work of reward processes: `RewardSample` → reward."""
    return Work("reward", config.timeout_s, partial(Scorer, config))


def try_rewards(config: RewardConfig, samples: Sequence[RewardSample]) -> None:
    """Score made-up outputs, in a process as in training, until one has a reward; built-in functions need no trial.
    Raises ConfigError if none has; with `reward.failure_value`, to which functions may leave outputs, it is logged."""
    own = ", ".join(term.name for term in config.functions if ":" in term.name)
    if not own:
        return
    reasons = Counter[str]()
    with WorkerPool(reward_work(config), 1) as scorers:
        for sample in samples:
            _, problem = SYSTEM.result(scorers.submit(sample), math.inf)
            if not problem:
                return
            reasons[problem] += 1
    problem = f"{own} gave no reward to made-up outputs for the first tasks: {counted_by_kind(reasons)}."
    if config.failure_value is None:
        raise ConfigError("reward.functions", problem, f"{_SIGNATURE}.")
    logger.warning("reward.functions: %s", problem)


def made_up(task: Task, tokenizer: Any, max_tokens: int) -> Iterator[RewardSample]:
    """Yield outputs for `try_rewards`: the answer, and a sentence."""
    for text in (task.answer or "Yes.", "This text is no output of a model."):
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False)[:max_tokens])
        yield RewardSample(task.prompt, text, task.answer, task.metadata, token_ids, "stop", max_tokens)
