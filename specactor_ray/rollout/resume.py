"""Continuing an interrupted rollout: which run it is, and which of its trajectories are there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from specactor_ray.config import Config, load_config
from specactor_ray.config.schema import SamplingConfig
from specactor_ray.errors import ConfigError, InputError
from specactor_ray.rollout.output import CONFIG_FILE, TRAJECTORIES_FILE, is_written_to, partial_of
from specactor_ray.rollout.prompts import Prompt, read_jsonl
from specactor_ray.sampling import derive_seed

_SAME = (
    "target.model",
    "target.backend",
    "target.dtype",
    "target.max_model_len",
    "data.chat",
    *(f"sampling.{field.name}" for field in fields(SamplingConfig)),
)
"""With another value the outputs would be others."""


def find_unfinished(config: Config) -> Path | None:
    """The folder of the run that `resume=auto` continues: that of `run.name`, or else the latest in `run.dir` that was
    interrupted and that no process writes to. Fills in `run.name` and `data.output`.

    Returns:
        None where there is no such run.

    Raises:
        ConfigError: The run was started with other settings.
    """
    for folder in _candidates(config):
        try:
            saved = load_config(folder / CONFIG_FILE)
        except ConfigError:
            if config.run.name:
                raise
            continue
        partial = partial_of(saved.data.output or folder / TRAJECTORIES_FILE)
        if not partial.exists() or config.data.output not in (None, saved.data.output):
            continue
        if config.run.name is None and is_written_to(partial):
            continue
        for key in _SAME:
            now, before = attrgetter(key)(config), attrgetter(key)(saved)
            if now != before:
                problem = f"is {now!r}, and the interrupted run {folder.name} has {before!r}."
                raise ConfigError(key, problem, "give the same value, or begin a new run with resume=never.")
        config.run.name, config.data.output = folder.name, saved.data.output
        return folder
    return None


def read_finished(partial: Path, prompts: Sequence[Prompt], config: Config) -> list[dict[str, Any]]:
    """The trajectories that an interrupted run left, as `Trajectory.to_json` made them.

    Raises:
        InputError: One is malformed, or of other prompts, another seed or a larger group; its line is named.
    """
    rows = {}
    for number, row in read_jsonl(partial):
        try:
            index, sample = row["prompt_index"], row["sample_index"]
            seed = derive_seed(config.sampling.seed, index, sample)
            fits = 0 <= index < len(prompts) and 0 <= sample < config.data.n
            same = fits and row["prompt"] == json.loads(json.dumps(prompts[index])) and row["seed"] == seed
            _ = row["finish_reason"], len(row["token_ids"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{partial}, line {number}: this is no trajectory ({error!r})") from None
        if not same:
            raise InputError(
                f"{partial}, line {number}: this trajectory is not one of the {len(prompts)} prompts x {config.data.n} "
                "samples that were asked for. Fix: use the data.path, data.limit and data.n that the run was started "
                "with, or begin a new run with resume=never"
            )
        rows[index, sample] = row
    return list(rows.values())


def _candidates(config: Config) -> Iterator[Path]:
    base = Path(config.run.dir).expanduser()
    if config.run.name:
        named = base / config.run.name
        yield from [named] if (named / CONFIG_FILE).exists() else []
        return
    yield from (
        file.parent for file in sorted(base.glob(f"*/{CONFIG_FILE}"), key=lambda f: f.stat().st_mtime, reverse=True)
    )
