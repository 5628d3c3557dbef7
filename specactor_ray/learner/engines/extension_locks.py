"""Locks of C++ extensions that DeepSpeed builds when it starts.

torch marks a build by a file named `lock` and takes it away at the end. A build that was killed leaves it, and every
later start would wait for it without a word and without end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_LOCAL = frozenset(("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"))
"""File systems of one machine; elsewhere a lock may be held by a process that is not seen here."""
_RECHECK_S = 0.5


def remove_abandoned_locks(root: Path | None = None) -> list[Path]:
    """Remove the locks that no process holds.

    A builder has its lock open, so one that no process has open is abandoned, if it is still the same one a moment
    later: a builder closes its lock before it removes it, and another rank may have replaced it by a new one.

    Args:
        root: Where extensions are built. Default: where torch builds them.

    Returns:
        The locks that were removed; also logged.
    """
    if root is None:
        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _default_root())
    found = [lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern) if _is_local(lock)]
    before = {lock: _identity(lock) for lock in _not_open(found)}
    if before:
        time.sleep(_RECHECK_S)
    removed = []
    for lock in _not_open(list(before)):
        if before[lock] is not None and _identity(lock) == before[lock]:
            logger.warning("removing %s: the build that left it is gone", lock)
            lock.unlink(missing_ok=True)
            removed.append(lock)
    return removed


def _default_root() -> str:
    from torch.utils.cpp_extension import get_default_build_root

    return str(get_default_build_root())


def _identity(lock: Path) -> tuple[int, int] | None:
    """What differs between a lock and one made later in its place; None when there is none."""
    try:
        status = lock.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _not_open(locks: list[Path]) -> list[Path]:
    """Those that no process of this user has open."""
    wanted = {lock.resolve(): lock for lock in locks}
    for folder in Path("/proc").glob("[0-9]*/fd") if wanted else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in folder.iterdir():
                with contextlib.suppress(OSError):
                    wanted.pop(Path(os.readlink(descriptor)), None)
    return list(wanted.values())


def _is_local(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether the file system is this machine's own, so that all processes that could hold the lock are seen."""
    try:
        entries = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    parents = {str(parent) for parent in path.resolve().parents}
    kinds = [(len(point), kind) for point, kind in entries if point in parents]
    return bool(kinds) and max(kinds)[1] in _LOCAL
