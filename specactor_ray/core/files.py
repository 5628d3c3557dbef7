"""Files: written completely or not at all, read without trust in their content."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import InputError


def expanded(path: str | Path) -> Path:
    """The path with a home folder for `~`. InputError: there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: there is no home folder for its ~. Fix: write the whole path") from None


def cache_dir() -> Path:
    """`$SPECACTOR_CACHE`, else `$XDG_CACHE_HOME/specactor_ray`, else `~/.cache/specactor_ray`. It need not exist."""
    own = os.environ.get("SPECACTOR_CACHE")
    if own:
        return expanded(own)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "specactor_ray"


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None, new: bool = False) -> Iterator[Path]:
    """Inside, write the file under the yielded name (default: a hidden one in its folder); afterwards it is flushed to
    disk and renamed to `path`, which is unchanged if the block raises. With `new`, an existing file is an error."""
    temporary = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        flush_entry(temporary)
        if new:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # reserves the name: a rename would overwrite
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, new: bool = False) -> None:
    """Write a UTF-8 file as a whole, with the mode of the umask; with `new`, an existing file is an error
    (FileExistsError)."""
    with replacing(path, new=new) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)


def write_json(path: Path, data: Any, indent: int | None = 2, new: bool = False) -> None:
    """Write a JSON file as a whole; arguments and errors as in `write_text`."""
    write_text(path, to_json(data, indent=indent) + "\n", new)


def to_json(data: Any, **options: Any) -> str:
    """`json.dumps` of strict JSON, which has no NaN and no infinity: such numbers become null."""
    try:
        return json.dumps(data, allow_nan=False, **options)
    except ValueError:
        return json.dumps(without_nan(data), allow_nan=False, **options)


def without_nan(data: Any) -> Any:
    """The same data with None in place of numbers that are not finite, in containers of any depth."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {without_nan(key): without_nan(value) for key, value in data.items()}
    return [without_nan(value) for value in data] if isinstance(data, list | tuple) else data


def append_json(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append each row as a line of JSON. All are in the file then, or none (a full disk raises OSError)."""
    # A lone surrogate has no UTF-8 form; its backslash escape is what JSON writes for it anyway.
    text = "".join(to_json(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode("utf-8", "backslashreplace")
    with open(path, "ab", buffering=0) as file:  # one write: a signal between two would leave half a line
        begin = file.tell()
        if (written := file.write(data)) < len(data):
            file.truncate(begin)
            problem = f"only {written} of {len(data)} bytes could be written; the disk is full"
            raise OSError(errno.ENOSPC, problem, str(path))


def make_folder(folder: Path, option: str, empty: bool = False) -> list[Path]:
    """Create a folder and its parents, unless they exist. Returns the new folders, the deepest first. InputError: no
    file can be created in it, or it must be `empty` and is not. The message begins with `option`."""
    try:
        if empty and folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{option}: {folder} holds files, and none is overwritten; name another folder")
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{option}: {folder} cannot be written to ({error.strerror}); name another folder") from None
    return made


def refuse_existing(path: Path | None, option: str) -> None:
    """Raises InputError if a file or folder for results exists, or its path cannot be looked up."""
    try:
        exists = path is not None and path.exists()
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be written to ({error.strerror}); name another one") from None
    if exists:
        raise InputError(f"{option}: {path} exists and is never overwritten; name another one")


def require_folder(folder: Path, option: str) -> None:
    """Raise as `make_folder`, before the work with results for the folder. Leaves nothing behind."""
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


def read_foreign(path: str | Path, errors: str = "strict") -> str:
    """The UTF-8 text of a regular file. Raises OSError for others (a FIFO, a device: reading may never end), and
    UnicodeDecodeError unless `errors` (as of `bytes.decode`) allows what is no text."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path).read_text(encoding="utf-8", errors=errors)


def parse_json(text: str) -> Any:
    """`json.loads`, with every failure as a `JSONDecodeError`: also deep nesting and numbers of thousands of digits."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(";")[0], text, 0) from None
