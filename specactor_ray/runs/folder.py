"""The folder of a run: its lease, the claim of a new one, and the choice of the one to continue.

A lease is a file lock that ends with its process. A node that shares the folder over a network file system may not see
that lock, so the holder also writes a beat into the file every few seconds. Whether a run of another host is alive is
judged by changes of its beat, never by comparing the clocks of two hosts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config
from specactor_ray.config.load import save_config
from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.core.files import parse_json, read_foreign, remove_if_empty

logger = logging.getLogger(__name__)

CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "config.yaml", "summary.json", "run.lock"
_BEAT_S = 5.0
_EXPIRES_S = 30.0
"""Seconds after which an unchanged beat is that of a dead run."""
_SETTLE_S = 2.0
"""Seconds to wait for another host that takes over the same lease at the same moment."""
_SIZE = 256
"""Bytes of the file, constant, so that a beat is one write in place that needs no space on a full disk."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class RunInUseError(InputError):
    """Another process uses this folder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lease."""

    host: str
    pid: int
    boot: str
    """Boot id of the host's kernel: equal for all processes that share one file lock."""
    token: str
    """Random id of this hold of the lease."""


class RunLease:
    """The right to write in a run's folder, held until `release` or the end of the process.

    Args:
        folder: The folder; created if it does not exist.
        key: The configuration key that names it, for messages.
        clock: Paces the heartbeat, and the checks of another host's heartbeat.

    Raises:
        RunInUseError: Another process has the lease; the message has its host and process.
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, key: str = "run.name", clock: Clock = SYSTEM) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._key, self._clock = folder / LOCK_FILE, key, clock
        self._lock = FileLock(self._path, timeout=0, thread_local=False, fallback_to_soft=False)
        self._me = Holder(socket.gethostname(), os.getpid(), _boot_id(), secrets.token_hex(8))
        self._lost_to: Holder | None = None
        self._beats, self._is_held = 0, True
        self._acquire()
        self._ended = clock.event()
        self._beating = clock.spawn(self._keep_beating, "run-lease")

    def check(self) -> None:
        """Raise SpecActorError if the lease was taken over, which happens if this process was stopped for long."""
        if self._lost_to is not None:
            raise SpecActorError(
                f"process {self._lost_to.pid} on {self._lost_to.host} has taken over {self._path.parent}, since this "
                f"process gave no sign of life for {_EXPIRES_S:g} s"
            )

    @property
    def lost(self) -> bool:
        """Whether another process uses the folder now."""
        return self._lost_to is not None

    def release(self) -> None:
        """Release the folder for other processes. Idempotent."""
        self._ended.set()
        self._beating.join(_BEAT_S)
        if self._is_held and not self.lost:
            self._path.unlink(missing_ok=True)  # while it is still locked
        self._is_held = False
        self._lock.release()

    def beat(self) -> None:
        """Write a beat, or detect that the lease was taken over."""
        holder = _read(self._path)[1]
        if holder is not None and holder.token != self._me.token:
            self._lost_to = holder
            logger.error("process %d on %s has taken over %s", holder.pid, holder.host, self._path.parent)
        else:
            self._write()

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise self._in_use(_read(self._path)[1]) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s: this file system has no locks; the heartbeat alone guards the run", self._path)
        try:
            self._refuse_living()
            self._write()
        except BaseException:
            self._lock.release()
            raise

    def _refuse_living(self) -> None:
        """Raise if the holder that the file names is alive.

        If this process has the lock, a holder on this machine is dead; one on another machine is judged by its beat.
        """
        seen, holder = _read(self._path)
        if not seen or (self._lock.is_locked and holder is not None and holder.boot == self._me.boot):
            return
        where = "an unknown host" if holder is None else f"{holder.host} (process {holder.pid})"
        logger.info("%s was used by %s: watching its heartbeat for %g s", self._path.parent, where, _EXPIRES_S)
        end = self._clock.now() + _EXPIRES_S
        while self._clock.now() < end:
            self._clock.sleep(1.0)
            now, holder = _read(self._path)
            if now != seen:
                raise self._in_use(holder)
        self._write()
        self._clock.sleep(_SETTLE_S)
        holder = _read(self._path)[1]
        if holder is not None and holder.token != self._me.token:
            raise self._in_use(holder)

    def _keep_beating(self) -> None:
        while not self._ended.wait(_BEAT_S) and not self.lost:
            try:
                self.beat()
            except OSError as error:
                logger.warning("%s: no heartbeat: %s", self._path, error)

    def _write(self) -> None:
        self._beats += 1
        content = json.dumps({**asdict(self._me), "beat": self._beats})
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, content.ljust(_SIZE - 1).encode() + b"\n", 0)
        finally:
            os.close(descriptor)

    def _in_use(self, holder: Holder | None) -> RunInUseError:
        process = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
        fix = f"wait for it, stop it, or choose another {self._key}"
        return RunInUseError(f"{self._key}: {process} uses {self._path.parent} now. Fix: {fix}")


def _read(path: Path) -> tuple[bytes, Holder | None]:
    """Content of the lock file, and its holder. A network file system reads it from the server when it is opened."""
    try:
        content = path.read_bytes()
        facts: Any = json.loads(content)
        return content, Holder(str(facts["host"]), int(facts["pid"]), str(facts["boot"]), str(facts["token"]))
    except FileNotFoundError:
        return b"", None
    except (ValueError, KeyError, TypeError):
        return content, None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def lease_unfinished(
    config: Config, file: str, continues: Callable[[Path], bool], clock: Clock = SYSTEM
) -> tuple[Path, RunLease] | None:
    """The run to continue, and its lease: that of `run.name`, else the latest in `run.dir` that no process uses.

    Args:
        file: File that every run of this kind has, with the time of its last sign of life.
        continues: Whether the run in a folder can be continued.

    Raises:
        RunInUseError: The named run is in use.
    """
    base = Path(config.run.dir).expanduser()
    if config.run.name is not None:
        folder = base / config.run.name
        return (folder, RunLease(folder, clock=clock)) if continues(folder) else None
    for path in sorted(base.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime, reverse=True):
        if continues(path.parent):
            try:
                return path.parent, RunLease(path.parent, clock=clock)
            except RunInUseError as error:
                logger.warning("resume=auto leaves out %s: %s", path.parent.name, error)
    return None


def lease_new(config: Config, clock: Clock = SYSTEM) -> tuple[Path, RunLease]:
    """The folder of a new run, and its lease. Names the run if it has no name yet.

    Raises:
        InputError: The folder holds another run, is in use, or cannot be written to.
    """
    config.run.name = config.run.name or new_run_name()
    folder = Path(config.run.dir).expanduser() / config.run.name
    with run_dir_errors(folder):
        lease = RunLease(folder, clock=clock)
    for name in (CONFIG_FILE, SUMMARY_FILE):
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


def save_run_config(config: Config, folder: Path) -> None:
    """Write the resolved configuration into a run's folder.

    Raises:
        InputError: The folder cannot be written to.
    """
    with run_dir_errors(folder):
        save_config(config, folder / CONFIG_FILE)


def status_of(folder: Path) -> str | None:
    """Status in the summary of a run; None if there is none."""
    try:
        return str(parse_json(read_foreign(folder / SUMMARY_FILE))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def discard_run_folder(folder: Path) -> None:
    """Remove the configuration of a run that ended before it began, and its folders if they are empty then."""
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    remove_if_empty(folder, folder.parent)
