"""Trajectories of a rollout in a file, and the choice of the interrupted run to which more are added.

Trajectories go to a partial file, each in one write as soon as it ended, so an interrupted run keeps all finished ones;
the file gets its final name once the last trajectory is in it. Those that are scored are in a file of their own before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from specactor_ray.config import Config
from specactor_ray.config.schema import AUTO
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import append_json, flush_entry, parse_json, without_nan
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import Prompt, Row, split_row
from specactor_ray.runs.folder import (
    CONFIG_FILE,
    PARTIAL_FILE,
    TRAJECTORIES_FILE,
    UNSCORED_FILE,
    RunLease,
    lease_unfinished,
    saved_config,
)
from specactor_ray.sampling.seeds import derive_seed

_SAME = (
    "target.model",
    "target.backend",
    "target.dtype",
    "target.max_model_len",
    "data.chat",
    "data.add_special_tokens",
    "data.split_special_tokens",
    *(f"sampling.{field.name}" for field in fields(SamplingParams)),
    "reward.functions",
)
"""Keys that determine the outputs, and whether they are scored."""
_SAME_REWARDS = ("reward.answer_pattern", "reward.failure_value", "data.answer_key")
"""Keys that determine the rewards, if there are functions."""
_REASONS = ("stop", "length", "abort", "error")
_KINDS = {"finish_reason": str, "token_ids": list, "seed": int}
_REMOVE = "Fix: remove the line, or begin a new run under another run.name"


class _Lines:
    """Appends lines to a file, also to that of an interrupted run; half a line at its end is dropped with the first
    write. For one process: that of the run's lease. InputError: the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.touch()
            with open(path, "r+b") as file:
                content = file.read()
        except OSError as error:
            raise InputError(f"run.dir: {path} cannot be opened ({error.strerror})") from None
        self.kept = content[: content.rfind(b"\n") + 1]
        """Whole lines that an interrupted run left."""
        self._torn = len(self.kept) < len(content)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. It is in the file when this returns, or not at all (a full disk raises OSError)."""
        self.drop_half_a_line()
        append_json(self.path, row)

    def drop_half_a_line(self) -> None:
        if self._torn:
            os.truncate(self.path, len(self.kept))
            self._torn = False


class TrajectoryWriter:
    """Writes the trajectories of a run. Outputs of a `scored` run are in a file of their own until they have rewards,
    which a reward of a whole group gives late. Raises as `_Lines`."""

    def __init__(self, folder: Path, scored: bool = False) -> None:
        self.path, self.file = folder / TRAJECTORIES_FILE, _Lines(folder / PARTIAL_FILE)
        self.unscored = _Lines(folder / UNSCORED_FILE) if scored else None
        self.partial = self.file.path

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a trajectory; see `_Lines.write`."""
        self.file.write(row)

    def write_unscored(self, row: Mapping[str, Any]) -> None:
        """Append a trajectory that is scored before it is written."""
        assert self.unscored is not None
        self.unscored.write(row)

    def complete(self) -> None:
        """Give the file its name, since all trajectories are in it; `flush` comes before."""
        if self.unscored is not None:
            self.unscored.path.unlink(missing_ok=True)
        os.rename(self.partial, self.path)

    def flush(self) -> None:
        """Bring all trajectories to the disk."""
        self.file.drop_half_a_line()
        flush_entry(self.partial)


def lease_interrupted(config: Config) -> tuple[Path, RunLease] | None:
    """The rollout that `resume=auto` continues, and its lease: that of `run.name`, or else the latest interrupted one
    in `run.dir` that no process uses. Sets `run.name`, and for `target.dtype=auto` its data type.

    Raises:
        ConfigError: The run was started with other settings, or its configuration cannot be read.
        RunInUseError: The named run is in use.
    """
    begun = (PARTIAL_FILE, CONFIG_FILE)
    found = lease_unfinished(config.run, PARTIAL_FILE, lambda folder: all((folder / name).exists() for name in begun))
    if found is None:
        return None
    folder, lease = found
    try:
        saved = saved_config(folder)
        if config.target.dtype == AUTO:
            config.target.dtype = saved.target.dtype
        for key in (*_SAME, *(_SAME_REWARDS if config.reward.functions else ())):
            now, before = (json.dumps(attrgetter(key)(one), default=vars) for one in (config, saved))
            if now != before:
                problem = f"is {now}, and the interrupted run {folder.name} has {before}."
                raise ConfigError(key, problem, "give the same value, or begin a new run under another run.name.")
    except BaseException:
        lease.release()
        raise
    config.run.name = folder.name
    return found


class SavedRows(NamedTuple):
    """Trajectories that an interrupted run left, in the form of `Trajectory.to_json`."""

    rows: Sequence[dict[str, Any]] = ()
    unscored: Sequence[dict[str, Any]] = ()
    """Those without a reward yet."""


def read_finished(writer: TrajectoryWriter, given: Sequence[Prompt | Row], config: Config) -> SavedRows:
    """The trajectories of rows of prompts that an interrupted run left.

    Raises:
        InputError: A trajectory is malformed or duplicate, or of other prompts, another seed or a larger group; the
            message has its line.
    """
    # `append_json` has null in place of NaN.
    prompts = [(prompt, without_nan(columns)) for prompt, columns in map(split_row, given)]
    rows = _read(writer.file, prompts, config)
    ended = {} if writer.unscored is None else _read(writer.unscored, prompts, config)
    return SavedRows(list(rows.values()), [row for place, row in ended.items() if place not in rows])


def _read(
    file: _Lines, prompts: Sequence[tuple[Prompt, Mapping[str, Any]]], config: Config
) -> dict[tuple[int, int], dict[str, Any]]:
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for number, line in enumerate(file.kept.split(b"\n")[:-1], start=1):
        where = f"{file.path}, line {number}"
        try:
            row = parse_json(line.decode())
            index, sample = row["prompt_index"], row["sample_index"]
            known = all(isinstance(row[name], kind) for name, kind in _KINDS.items())
            known &= type(index) is type(sample) is int and row["finish_reason"] in _REASONS
            seed = derive_seed(config.sampling.seed, index, sample) if known else None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"{where}: this is no trajectory ({error!r}). {_REMOVE}") from None
        if not known or (index, sample) in rows:
            raise InputError(f"{where}: this is no trajectory, or one that is there twice. {_REMOVE}")
        fits = 0 <= index < len(prompts) and 0 <= sample < config.data.n
        if not fits or (row["prompt"], row.get("columns", {})) != prompts[index] or row["seed"] != seed:
            raise InputError(
                f"{where}: this trajectory is not one of the {len(prompts)} prompts x {config.data.n} samples that "
                "were asked for. Fix: use the data.path, data.limit and data.n that the run was started with, or begin "
                "a new run under another run.name"
            )
        rows[index, sample] = row
    return rows
