"""Folders that are made once and kept: whoever sees the folder sees all of it.

A folder is built beside its place, flushed to disk and renamed into it, under a lock that dies with its process.
A build that was killed leaves only a hidden temporary folder, which the next build removes.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from specactor_ray.files import flush_entry, locked

logger = logging.getLogger(__name__)


def cached_dir(final: Path, build: Callable[[Path], None]) -> Path:
    """The folder `final`, built on the first call.

    Args:
        final: Where the folder belongs; its name should change with what it holds.
        build: Fills an empty folder. Called in at most one process at a time per `final`.

    Raises:
        OSError: The place cannot be written to or is full.
        Exception: Whatever `build` raises; nothing is left behind then.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final.parent / f".{final.name}.lock"):
        if final.is_dir():  # another process made it while this one waited
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
    """Remove what killed builds left; safe under the lock, since no build of this folder can be running."""
    for leftover in final.parent.glob(f"{_temporary_prefix(final)}*"):
        logger.info("removing %s, left by a build that was killed", leftover)
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(folder: Path) -> None:
    """To disk, and readable for whoever shares the cache: temporary folders and safetensors files are private."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        flush_entry(path)
