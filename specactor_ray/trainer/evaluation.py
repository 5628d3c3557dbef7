"""The tasks that are held out of a training, to evaluate on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import EvaluationConfig
from specactor_ray.core.errors import ConfigError, InputError, UserError, clipped_text
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.trainer.data import Source, TableSource, Task, TaskStream, open_source, some_prompts, unusable
from specactor_ray.trainer.rewards import check_rewards, missing_answer

logger = logging.getLogger(__name__)

_COMPARED = 10_000
"""Number of tasks of a generated source that are compared with the held-out ones; of a table all are."""


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
    try:
        source = open_source(replace(config.data, mixture=[], **given), section.seed)
        tasks = [source[index] for index in range(len(source))]
        check_rewards(config, tasks[:2], missing_answer(config, source))
    except UserError as error:
        raise InputError(f"evaluation.path: {str(error).removeprefix('data.path: ')}") from None
    return tasks


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
    trained = set(map(_key, some_prompts(stream.source, _COMPARED)))
    return sum(_key(task.prompt) in trained for task in tasks)
