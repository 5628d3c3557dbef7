"""Files that a run writes. Existing files are not overwritten, and incomplete files are named differently.

Trajectories go to `NAME.partial`, each in one write as soon as it ended, so an interrupted run keeps all finished ones;
the file gets its final name once the last trajectory is in it. The partial file is also the lock: it is locked while
its writer lives, and the second of two runs with the same output is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config
from specactor_ray.config.load import save_config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import names_open_file, open_regular, remove_if_empty

CONFIG_FILE, SUMMARY_FILE, TRAJECTORIES_FILE = "config.yaml", "summary.json", "trajectories.jsonl"


def partial_of(path: str | Path) -> Path:
    """Path of the trajectories of an output file until all of them are written."""
    path = Path(path)
    return path.with_name(path.name + ".partial")


def is_written_to(partial: Path) -> bool:
    """Whether a process writes to this partial file now."""
    with contextlib.suppress(OSError), open(open_regular(partial), "rb") as file:
        return not _lock(file.fileno())
    return False


class TrajectoryWriter:
    """Appends trajectories to a JSONL file that must not exist yet.

    Args:
        path: The file.
        resume: Append to the file of an interrupted run; half a line at its end is dropped with the first write.

    Raises:
        InputError: The file, or the partial file of an interrupted run, exists; or it cannot be created. With `resume`:
            another process writes it.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self.path = Path(path)
        self.partial = partial_of(self.path)
        self.kept = b""
        """Whole lines that an interrupted run left."""
        self.keep_empty = resume
        """Whether a partial file without a line is kept: a run that has begun can be continued."""
        self._torn = False
        self._complete = False
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
        if not self._complete and self.count == 0 and not self.keep_empty:
            self.partial.unlink(missing_ok=True)  # while it is still locked
        os.close(self._descriptor)
        self._descriptor = -1

    def _claim(self) -> int:
        try:
            descriptor = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileNotFoundError:
            problem = f"there is no folder {self.path.parent}; make it, or name a file elsewhere"
            raise InputError(f"data.output: {problem}") from None
        except NotADirectoryError:
            raise InputError(f"data.output: {self.path.parent} is not a folder") from None
        except FileExistsError:
            if is_written_to(self.partial):
                raise InputError(self._in_use()) from None
            raise InputError(
                f"data.output: {self.partial} exists: a run was interrupted and left its finished trajectories there. "
                "Continue it with resume=auto (and its run.name), move the file away or name another one"
            ) from None
        except OSError as error:
            raise InputError(f"data.output: {self.path} cannot be created ({error.strerror})") from None
        if not _lock(descriptor):  # another process continues the run
            os.close(descriptor)
            raise InputError(self._in_use())
        # Checked after the partial file is locked: a run that ended a moment ago has renamed its own by now.
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
        if not _lock(descriptor, tries=5) or not names_open_file(self.partial, descriptor):
            os.close(descriptor)
            raise InputError(self._in_use())
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
        self.kept = content[: content.rfind(b"\n") + 1]
        self._torn = len(self.kept) < len(content)
        return descriptor

    def _drop_half_a_line(self) -> None:
        if self._torn:
            os.ftruncate(self._descriptor, len(self.kept))
            self._torn = False

    def _in_use(self) -> str:
        return f"data.output: another run writes {self.partial} now; wait for it or name another file"


def _lock(descriptor: int, tries: int = 1) -> bool:
    """Lock a file while it is open. False if another process has the lock; true if there are no locks."""
    for attempt in range(tries):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt < tries - 1:
                SYSTEM.sleep(0.02)  # `is_written_to` holds the lock for a moment
        except OSError:  # a network file system without locks
            return True
    return False


def _state_of(summary: Path) -> str:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return f"is {json.loads(summary.read_text())['status']}"
    return "left no trajectories, or is of another command"


def claim_run_folder(config: Config) -> Path:
    """Name the run if it has no name yet, create its folder and save the resolved configuration in it.

    Raises:
        InputError: The folder holds another run, or cannot be made.
    """
    config.run.name = config.run.name or new_run_name()
    folder = Path(config.run.dir).expanduser() / config.run.name
    for name in (CONFIG_FILE, SUMMARY_FILE):
        if (folder / name).exists():
            fix = "choose another name, or continue an interrupted run with resume=auto"
            if config.resume == "auto":
                state = _state_of(folder / SUMMARY_FILE)
                fix = f"it {state}, so there is nothing to continue in it. Choose another name"
            raise InputError(f"run.name: {folder} holds an earlier run ({name} is there); {fix}")
    save_run_config(config, folder)
    return folder


def save_run_config(config: Config, folder: Path) -> None:
    """Write the resolved configuration into a run's folder, which is created if it does not exist.

    Raises:
        InputError: The folder cannot be written to.
    """
    try:
        save_config(config, folder / CONFIG_FILE)
    except OSError as error:
        raise InputError(f"run.dir: {folder} cannot be written to ({error.strerror}); name another folder") from None


def discard_run_folder(folder: Path) -> None:
    """Remove the configuration of a run that ended before it began, and its folders if they are empty then."""
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    remove_if_empty(folder, folder.parent)
