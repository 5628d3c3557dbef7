"""Files that are either complete or unchanged, and locks that end with their process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import InputError

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$SPECACTOR_CACHE`, else `$XDG_CACHE_HOME/specactor_ray`, else `~/.cache/specactor_ray`. It need not exist."""
    own = os.environ.get("SPECACTOR_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "specactor_ray"


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None, new: bool = False) -> Iterator[Path]:
    """Inside, write the file under the yielded name; afterwards it is flushed to disk and renamed to `path`.

    Args:
        path: The file. It is unchanged if the block raises.
        temporary: The name, in the same folder. Default: a hidden one that no other writer uses.
        new: Raise FileExistsError if `path` exists by then.
    """
    temporary = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        flush_entry(temporary)
        if new:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # reserves the name: a rename would overwrite
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, shared: bool = False, new: bool = False) -> None:
    """Write a UTF-8 file as a whole.

    Args:
        path: The file.
        text: Its content.
        shared: Other users may read it, if the umask permits. Default: only its owner.
        new: Raise FileExistsError if it exists.

    Raises:
        OSError: The folder cannot be written to, or the disk is full.
    """
    with replacing(path, new=new) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if shared else 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def write_json(path: Path, data: Any, indent: int | None = 2, shared: bool = False, new: bool = False) -> None:
    """Write a JSON file as a whole; arguments and errors as in `write_text`."""
    write_text(path, json.dumps(data, indent=indent) + "\n", shared, new)


def make_folder(folder: Path, option: str, empty: bool = False) -> list[Path]:
    """Create a folder and its parents, in which files can be created. Returns the new folders, the deepest first.

    Args:
        folder: The folder; it may exist.
        option: Beginning of messages.
        empty: The folder must be empty.

    Raises:
        InputError: The folder cannot be created, or is not empty.
    """
    try:
        if empty and folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{option}: {folder} holds files, and none is overwritten; name another folder")
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{option}: {folder} cannot be written to ({error.strerror}); name another folder") from None
    return made


def require_folder(folder: Path, option: str) -> None:
    """Refuse a folder in which no file can be created, before the work whose results it is for. Leaves nothing behind.

    Raises:
        InputError: See `make_folder`.
    """
    remove_if_empty(*make_folder(folder, option))


def remove_if_empty(*folders: Path) -> None:
    """Remove folders, in this order, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def flush_entry(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if it does not exist; waits until no other process holds it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock
