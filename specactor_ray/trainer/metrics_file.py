"""File of a run's records: whole lines only, and no record is lost while the disk is full."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends records as lines of JSON. Records that cannot be written are kept and written with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0
        """Number of failed writes."""
        self.pending: list[dict[str, Any]] = []
        """Records that are not in the file yet, oldest first."""

    def append(self, record: Mapping[str, Any]) -> bool:
        """Write this record and the pending ones. Returns whether all are written."""
        self.pending.append(dict(record))
        return self.flush()

    def flush(self) -> bool:
        """Write the pending records. Returns whether none is left."""
        if not self.pending:
            return True
        try:
            self._write("".join(json.dumps(record) + "\n" for record in self.pending).encode())
        except OSError as error:
            self.failures += 1
            logger.error("%d records wait for room in %s: %s", len(self.pending), self.path, error)
            return False
        self.pending.clear()
        return True

    def _write(self, data: bytes) -> None:
        """Append all of `data` in one write, or nothing."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            begin = os.lseek(descriptor, 0, os.SEEK_END)
            written = os.write(descriptor, data)
            if written < len(data):
                os.ftruncate(descriptor, begin)
                raise OSError(f"only {written} of {len(data)} bytes could be written; the disk is full")
        finally:
            os.close(descriptor)
