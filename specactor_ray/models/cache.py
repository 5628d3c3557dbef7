"""Folders that are built once and kept. A visible folder is complete.

A folder is built beside its place, flushed to disk and renamed, under a lock that ends with its process.
A build that was killed leaves only a hidden temporary folder, which the next build removes.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from specactor_ray.core.files import flush_entry, locked

logger = logging.getLogger(__name__)


def cached_dir(final: Path, build: Callable[[Path], None]) -> Path:
    """The folder `final`, built on the first call.

    Args:
        final: Path of the folder; its name should change with its contents.
        build: Fills an empty folder. Called in at most one process at a time per `final`.

    Raises:
        OSError: The disk cannot be written to or is full.
        Exception: Any error of `build`; nothing is left behind then.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final.parent / f".{final.name}.lock"):
        if final.is_dir():  # another process built it while this one waited
            return final
        _remove_leftovers(final)
        temporary = Path(tempfile.mkdtemp(prefix=_temporary_prefix(final), dir=final.parent))
        try:
            build(temporary)
            _flush(temporary)
            temporary.rename(final)
            flush_entry(final.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return final


def _temporary_prefix(final: Path) -> str:
    return f".{final.name}.tmp-"


def _remove_leftovers(final: Path) -> None:
    """Remove folders of killed builds; safe under the lock, since no build of this folder can be running."""
    for leftover in final.parent.glob(f"{_temporary_prefix(final)}*"):
        logger.info("removing %s, left by a build that was killed", leftover)
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Flush to disk, and make readable for all users: temporary folders and safetensors files are private."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        flush_entry(path)
