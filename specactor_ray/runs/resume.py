"""Continuing an interrupted rollout: selection of the run, and of its existing trajectories."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from specactor_ray.config import Config, load_config
from specactor_ray.config.schema import AUTO
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import parse_json, read_foreign
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.runs.output import CONFIG_FILE, TRAJECTORIES_FILE, TrajectoryWriter, is_written_to, partial_of
from specactor_ray.sampling.seeds import derive_seed

logger = logging.getLogger(__name__)

_SAME = (
    "target.model",
    "target.backend",
    "target.dtype",
    "target.max_model_len",
    "data.chat",
    *(f"sampling.{field.name}" for field in fields(SamplingParams)),
)
"""Keys whose values determine the outputs."""
_REMOVE = "Fix: remove the line, or begin a new run under another run.name"


def find_unfinished(config: Config) -> Path | None:
    """The folder of the run that `resume=auto` continues: that of `run.name`, or else the latest interrupted run in
    `run.dir` that no process writes to. Sets `run.name`, `data.output`, and for `target.dtype=auto` the data type of
    that run.

    Returns:
        None if there is no such run.

    Raises:
        ConfigError: The run was started with other settings.
    """
    for folder in _candidates(config):
        try:
            saved = _saved_config(folder / CONFIG_FILE)
        except ConfigError:
            if config.run.name:
                raise
            logger.warning("run %s is passed over: its %s cannot be read", folder.name, CONFIG_FILE)
            continue
        output = saved.data.output or folder / TRAJECTORIES_FILE
        partial = partial_of(output)
        if not partial.exists():
            continue
        if config.data.output is not None and Path(config.data.output).resolve() != Path(output).resolve():
            if not config.run.name:
                continue
            problem = f"is {config.data.output!r}, and the interrupted run {folder.name} writes to {str(output)!r}."
            raise ConfigError("data.output", problem, "leave it out, or begin a new run under another run.name.")
        if config.run.name is None and is_written_to(partial):
            logger.warning("run %s is passed over: another process writes its trajectories", folder.name)
            continue
        if config.target.dtype == AUTO:
            config.target.dtype = saved.target.dtype
        for key in _SAME:
            now, before = attrgetter(key)(config), attrgetter(key)(saved)
            if now != before:
                problem = f"is {now!r}, and the interrupted run {folder.name} has {before!r}."
                raise ConfigError(key, problem, "give the same value, or begin a new run under another run.name.")
        config.run.name, config.data.output = folder.name, saved.data.output
        return folder
    return None


def read_finished(writer: TrajectoryWriter, prompts: Sequence[Prompt], config: Config) -> list[dict[str, Any]]:
    """The trajectories that an interrupted run left, in the form of `Trajectory.to_json`.

    Raises:
        InputError: A trajectory is malformed or duplicate, or of other prompts, another seed or a larger group; the
            message has its line.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for number, line in enumerate(writer.kept.split(b"\n")[:-1], start=1):
        where = f"{writer.partial}, line {number}"
        try:
            row = parse_json(line.decode())
            index, sample = row["prompt_index"], row["sample_index"]
            seed = derive_seed(config.sampling.seed, index, sample)
            known = isinstance(row["finish_reason"], str) and isinstance(row["token_ids"], list)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"{where}: this is no trajectory ({error!r}). {_REMOVE}") from None
        if not known or (index, sample) in rows:
            raise InputError(f"{where}: this is no trajectory, or one that is there twice. {_REMOVE}")
        fits = 0 <= index < len(prompts) and 0 <= sample < config.data.n
        if not fits or row["prompt"] != prompts[index] or row["seed"] != seed:
            raise InputError(
                f"{where}: this trajectory is not one of the {len(prompts)} prompts x {config.data.n} samples that "
                "were asked for. Fix: use the data.path, data.limit and data.n that the run was started with, or begin "
                "a new run under another run.name"
            )
        rows[index, sample] = row
    return list(rows.values())


def _saved_config(file: Path) -> Config:
    try:
        read_foreign(file)
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"cannot be read: {error}.") from None
    return load_config(file)


def _candidates(config: Config) -> Iterator[Path]:
    base = Path(config.run.dir).expanduser()
    if config.run.name:
        named = base / config.run.name
        yield from [named] if (named / CONFIG_FILE).exists() else []
        return
    yield from (
        file.parent for file in sorted(base.glob(f"*/{CONFIG_FILE}"), key=lambda f: f.stat().st_mtime, reverse=True)
    )
