"""Comparison of the settings of a checkpoint with those of the run that continues it."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from specactor_ray.config import Config
from specactor_ray.config.training_schema import AlgorithmName, Schedule, TrainerBackend
from specactor_ray.core.errors import ConfigError

logger = logging.getLogger(__name__)

_TASKS = "number of tasks"
_POSITION = (
    "sampling.seed",
    "data.path",
    "data.split",
    "data.options",
    "data.limit",
    "data.shuffle",
    "trainer.prompts_per_step",
)
"""Keys for which another value makes the saved position one in other tasks or in another order."""
_TRAINER = (
    "trainer.learning_rate",
    "trainer.beta1",
    "trainer.beta2",
    "trainer.weight_decay",
    "trainer.warmup_steps",
    "trainer.schedule",
    "trainer.max_grad_norm",
    "trainer.mini_batches",
    "trainer.epochs",
    "trainer.dtype",
    "trainer.max_staleness",
)
_DATA = ("data.n", "data.chat", "data.system_prompt", "data.prompt_key", "data.answer_key")
_SECTIONS = ("algorithm", "sampling", "reward", "environment")
_HARMLESS = (
    "algorithm.max_logprob_gap",
    "reward.timeout_s",
    "reward.workers",
    "environment.timeout_s",
    "environment.workers",
)


def settings_of(config: Config, tasks: int | None = None) -> dict[str, Any]:
    """Settings that determine a run's results, by key; values as in JSON."""
    settings = {key: attrgetter(key)(config) for key in (*_POSITION, *_TRAINER, *_DATA, "trainer.backend")}
    for section in _SECTIONS:
        values = asdict(getattr(config, section))
        settings |= {f"{section}.{name}": value for name, value in values.items()}
    if config.trainer.backend is TrainerBackend.deepspeed:
        settings |= {"trainer.ranks": config.trainer.ranks, "trainer.zero_stage": config.trainer.zero_stage}
    if config.trainer.schedule is not Schedule.constant:
        settings["trainer.steps"] = config.trainer.steps
    if config.data.path is not None:
        settings["data.path"] = os.path.normpath(config.data.path) if ":" not in config.data.path else config.data.path
    for section in ("data", "environment"):  # may hold a token, which must not be in a checkpoint
        options = getattr(config, section).options
        settings[f"{section}.options"] = zlib.crc32(json.dumps(options, sort_keys=True, default=str).encode())
    if tasks is not None:
        settings[_TASKS] = tasks
    kept = {key: value for key, value in settings.items() if key not in _HARMLESS}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def compare_settings(checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue if the data's position or the files would not fit; warn by name of all other changes.

    Args:
        before: Settings of the checkpoint; keys that are missing in it are not compared.

    Raises:
        ConfigError: A changed setting makes the checkpoint unusable; the message has key, both values and the fix.
    """
    changed = {key: (before[key], value) for key, value in now.items() if key in before and before[key] != value}
    for key in (*_POSITION, _TASKS):
        if key in changed:
            _refuse(checkpoint, key, *changed[key], "its position in the data would mean other tasks")
    for key in ("trainer.backend", "trainer.ranks", "trainer.zero_stage"):
        if key in changed:
            _refuse(checkpoint, key, *changed[key], "the optimizer's state does not fit")
    if AlgorithmName.ppo.value in changed.get("algorithm.name", ()):
        _refuse(checkpoint, "algorithm.name", *changed["algorithm.name"], "only ppo has a value head")
    for key, (old, new) in changed.items():
        logger.warning("%s is %s now; up to %s it was %s", key, _shown(new), checkpoint.name, _shown(old))


def _refuse(checkpoint: Path, key: str, old: Any, new: Any, why: str) -> None:
    begin = f"begin a new run from its weights (resume=never target.model={checkpoint / 'weights'})"
    if key == _TASKS:
        problem = f"it has {new} tasks now, and {checkpoint} was made with {old}: {why}."
        raise ConfigError("data.path", problem, f"restore the data as it was, or {begin}.")
    if key == "data.options":
        problem = f"they are others than those that {checkpoint} was made with: {why}."
        raise ConfigError(key, problem, f"restore them, or {begin}.")
    problem = f"{_shown(new)} here, and {checkpoint} was made with {_shown(old)}: {why}."
    raise ConfigError(key, problem, f"use {key}={_shown(old)}, or {begin}.")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
