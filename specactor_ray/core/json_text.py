"""Untrusted files and JSON: no content may hang, exhaust or crash the process that reads them."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 28
"""Largest text file that is read, in bytes; tokenizers with the largest vocabularies have a tenth of it."""


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; returns its descriptor. A FIFO, a device or a link to one is refused: reading may never end.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting for a FIFO's other end
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_foreign(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """The UTF-8 text of a regular file of limited size.

    Raises:
        OSError: As in `open_regular`; or the file is larger than `most_bytes`.
        UnicodeDecodeError: The file is not UTF-8.
    """
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
        return file.read(most_bytes).decode("utf-8")


def parse_json(text: str) -> Any:
    """`json.loads`, with every failure as a `JSONDecodeError`.

    Raises:
        json.JSONDecodeError: The text is not JSON, is nested too deeply, or holds a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(";")[0], text, 0) from None
