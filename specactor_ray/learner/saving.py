"""A rank's progress, and its part of a checkpoint: written files, and the errors of the disk."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


class WorkCounter:
    """Counts finished pieces of work: micro-batches, optimizer steps, buckets, files.

    One thread counts; others may read. If the count does not change during work, the rank hangs.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> None:
        """Count one more piece."""
        self.count += 1


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One rank's part of a checkpoint."""

    node: str
    """Host name of the node that the rank runs on."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file that the rank wrote, by its name relative to the checkpoint's folder."""
    problem: str = ""
    """Error of the disk; empty if everything was written."""


class PartWriter:
    """Records the files that a rank writes into `folder`.

    A disk error is recorded, not raised: a rank that left a save early would block the others in a collective.
    """

    def __init__(self, folder: Path, progress: WorkCounter) -> None:
        self.folder = folder
        self.problem = ""
        """The first disk error."""
        self._progress = progress
        self._sizes: dict[str, int] = {}

    @contextlib.contextmanager
    def writing(self, *files: Path) -> Iterator[None]:
        """Inside, these files are written; a folder stands for all files in it.

        Raises:
            Exception: As raised inside, unless the disk was the cause.
        """
        try:
            yield
            for file in files:
                for path in file.rglob("*") if file.is_dir() else [file]:
                    if path.is_file():
                        self._sizes[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        except Exception as error:
            if not is_disk_error(error):
                raise
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        self._progress.tick()

    def part(self) -> SavedPart:
        """The written files."""
        return SavedPart(socket.gethostname(), self._sizes, self.problem)


def is_disk_error(error: BaseException) -> bool:
    """Whether an error while saving is of the disk: torch and safetensors raise their own types for it."""
    if isinstance(error, OSError):
        return True
    text = str(error)
    if type(error).__name__ == "SafetensorError":
        return "I/O error" in text
    # Errors of torch: the writer of its files, and a missing folder.
    return isinstance(error, RuntimeError) and ("inline_container.cc" in text or text.startswith("Parent directory"))
