"""What chaos needs of the machine: its own processes and shared memory, a memory cgroup, a disk that runs full."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from specactor_ray.core.leftovers import SHARED_MEMORY, mapped_segments, start_ticks

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MARK = "SPECACTOR_CHAOS"
"""Environment variable that all processes of a chaos run inherit."""


def marked_processes(mark: str) -> dict[int, str]:
    """Processes of this run, this one and its ancestors left out: pid → command line."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    skipped = set(_ancestors(os.getpid()))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in skipped or start_ticks(int(entry.name)) is None:
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = command.strip()[:160]
    return found


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])


def await_gone(mark: str, timeout_s: float) -> dict[int, str]:
    """Wait until no process of the run is left; returns those that are after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def end_run(mark: str, timeout_s: float = 60.0) -> None:
    """End every process of the run, those that are still being started too, and wait until they are gone."""
    end = time.monotonic() + timeout_s
    while (left := marked_processes(mark)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def alive(pid: int) -> bool:
    return start_ticks(pid) is not None


class SharedMemoryWatch:
    """Remembers the files of /dev/shm that processes of this run have had."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seen: set[str] = set()

    def look(self) -> None:
        for pid in [*marked_processes(self._mark), os.getpid()]:
            self._seen |= mapped_segments(pid)

    def left(self) -> list[str]:
        """Those that are still there; asked when all processes are gone."""
        return sorted(name for name in self._seen if (SHARED_MEMORY / name).exists())


class OutOfMemory:
    """Lets the kernel's OOM killer end a process, by a memory control group of its own. A context manager.

    Attributes:
        available: Whether this machine lets us make one; else a SIGKILL stands in.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._version, self._folder = self._make(_group_name(mark))
        self.available = self._folder is not None

    @staticmethod
    def _make(name: str) -> tuple[int, Path | None]:
        root, limit = CONTROL_GROUPS, "memory.limit_in_bytes"
        for version, base, control in ((1, root / "memory", limit), (2, root, "memory.max")):
            folder = base / name
            with contextlib.suppress(OSError):
                folder.mkdir()
                if (folder / control).exists():
                    return version, folder
                folder.rmdir()
        return 0, None

    def strike(self, pid: int) -> str:
        """End the process; says how."""
        if self._folder is None:
            os.kill(pid, signal.SIGKILL)
            return "SIGKILL, no memory cgroup to be had here"
        limits = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"] if self._version == 1 else ["memory.max"]
        for control in (*limits, "memory.swap.max"):
            with contextlib.suppress(OSError):
                (self._folder / control).write_text("0" if control == "memory.swap.max" else str(1 << 20))
        (self._folder / "cgroup.procs").write_text(str(pid))
        # Pages are charged when they are first touched: what the process holds already is not.
        end = time.monotonic() + 20.0
        while alive(pid) and time.monotonic() < end:
            time.sleep(0.05)
        if not alive(pid):
            return "OOM killer"
        os.kill(pid, signal.SIGKILL)
        return "SIGKILL, the OOM killer did not come"

    def __enter__(self) -> OutOfMemory:
        return self

    def __exit__(self, *_: object) -> None:
        release_memory(self._mark)


def release_memory(mark: str) -> None:
    """Remove the control group of a run whose processes are gone, whoever made it."""
    for base in (CONTROL_GROUPS / "memory", CONTROL_GROUPS):
        folder = base / _group_name(mark)
        for _attempt in range(50 if folder.exists() else 0):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)  # the last process is on its way out


def _group_name(mark: str) -> str:
    return f"specactor-chaos-{mark}"


class SmallDisk:
    """A folder that can run full: a tmpfs, or where mounting is not permitted a limit on the size of files.

    Attributes:
        folder: The folder.
        how: What limits it, for people.
    """

    SIZE_MB = 64

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        folder.mkdir(parents=True)
        options = ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE_MB}m,mode=700", "specactor-chaos", str(folder)]
        self._mounted = subprocess.run(options, capture_output=True, check=False).returncode == 0
        self._limited: list[int] = []
        self.how = f"tmpfs of {self.SIZE_MB} MiB" if self._mounted else "RLIMIT_FSIZE, mount is not permitted"

    def fill(self, pids: Iterable[int]) -> None:
        """From now on nothing more can be written, by anybody or (without a mount) by these processes."""
        if not self._mounted:
            self._limited = [pid for pid in pids if self._limit(pid, 0)]
            return
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)
        for pid in self._limited:
            self._limit(pid, resource.RLIM_INFINITY)
        self._limited = []

    @staticmethod
    def _limit(pid: int, size: int) -> bool:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            return True
        return False

    def close(self) -> None:
        release_disk(self.folder)


def release_disk(folder: Path) -> None:
    """Unmount it if it is mounted, whoever did it."""
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
