"""Reward functions, from one output to a number, and scoring of outputs in worker processes: in training, and of the
rows of a rollout."""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specactor_ray.config.fields import reject_unlisted
from specactor_ray.config.methods import import_named
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import LARGEST_REWARD, RewardConfig, RewardFunctionConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ConfigError, InputError, clipped, counted_by_kind, place_of
from specactor_ray.rollout.prompts import split_row
from specactor_ray.trainer.data import Task, answer_text, has_reference, is_blank
from specactor_ray.trainer.workers import Outcome, WorkerPool

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


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of an output or a conversation."""

    reward: float
    """Weighted sum over the functions."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Value of each function before its weight, by name; None if the function does not apply to the output."""


def reward_sample(task: Task, text: str, token_ids: Sequence[int], finish_reason: str, most: int) -> RewardSample:
    """Input of the reward functions for an output, or for a turn after which the sample has these own tokens. `most`:
    `sampling.max_tokens`."""
    return RewardSample(task.prompt, text, task.answer, task.metadata, tuple(token_ids), finish_reason, most)


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
_KEY = "reward.functions"
_SIGNATURE = (
    "def reward(sample) returns a number for any output, such as 0.0 for one that it cannot read; it takes one output "
    "(sample.text, sample.answer, sample.metadata), where a function of TRL takes a batch"
)
_MADE_UP = ("", "This text is no output of a model.")
"""Texts of made-up outputs; in place of the empty one the answer of the task."""


def find_reward(name: str) -> RewardFunction:
    """The reward function with this name, or the user's own `package.module:function`. Raises ConfigError if it does
    not exist, or needs a module that cannot be imported."""
    if ":" not in name:
        reject_unlisted(_KEY, name, (*sorted(REWARDS), "package.module:function"))
        if name in _NEEDS:
            try:
                importlib.import_module(_NEEDS[name])
            except ImportError:
                problem = f"{name!r} needs the package {_NEEDS[name]}."
                raise ConfigError(_KEY, problem, f"pip install {_NEEDS[name]}.") from None
        return REWARDS[name]
    function = import_named(name, _KEY)
    if not callable(function):
        raise ConfigError(_KEY, f"{name} is not a function.", "name one that takes a RewardSample.")
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

    def __call__(self, sample: RewardSample) -> Score:
        """The score. Raises ValueError if it is no number of `checked_reward`, and the errors of the functions."""
        sample = replace(sample, response=extract_answer(sample.text, self._pattern))
        values = {term.name: _number(term.name, function, function(sample)) for term, function in self._terms}
        return Score(checked_reward(sum(term.weight * values[term.name] for term, _ in self._terms)), values)


def _number(name: str, function: RewardFunction, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}{place_of(function)} returned {clipped(value)}, which is no number") from None


def reward_pool(config: RewardConfig, workers: int) -> WorkerPool:
    """Processes that score: `RewardSample` → `Score`."""
    return WorkerPool("reward", config.timeout_s, partial(Scorer, config), workers)


def check_rewards(config: Config, tasks: Sequence[Task], without_answer: str) -> None:
    """Check that the reward functions have the answers that they need, and that those of the user score made-up outputs
    for these tasks, in a process as in training. `without_answer`: place of the first task without one, or empty.

    Raises InputError and ConfigError. With `reward.failure_value`, to which functions may leave outputs, functions
    without a reward are logged."""
    names = [term.name for term in config.reward.functions]
    if without_answer and (needing := [name for name in names if name in NEED_ANSWERS]):
        raise InputError(
            f"data.path: {without_answer} has no {config.data.answer_key!r} (data.answer_key), or an empty one, and "
            f"the reward {needing[0]} compares with it. Fix: add it, or choose another reward.functions"
        )
    own = ", ".join(name for name in names if ":" in name)
    if not own:
        return
    reasons, most = Counter[str](), config.sampling.max_tokens
    with reward_pool(config.reward, 1) as scorers:
        for task, text in itertools.product(tasks, _MADE_UP):
            made_up = reward_sample(task, text or task.answer or "Yes.", range(8), "stop", most)
            _, problem = SYSTEM.result(scorers.submit(made_up), math.inf)
            if not problem:
                return
            reasons[problem] += 1
    problem = f"{own} gave no reward to made-up outputs for the first tasks: {counted_by_kind(reasons)}."
    if config.reward.failure_value is None:
        raise ConfigError(_KEY, problem, f"{_SIGNATURE}.")
    logger.warning("%s: %s", _KEY, problem)


class RolloutScorer:
    """A `RowScorer`: scores a rollout's rows. The answer is the column `data.answer_key`, all others are metadata."""

    def __init__(self, config: Config, pool: WorkerPool) -> None:
        self._config, self._pool = config, pool

    def check(self, rows: Sequence[Any]) -> None:
        tasks = [self._task(*split_row(row), f"prompt {number}") for number, row in enumerate(rows, start=1)]
        check_rewards(self._config, tasks[:2], next((one.place for one in tasks if not has_reference(one.answer)), ""))

    def submit(self, row: Mapping[str, Any]) -> Future[Outcome]:
        task, most = self._task(row["prompt"], row.get("columns", {}), "the row"), self._config.sampling.max_tokens
        return self._pool.submit(reward_sample(task, row["text"], row["token_ids"], row["finish_reason"], most))

    def _task(self, prompt: Any, columns: Mapping[str, Any], place: str) -> Task:
        rest, key = dict(columns), self._config.data.answer_key
        return Task(0, prompt, answer_text(rest.pop(key, None), place, key), rest, place)


@contextmanager
def row_scorer(config: Config) -> Iterator[RolloutScorer | None]:
    """The scorer of a rollout, None without `reward.functions`; its processes end with the context. Raises ConfigError
    for a function that is not available."""
    if not config.reward.functions:
        yield None
        return
    Scorer(config.reward)
    with reward_pool(config.reward, config.reward.workers) as pool:
        yield RolloutScorer(config, pool)
