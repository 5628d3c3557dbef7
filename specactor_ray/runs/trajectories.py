"""Trajectories of a rollout in a file, and the choice of the interrupted run to which more are added.

Trajectories go to `NAME.partial`, each in one write as soon as it ended, so an interrupted run keeps all finished ones;
the file gets its final name once the last trajectory is in it. Existing files are not overwritten.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from specactor_ray.config import Config, load_config
from specactor_ray.config.schema import AUTO
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import open_regular, parse_json, read_foreign
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.runs.folder import CONFIG_FILE, RunLease, lease_unfinished
from specactor_ray.sampling.seeds import derive_seed

logger = logging.getLogger(__name__)

TRAJECTORIES_FILE = "trajectories.jsonl"
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


class TrajectoryWriter:
    """Appends trajectories to a JSONL file that must not exist yet. For one process: that of the run's lease.

    Args:
        path: The file.
        resume: Append to the file of an interrupted run; half a line at its end is dropped with the first write.

    Raises:
        InputError: The file, or the partial file of another run, exists; or it cannot be created.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self.path, self.partial = Path(path), partial_of(path)
        self.kept = b""
        """Whole lines that an interrupted run left."""
        self.keep_empty = resume
        """Whether a partial file without a line is kept: a run that has begun can be continued."""
        self._torn = self._complete = False
        self._descriptor = self._reopen() if resume else self._claim()
        self.count = self.kept.count(b"\n")
        """Number of trajectories in the file."""

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def where(self) -> Path:
        """The file that holds the trajectories now."""
        return self.path if self._complete else self.partial

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. It is in the file when this returns, or not at all (a full disk raises OSError)."""
        # A lone surrogate in a prompt has no UTF-8 form; its backslash escape is what JSON writes for it anyway.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._drop_half_a_line()
        begin = os.lseek(self._descriptor, 0, os.SEEK_END)
        # One unbuffered write: a signal between two writes would leave half a line.
        if os.write(self._descriptor, line) < len(line):
            os.ftruncate(self._descriptor, begin)
            raise OSError(f"{self.partial}: the disk is full; {self.count} trajectories are in it")
        self.count += 1

    def complete(self) -> None:
        """Give the file its name, since all trajectories are in it."""
        self._drop_half_a_line()
        os.fsync(self._descriptor)
        os.rename(self.partial, self.path)
        self._complete = True

    def close(self) -> None:
        """Close the file; a partial file without a line is removed if the run never began. Idempotent."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        if not self._complete and self.count == 0 and not self.keep_empty:
            self.partial.unlink(missing_ok=True)

    def _claim(self) -> int:
        try:
            descriptor = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileNotFoundError:
            problem = f"there is no folder {self.path.parent}; make it, or name a file elsewhere"
            raise InputError(f"data.output: {problem}") from None
        except NotADirectoryError:
            raise InputError(f"data.output: {self.path.parent} is not a folder") from None
        except FileExistsError:
            raise InputError(
                f"data.output: {self.partial} exists: a run writes it now, or was interrupted and left its finished "
                "trajectories there. Continue an interrupted run with resume=auto (and its run.name), move the file "
                "away or name another one"
            ) from None
        except OSError as error:
            raise InputError(f"data.output: {self.path} cannot be created ({error.strerror})") from None
        # Checked after the partial file is there: a run that ended a moment ago has renamed its own by now.
        if os.path.lexists(self.path):
            os.close(descriptor)
            self.partial.unlink(missing_ok=True)
            raise InputError(f"data.output: {self.path} exists and is never overwritten; name another file")
        return descriptor

    def _reopen(self) -> int:
        try:
            descriptor = open_regular(self.partial, os.O_RDWR)
        except OSError as error:
            raise InputError(f"data.output: {self.partial} cannot be opened ({error.strerror})") from None
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
        self.kept = content[: content.rfind(b"\n") + 1]
        self._torn = len(self.kept) < len(content)
        return descriptor

    def _drop_half_a_line(self) -> None:
        if self._torn:
            os.ftruncate(self._descriptor, len(self.kept))
            self._torn = False


def partial_of(path: str | Path) -> Path:
    """Path of the trajectories of an output file until all of them are written."""
    return Path(path).with_name(Path(path).name + ".partial")


def lease_interrupted(config: Config) -> tuple[Path, RunLease] | None:
    """The rollout that `resume=auto` continues, and its lease: that of `run.name`, or else the latest interrupted one
    in `run.dir` that no process uses. Sets `run.name`, `data.output`, and for `target.dtype=auto` its data type.

    Raises:
        ConfigError: The run was started with other settings.
        RunInUseError: The named run is in use.
    """
    found = lease_unfinished(config, CONFIG_FILE, lambda folder: _interrupted(folder, config) is not None)
    if found is None:
        return None
    folder, lease = found
    try:
        saved = load_config(folder / CONFIG_FILE)
        if config.target.dtype == AUTO:
            config.target.dtype = saved.target.dtype
        for key in _SAME:
            now, before = attrgetter(key)(config), attrgetter(key)(saved)
            if now != before:
                problem = f"is {now!r}, and the interrupted run {folder.name} has {before!r}."
                raise ConfigError(key, problem, "give the same value, or begin a new run under another run.name.")
    except BaseException:
        lease.release()
        raise
    config.run.name, config.data.output = folder.name, saved.data.output
    return found


def _interrupted(folder: Path, config: Config) -> Config | None:
    """Saved configuration of an interrupted rollout with the wanted output; None for another folder.

    Raises:
        ConfigError: The run is named by `run.name`, and its configuration cannot be read or has another output.
    """
    file, is_named = folder / CONFIG_FILE, config.run.name is not None
    if not file.exists():
        return None
    try:
        read_foreign(file)
        saved = load_config(file)
    except (OSError, ValueError, ConfigError) as error:
        if not is_named:
            logger.warning("run %s is passed over: its %s cannot be read", folder.name, CONFIG_FILE)
            return None
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(file), f"cannot be read: {error}.") from None
    output = saved.data.output or folder / TRAJECTORIES_FILE
    if not partial_of(output).exists():
        return None
    if config.data.output is not None and Path(config.data.output).resolve() != Path(output).resolve():
        if not is_named:
            return None
        problem = f"is {config.data.output!r}, and the interrupted run {folder.name} writes to {str(output)!r}."
        raise ConfigError("data.output", problem, "leave it out, or begin a new run under another run.name.")
    return saved


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
