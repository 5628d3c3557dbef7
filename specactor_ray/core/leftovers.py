"""Folders that belong to one process, and the cleanup of those of killed processes.

A folder name has its owner's process id and start time. A later process removes it once that process is gone. Folders
of another user, machine or container are left alone: whether their owner is alive cannot be determined here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_OWNER = "owner"
_SEGMENTS = "segments"
SHARED_MEMORY = Path("/dev/shm")


def start_ticks(pid: int) -> int | None:
    """Start time of a process of this machine, in clock ticks since boot, which distinguishes it from a later one with
    the same pid. None if there is no such process, or it only waits to be reaped."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def make_owned_folder(prefix: str, base: str | Path) -> Path:
    """Create a folder below `base` that only this user may read, with this process as its owner in the name."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    pid = os.getpid()
    (folder / _OWNER).write_text(f"{_where()} {pid} {start_ticks(pid)}", encoding="utf-8")
    return folder


def living_folders(prefix: str, base: str | Path) -> Iterator[Path]:
    """Folders of `make_owned_folder` with living owners."""
    yield from (folder for folder, lives in _own_folders(prefix, base) if lives)


def remove_abandoned(prefix: str, base: str | Path) -> None:
    """Remove the folders of `make_owned_folder` with dead owners, and the shared memory recorded in them."""
    for folder, lives in _own_folders(prefix, base):
        if not lives:
            logger.info("removing %s, left by a process that was killed", folder)
            _remove_segments(folder)
            shutil.rmtree(folder, ignore_errors=True)


def note_segments(folder: Path, names: set[str]) -> None:
    """Record in an owned folder the files of /dev/shm that end with its owner."""
    (folder / _SEGMENTS).write_text("\n".join(sorted(names)), encoding="utf-8")


def mapped_segments(pid: int) -> set[str]:
    """Names of the files of /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if f"{SHARED_MEMORY}/" in line)
    return {path.removeprefix(f"{SHARED_MEMORY}/") for path in paths if not path.endswith(" (deleted)")}


def _where() -> str:
    """Id of this boot of this machine and of this container: process ids have no meaning elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _own_folders(prefix: str, base: str | Path) -> list[tuple[Path, bool]]:
    """Folders of this user, machine and container, each with whether its owner is alive."""
    found = []
    for folder in Path(base).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):  # its owner may be creating or removing it now
            facts = folder.lstat()
            where, pid, ticks = (folder / _OWNER).read_text(encoding="utf-8").split(" ")
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and where == _where():
                found.append((folder, start_ticks(int(pid)) == int(ticks)))
    return found


def _remove_segments(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for name in (folder / _SEGMENTS).read_text(encoding="utf-8").splitlines():
            path = SHARED_MEMORY / name
            with contextlib.suppress(OSError):
                if "/" not in name and path.lstat().st_uid == os.getuid():
                    path.unlink()
