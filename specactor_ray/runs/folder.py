"""The folder of a run: its lease, the claim of a new one, and the choice of the one to continue."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config, load_config
from specactor_ray.config.schema import RunConfig
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, InputError, SpecActorError
from specactor_ray.core.files import expanded, parse_json, read_foreign, remove_if_empty

logger = logging.getLogger(__name__)

CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "config.yaml", "summary.json", "run.lock"
TRAJECTORIES_FILE, PARTIAL_FILE = "trajectories.jsonl", "trajectories.jsonl.partial"
UNSCORED_FILE = "unscored.jsonl.partial"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Result of a command that has a run's folder."""

    folder: Path
    summary: dict[str, Any]
    """Content of `summary.json`."""

    @property
    def status(self) -> str:
        """`complete`; `interrupted`, by Ctrl-C or SIGTERM; `failed`: by an error, with no sound trajectory, or without
        the last checkpoint."""
        return str(self.summary["status"])

    @property
    def exit_code(self) -> int:
        return {"complete": 0, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}[self.status]


class RunInUseError(InputError):
    """Another process uses this folder."""


class RunLease:
    """The right to write in a run's folder, which is created if it does not exist: a file lock, held until `release` or
    the end of the process. `key` names the folder in messages. RunInUseError: another process has the lease; the
    message has its host and process. OSError: the folder cannot be written to."""

    def __init__(self, folder: Path, key: str = "run.name") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK_FILE
        self._lock = FileLock(self._path, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire()
            self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            holder = ""
            with contextlib.suppress(OSError, UnicodeDecodeError):  # it may release the folder now
                holder = self._path.read_text(encoding="utf-8")
            holder = holder or "another process"
            fix = f"wait for it, stop it, or choose another {key}"
            raise RunInUseError(f"{key}: {holder} uses {folder} now. Fix: {fix}") from None
        except OSError as error:
            self._lock.release()
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s: this file system has no locks; start no second process on this run", folder)

    def release(self) -> None:
        """Release the folder for other processes. Idempotent."""
        if self._lock.is_locked:
            self._path.unlink(missing_ok=True)  # while it is still locked
            self._lock.release()


def lease_unfinished(run: RunConfig, file: str, continues: Callable[[Path], bool]) -> tuple[Path, RunLease] | None:
    """The run to continue, and its lease: that of `run.name`, else the latest in `run.dir` that no process uses. Runs
    that end, are removed, or belong to other users meanwhile are left out.

    Args:
        file: File that every run of this kind has, with the time of its last sign of life.
        continues: Whether the run in a folder can be continued.

    Raises:
        InputError: The folder of the named run cannot be written to, or another process uses it (RunInUseError).
    """
    base = expanded(run.dir)
    if run.name is not None:
        folder = base / run.name
        with run_dir_errors(folder):
            return (folder, RunLease(folder)) if continues(folder) else None
    for path in _newest_first(base, file):
        folder = path.parent
        try:
            if not path.exists() or not continues(folder):
                continue
            lease = RunLease(folder)
        except (OSError, RunInUseError) as error:
            logger.warning("resume=auto leaves out %s: %s", folder.name, error)
            continue
        if path.exists() and continues(folder):
            return folder, lease
        lease.release()
        remove_if_empty(folder)  # it was removed, and the lease made it again
        logger.warning("resume=auto leaves out %s: it has ended or was removed meanwhile", folder.name)
    return None


def _newest_first(base: Path, file: str) -> list[Path]:
    """The files of this name in the folders of `base`."""
    times: dict[Path, float] = {}
    with run_dir_errors(base):
        found = list(base.glob(f"*/{file}"))
    for path in found:
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


def lease_new(config: Config) -> tuple[Path, RunLease]:
    """The folder of a new run, and its lease. Names the run if it has no name yet. InputError: the folder holds another
    run, is in use, or cannot be written to."""
    config.run.name = config.run.name or new_run_name()
    folder = expanded(config.run.dir) / config.run.name
    with run_dir_errors(folder):
        lease = RunLease(folder)
    for name in (CONFIG_FILE, SUMMARY_FILE, TRAJECTORIES_FILE, PARTIAL_FILE):
        if (folder / name).exists():
            lease.release()
            fix = "choose another name, or continue an interrupted run with resume=auto"
            if config.resume == "auto":
                status = status_of(folder)
                state = "left no trajectories, or is of another command" if status is None else f"is {status}"
                fix = f"it {state}, so there is nothing to continue in it. Choose another name"
            raise InputError(f"run.name: {folder} holds an earlier run ({name} is there); {fix}")
    return folder, lease


@contextlib.contextmanager
def run_dir_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the file system as InputError of `run.dir`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        named = error.filename or folder
        raise InputError(f"run.dir: {named} cannot be written to ({reason}); name another folder") from None


@contextlib.contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """Raise errors of the file system as one of a run that has begun, and that cannot write its results."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder} cannot be written to ({error.strerror or error})"
        fix = "make room or restore the folder; resume=auto continues with what is there"
        raise SpecActorError(f"run.dir: {what}, so the run ends. Fix: {fix}") from error


def saved_config(folder: Path) -> Config:
    """Configuration of an interrupted run. ConfigError with the file's name if it cannot be read here."""
    file = folder / CONFIG_FILE
    fix = "begin a new run under another run.name, or continue with the version that wrote it."
    try:
        read_foreign(file)  # refuses what is no regular file
        return load_config(file)
    except ConfigError as error:
        raise ConfigError(str(file), f"{error.key}: {error.problem}", fix) from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"cannot be read: {error}.", fix) from None


def status_of(folder: Path) -> str | None:
    """Status in the summary of a run; None if there is none."""
    try:
        return str(parse_json(read_foreign(folder / SUMMARY_FILE))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def discard_run_folder(folder: Path) -> None:
    """Remove the files of a run that ended before it began, and its folders if they are empty then."""
    partial = folder / PARTIAL_FILE
    if not partial.exists() or not partial.stat().st_size:
        names = (PARTIAL_FILE, UNSCORED_FILE, CONFIG_FILE)
        for path in (*(folder / name for name in names), *folder.glob("config-from-step-*.yaml")):
            path.unlink(missing_ok=True)
        remove_if_empty(folder, folder.parent)
