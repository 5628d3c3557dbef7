"""The right to train in a folder: a lock that ends with its process, and a heartbeat where locks have no effect.

The lock file is held by `flock` during the life of a run. A node that shares the folder over a network file system may
not see that lock, so the holder also writes a beat into the file every few seconds. Whether a run of another host is
alive is judged by changes of its beat, never by comparing the clocks of two hosts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.core.files import names_open_file

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_BEAT_S = 5.0
_EXPIRES_S = 30.0
"""Seconds after which an unchanged beat is that of a dead run."""
_SETTLE_S = 2.0
"""Seconds to wait for another host that takes over the same lease at the same moment."""
_SIZE = 256
"""Bytes of the file, constant, so that a beat is one write in place that needs no space on a full disk."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class RunInUseError(InputError):
    """Another process trains in this folder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lease."""

    host: str
    pid: int
    boot: str
    """Boot id of the host's kernel: equal for all processes that share one `flock`."""
    token: str
    """Random id of this hold of the lease."""


class RunLease:
    """The right to train in a folder, held until `release` or the end of the process.

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
        self._me = Holder(socket.gethostname(), os.getpid(), _boot_id(), secrets.token_hex(8))
        self._lost_to: Holder | None = None
        self._beats, self._locks = 0, True
        self._descriptor = self._acquire()
        self._ended = clock.event()
        clock.spawn(self._keep_beating, "run-lease")

    def check(self) -> None:
        """Raise SpecActorError if the lease was taken over, which happens if this process was stopped for long."""
        if self._lost_to is not None:
            raise SpecActorError(
                f"process {self._lost_to.pid} on {self._lost_to.host} has taken over {self._path.parent}, since this "
                f"process gave no sign of life for {_EXPIRES_S:g} s"
            )

    @property
    def lost(self) -> bool:
        """Whether another process trains in the folder now."""
        return self._lost_to is not None

    def release(self) -> None:
        """Release the folder for other processes. Idempotent."""
        self._ended.set()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if not self.lost and names_open_file(self._path, descriptor):
            self._path.unlink(missing_ok=True)
        os.close(descriptor)

    def beat(self) -> None:
        """Write a beat, or detect that the lease was taken over."""
        holder = _read(self._path)[1]
        if holder is not None and holder.token != self._me.token:
            self._lost_to = holder
            logger.error("process %d on %s has taken over %s", holder.pid, holder.host, self._path.parent)
            return
        self._write(self._descriptor)

    def _acquire(self) -> int:
        while True:
            descriptor, created = self._open()
            try:
                if not created:
                    self._refuse_living(descriptor)
                if not names_open_file(self._path, descriptor):  # its holder has just released and removed it
                    os.close(descriptor)
                    continue
                self._write(descriptor)
                return descriptor
            except BaseException:
                os.close(descriptor)
                raise

    def _open(self) -> tuple[int, bool]:
        """Open the lock file. Returns its descriptor, and whether it is new, so that no other process can have it."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            created = True
        except FileExistsError:
            descriptor, created = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise self._in_use(_read(self._path)[1]) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            self._locks = False
            logger.warning("%s: this file system has no locks; the heartbeat alone guards the run", self._path)
        return descriptor, created

    def _refuse_living(self, descriptor: int) -> None:
        """Raise if the holder that the file names is alive.

        If this process has the lock, a holder on this machine is dead; one on another machine is judged by its beat.
        """
        seen, holder = _read(self._path)
        if self._locks and holder is not None and holder.boot == self._me.boot:
            return
        where = "an unknown host" if holder is None else f"{holder.host} (process {holder.pid})"
        logger.info("%s was used by %s: watching its heartbeat for %g s", self._path.parent, where, _EXPIRES_S)
        end = self._clock.now() + _EXPIRES_S
        while self._clock.now() < end:
            self._clock.sleep(1.0)
            now, holder = _read(self._path)
            if now != seen:
                raise self._in_use(holder)
        self._write(descriptor)
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

    def _write(self, descriptor: int) -> None:
        self._beats += 1
        content = json.dumps({**asdict(self._me), "beat": self._beats})
        os.pwrite(descriptor, content.ljust(_SIZE - 1).encode() + b"\n", 0)

    def _in_use(self, holder: Holder | None) -> RunInUseError:
        who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
        return RunInUseError(
            f"{self._key}: {who} is training in {self._path.parent} now. Fix: wait for it, stop it, or choose "
            f"another {self._key}"
        )


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
