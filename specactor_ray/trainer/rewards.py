"""Reward functions, from one output to a number, and scoring of outputs in worker processes: in training, and of the
rows of a rollout."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import math
import numbers
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from specactor_ray.config.fields import reject_unlisted
from specactor_ray.config.methods import import_named, is_named
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import LARGEST_REWARD, RewardConfig, RewardFunctionConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ConfigError, InputError, clipped, clipped_text, counted_by_kind, place_of
from specactor_ray.rollout.prompts import Prompt, is_token_ids, split_row
from specactor_ray.trainer.data import Source, Task, answer_text, has_reference, is_blank
from specactor_ray.trainer.workers import Outcome, WorkerPool, answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One output, with the data of its task."""

    prompt: Prompt
    text: str
    """The whole output."""
    answer: str | None
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's keys, but for its prompt."""
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


RewardFunction = Callable[..., Any]
"""Takes a `RewardSample`, or the arguments of TRL's or verl's form; see `_Term`. It may be asynchronous."""


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
_BATCH = frozenset(("prompts", "completions", "completion_ids"))
"""Parameters of TRL's form, one of which a function of a batch has."""
_FORMS = (
    "it returns a number for any output, such as 0.0 for one that it cannot read, and takes one output, def f(sample) "
    "(sample.text, sample.answer, sample.metadata); or a batch as in TRL, def f(completions, **columns), and returns a "
    "list; or def f(data_source, solution_str, ground_truth, extra_info), as in verl"
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
        raise ConfigError(_KEY, f"{name} is not a function.", f"name one; {_FORMS}.")
    return function  # type: ignore[no-any-return]


class _Term:
    """A reward function, called in the form that the names of its parameters show. Raises ConfigError if it is not
    available, or has another form.

    `prompts`, `completions` or `completion_ids`: TRL's, a batch; each completion is a message if the prompt has
    messages, else a text. `solution_str`: verl's. One parameter: a `RewardSample`.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.name, self.weight, self._function = config.name, config.weight, find_reward(config.name)
        try:
            self._signature = inspect.signature(self._function)
            names = self._signature.parameters.keys()
            self.takes_batch, self._is_verl = bool(_BATCH & names), "solution_str" in names
            if not self.takes_batch and not self._is_verl:
                self._signature.bind(None)
        except (TypeError, ValueError) as error:
            problem = f"{self._place} has none of the forms of a reward function ({clipped_text(str(error))})."
            raise ConfigError(_KEY, problem, f"{_FORMS}.") from None

    def values(self, samples: Sequence[RewardSample]) -> list[float | Exception | None]:
        """Value of each output, None if the function does not apply to it, or an error."""
        found = _tried(self._batch, samples) if self.takes_batch else [_tried(self._one, one) for one in samples]
        return [_tried(self._number, one) for one in (found if isinstance(found, list) else [found] * len(samples))]

    def _one(self, sample: RewardSample) -> Any:
        if not self._is_verl:
            return _awaited(self._function(sample))
        columns = sample.metadata
        value = self._called(
            data_source=columns.get("data_source", ""),
            solution_str=sample.text,
            ground_truth=(columns.get("reward_model") or {}).get("ground_truth", sample.answer),
            extra_info=columns.get("extra_info", columns),
        )
        return value["score"] if isinstance(value, Mapping) else value

    def _batch(self, samples: Sequence[RewardSample]) -> list[Any]:
        columns = {"answer": samples[0].answer, **samples[0].metadata}  # the same for all outputs of a prompt
        is_text = isinstance(samples[0].prompt, str) or is_token_ids(samples[0].prompt)
        texts = [sample.text for sample in samples]
        values = self._called(
            **{name: [value] * len(samples) for name, value in columns.items() if name not in _BATCH},
            prompts=[sample.prompt for sample in samples],
            completions=texts if is_text else [[{"role": "assistant", "content": text}] for text in texts],
            completion_ids=[list(sample.token_ids) for sample in samples],
        )
        found = None if isinstance(values, str | Mapping) or not hasattr(values, "__iter__") else list(values)
        if found is None or len(found) != len(samples):
            what = clipped(values) if found is None else f"{len(found)} values"
            raise ValueError(f"{self._place} returned {what} for {len(samples)} completions: one number each is needed")
        return found

    def _called(self, **arguments: Any) -> Any:
        """Result for those of the arguments that the function takes."""
        parameters = self._signature.parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return _awaited(
            self._function(**{name: arguments[name] for name in arguments if takes_all or name in parameters})
        )

    def _number(self, value: Any) -> float | None:
        if isinstance(value, Exception):
            raise value
        return None if value is None and self.takes_batch else finite_number(value, f"{self._place} returned")

    @property
    def _place(self) -> str:
        return self.name + place_of(self._function)


def finite_number(value: Any, what: str) -> float:
    """A number as float; so are true and false, and arrays and tensors without dimensions. A text is none, also one of
    digits: a function that returns it did not compare anything. Raises ValueError, which begins with `what`."""
    plain = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain) or np.ma.is_masked(value):
        raise ValueError(f"{what} {clipped(value)}, which is no finite number")
    return float(plain)


def _tried(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return error


def _awaited(value: Any) -> Any:
    """The result of a coroutine; other values as they are."""
    return asyncio.run_coroutine_threadsafe(value, _loop()).result() if inspect.iscoroutine(value) else value


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Event loop of asynchronous functions, one for all calls of a process. It has a thread of its own: steps of an
    environment, which call functions, run in another loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


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
    them is not available, or named twice."""

    def __init__(self, config: RewardConfig) -> None:
        self._pattern, self._terms = config.answer_pattern, [_Term(one) for one in config.functions]
        self.takes_batch = any(term.takes_batch for term in self._terms)
        """Whether a function takes all outputs of a prompt at once."""
        if twice := [name for name, count in Counter(term.name for term in self._terms).items() if count > 1]:
            raise ConfigError(_KEY, f"{twice[0]} is there twice.", "name it once; its weight is the sum of the two.")

    def __call__(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        """The `Score` of each output; all are of one prompt."""
        return [answer(self._sum, values) for values in zip(*self._values(samples), strict=True)]

    def score(self, sample: RewardSample) -> Score:
        """The score of one output. Raises the errors of the functions, and ValueError if it has no reward."""
        return self._sum([value for (value,) in self._values([sample])])

    def _values(self, samples: Sequence[RewardSample]) -> list[list[float | Exception | None]]:
        """By function, and by sample."""
        samples = [replace(one, response=extract_answer(one.text, self._pattern)) for one in samples]
        return [term.values(samples) for term in self._terms]

    def _sum(self, values: Sequence[float | Exception | None]) -> Score:
        rewards, products = dict[str, float | None](), list[float]()
        for term, value in zip(self._terms, values, strict=True):
            if isinstance(value, Exception):
                raise value
            rewards[term.name] = value
            products += [] if value is None else [term.weight * value]
        if not products:
            raise ValueError("no reward function applies to it: each returned None")
        return Score(checked_reward(sum(products)), rewards)


class RewardPool(WorkerPool):
    """Processes that score."""

    def __init__(self, config: RewardConfig, workers: int) -> None:
        super().__init__("reward", config.timeout_s, partial(Scorer, config), workers)
        self.takes_batch = Scorer(config).takes_batch

    def score(self, samples: Sequence[RewardSample]) -> Future[list[Outcome]]:
        """Begin to score outputs of one prompt together."""
        return self._threads.submit(self._scored, samples)

    def _scored(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        outcomes, problem = self._answer(samples, len(samples))
        return [(None, problem)] * len(samples) if problem else outcomes


Submitted = tuple[list[Any], Future[list[Outcome]]]
"""Outputs of one prompt, and the future of their outcomes: a `Score` each, or None and the reason if there is none."""


class Scoring:
    """Scores outputs as they end. For a function of a batch, outputs of a prompt are scored together once all `n` have
    ended, in their order: a score does not depend on the time of ends."""

    def __init__(self, pool: RewardPool, n: int) -> None:
        self._pool, self.size = pool, n if pool.takes_batch else 1
        """Number of outputs that are scored together."""
        self._groups = defaultdict[int, dict[int, tuple[Any, RewardSample | None]]](dict)

    def add(self, output: Any, prompt: int, number: int, sample: RewardSample | None) -> Submitted | None:
        """Take an output of a prompt, with its number; `sample` is None if there is none to score. Returns the outputs
        that are scored now, if any."""
        group = self._groups[prompt]
        group[number] = (output, sample)
        if len(group) < self.size:
            return None
        there = [(one, found) for _, (one, found) in sorted(self._groups.pop(prompt).items()) if found is not None]
        return ([one for one, _ in there], self._pool.score([found for _, found in there])) if there else None


def made_up_samples(task: Task, most: int) -> list[RewardSample]:
    """Outputs for a task that no model wrote, one of them its answer. `most`: `sampling.max_tokens`."""
    texts = [text or task.answer or "Yes." for text in _MADE_UP]
    return [reward_sample(task, text, range(8), "stop", most) for text in texts]


def missing_answer(config: Config, source: Source) -> str:
    """Place of the first task without an answer, empty if none needs one: an environment of the user's own may give its
    rewards without `Turn.score`, which raises the errors of the functions."""
    return "" if is_named(config.environment.name or "") else source.without_answer


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
    with RewardPool(config.reward, 1) as pool:
        for task in tasks:
            made_up = made_up_samples(task, most)
            for samples in [made_up] if pool.takes_batch else [[one] for one in made_up]:
                problems = [problem for _, problem in SYSTEM.result(pool.score(samples), math.inf)]
                if "" in problems:
                    return
                reasons.update(problems)
    problem = f"{own} gave no reward to made-up outputs for the first tasks: {counted_by_kind(reasons)}."
    if config.reward.failure_value is None:
        raise ConfigError(_KEY, problem, f"{_FORMS}.")
    logger.warning("%s: %s", _KEY, problem)


class RolloutScorer:
    """A `RowScorer`: scores a rollout's rows. The answer is the column `data.answer_key`."""

    def __init__(self, config: Config, pool: RewardPool) -> None:
        self._config, self._scoring = config, Scoring(pool, config.data.n)

    def check(self, rows: Sequence[Any]) -> None:
        tasks = [self._task(*split_row(row), f"prompt {number}") for number, row in enumerate(rows, start=1)]
        check_rewards(self._config, tasks[:2], next((one.place for one in tasks if not has_reference(one.answer)), ""))

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        there = Counter(row["prompt_index"] for row in rows)
        for row in rows:
            if there[row["prompt_index"]] < self._scoring.size:
                self.submit(row)

    def submit(self, row: Mapping[str, Any]) -> Submitted | None:
        task, most = self._task(row["prompt"], row.get("columns", {}), "the row"), self._config.sampling.max_tokens
        sample = reward_sample(task, row["text"], row["token_ids"], row["finish_reason"], most)
        is_scored = row["finish_reason"] != "error"
        return self._scoring.add(row, row["prompt_index"], row["sample_index"], sample if is_scored else None)

    def _task(self, prompt: Any, columns: Mapping[str, Any], place: str) -> Task:
        key = self._config.data.answer_key
        return Task(0, prompt, answer_text(columns.get(key), place, key), columns, place)


@contextmanager
def row_scorer(config: Config) -> Iterator[RolloutScorer | None]:
    """The scorer of a rollout, None without `reward.functions`; its processes end with the context. Raises ConfigError
    for a function that is not available."""
    if not config.reward.functions:
        yield None
        return
    with RewardPool(config.reward, config.reward.workers) as pool:
        yield RolloutScorer(config, pool)
