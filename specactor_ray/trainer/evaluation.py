"""Evaluation during training: the tasks that are held out, and the times of their rollouts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import EvaluationConfig
from specactor_ray.core import progress
from specactor_ray.core.errors import ConfigError, InputError, clipped_text
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.runs.checkpoint import TrainState
from specactor_ray.trainer.data import (
    GymSource,
    MixedSource,
    Source,
    TableSource,
    Task,
    TaskStream,
    open_source,
    unusable,
)
from specactor_ray.trainer.rewards import check_rewards

if TYPE_CHECKING:
    from specactor_ray.trainer.experience import Experience, ExperienceMaker

logger = logging.getLogger(__name__)

_COMPARED = 10_000
"""Number of generated tasks of the training that are compared with the held-out ones; of a table all are."""


def hold_out(section: EvaluationConfig, source: Source) -> Callable[[Task], bool]:
    """Whether `evaluation.share` holds out a task, by a hash of seed and prompt, so that equal prompts are on one side:
    of a table exactly this share of its prompts, at least one; of other sources each prompt with this probability.
    ConfigError: no prompt is left to train on."""
    if not section.share:
        return lambda task: False
    salt = section.seed.to_bytes(8, "little")

    def rank(task: Task) -> int:
        return int.from_bytes(hashlib.blake2b(_key(task.prompt), digest_size=8, salt=salt).digest(), "little")

    below = int(section.share * 2**64)
    if isinstance(source, TableSource):
        ranks = sorted({rank(source[index]) for index in range(len(source))})
        count = max(1, round(section.share * len(ranks)))
        if count >= len(ranks):
            problem = f"{section.share:g} of the {len(ranks)} prompts of data.path leaves none to train on."
            raise ConfigError("evaluation.share", problem, "use a smaller share, or more prompts.")
        below = ranks[count]
    return lambda task: rank(task) < below


def _key(prompt: Prompt) -> bytes:
    return json.dumps(prompt, sort_keys=True, default=str).encode()


@progress.start_phase("checking the tasks of the evaluation")
def evaluation_tasks(config: Config, stream: TaskStream) -> list[Task]:
    """The held-out tasks that fit the model, none if `evaluation` is off; those that are in the training, too, are
    counted in a warning. Raises ConfigError and InputError: they cannot be read or scored, or none can be used."""
    section = config.evaluation
    if not section.is_on:
        return []
    tasks = _from_path(config) if section.path is not None else _share_of(stream, section)
    key = "evaluation.share" if section.path is None else "evaluation.path"
    reasons = [stream.why_not(task) for task in tasks]
    if all(reasons):
        raise unusable(key, len(tasks), reasons[0])
    if skipped := [reason for reason in reasons if reason]:
        first = clipped_text(skipped[0], 400)
        logger.warning("%s: %d of %d tasks are skipped (the first: %s)", key, len(skipped), len(tasks), first)
    tasks = [task for task, reason in zip(tasks, reasons, strict=True) if not reason]
    if section.path is not None and (both := _in_training(tasks, stream)):
        logger.warning("evaluation.path: %d of %d prompts are in data.path, too", both, len(tasks))
    return tasks


def _from_path(config: Config) -> list[Task]:
    section = config.evaluation
    given = {name: getattr(section, name) for name in ("path", "split", "options", "limit")}
    with _own_keys():
        source = open_source(replace(config.data, mixture=[], **given), section.seed)
        tasks = [source[index] for index in range(len(source))]
        check_rewards(config, tasks[:2], source.without_answer)
    return tasks


@contextlib.contextmanager
def _own_keys() -> Iterator[None]:
    """Raise the errors of a source of tasks under the keys of `evaluation`."""
    try:
        yield
    except ConfigError as error:
        section, _, name = error.key.partition(".")
        if section != "data" or not hasattr(EvaluationConfig(), name):
            raise ConfigError("evaluation.path", f"{error.key}: {error.problem}", error.fix) from None
        raise ConfigError(f"evaluation.{name}", error.problem, error.fix) from None
    except InputError as error:
        raise InputError(f"evaluation.path: {str(error).removeprefix('data.path: ')}") from None


def _share_of(stream: TaskStream, section: EvaluationConfig) -> list[Task]:
    """The first held-out tasks of the training's source, each prompt once."""
    found: dict[bytes, Task] = {}
    for index in range(stream.size):
        if len(found) == section.limit:
            break
        if stream.is_held_out(task := stream.source[index]):
            found.setdefault(_key(task.prompt), task)
    if not found:
        problem = f"{section.share:g} holds out none of the {stream.size} tasks of data.path."
        raise ConfigError("evaluation.share", problem, "use a larger share, another evaluation.seed, or a file.")
    return list(found.values())


def _in_training(tasks: list[Task], stream: TaskStream) -> int:
    """Number of tasks whose prompts are in the training's source."""
    sources = stream.source.sources if isinstance(stream.source, MixedSource) else [stream.source]
    trained = {
        _key(source[index].prompt)
        for source in sources
        for index in range(min(len(source), _COMPARED) if isinstance(source, GymSource) else len(source))
    }
    return sum(_key(task.prompt) in trained for task in tasks)


class Evaluator:
    """Rolls out the held-out tasks on the verifiers of the training, with their drafts. The seed of a sample depends on
    the task and the sample alone, so that evaluations of equal weights are equal."""

    def __init__(self, config: Config, tasks: list[Task], maker: ExperienceMaker) -> None:
        self._config, self._tasks, self._maker = config, tasks, maker

    def is_due(self, state: TrainState) -> bool:
        """Whether to evaluate now: at the start, every `evaluation.every` steps, and after the last one."""
        step, is_last = state.step, state.step == self._config.trainer.steps
        is_wanted = state.evaluated < 0 or step % self._config.evaluation.every == 0 or is_last
        return is_wanted and state.evaluated < step

    def run(self, rollout: Any) -> Experience:
        """Roll out and score all tasks with the present weights of the verifiers."""
        section, sampling = self._config.evaluation, self._config.sampling
        warmth = sampling.temperature if section.temperature is None else section.temperature
        own = replace(sampling, seed=section.seed, temperature=warmth)
        return self._maker.evaluate(rollout, own, self._tasks, section.n)
