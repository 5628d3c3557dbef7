"""Files of a training run with a line of JSON per record; they grow by whole lines, and lose what a resumed run
repeats."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import append_json, parse_json, read_foreign, replacing

logger = logging.getLogger(__name__)

METRICS_FILE, EVALUATIONS_FILE, COMPLETIONS_FILE = "metrics.jsonl", "evaluations.jsonl", "completions.jsonl"
EVALUATION = "evaluation"
"""`kind` of the rows of an evaluation in `completions.jsonl`; that of training samples is `train`."""


class RecordFile:
    """Appends records to a file. Those that the disk refuses wait in `pending`, oldest first, for the next write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: list[dict[str, Any]] = []

    def write(self, *records: dict[str, Any]) -> None:
        """Append these records and the pending ones."""
        self.pending += records
        try:
            if self.pending:
                append_json(self.path, *self.pending)
            self.pending.clear()
        except OSError as error:
            logger.error("%d records wait for room in %s: %s", len(self.pending), self.path, error)

    def read(self) -> list[dict[str, Any]]:
        """All records, as far as the file can be read."""
        try:
            return [*(read_records(self.path) if self.path.exists() else ()), *self.pending]
        except InputError as problem:
            logger.error("%s", problem)
            return [*self.pending]


def read_records(file: Path) -> list[dict[str, Any]]:
    """All records of a file, in their order. Raises InputError if one cannot be read."""
    try:
        return [parse_json(line) for line in read_foreign(file).split("\n") if line]
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as records: {error}") from None


def drop_repeated(folder: Path, step: int, evaluated: int) -> None:
    """Drop what a run that continues after `step`, with its last evaluation at the step `evaluated`, will write again,
    and what is no record, such as half a line at the end."""
    for file in (folder / name for name in (METRICS_FILE, EVALUATIONS_FILE, COMPLETIONS_FILE)):
        if not file.exists():
            continue
        with open(file, "rb") as lines, replacing(file) as new, open(new, "xb") as kept:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    row = parse_json(line.decode())
                    of_evaluation = file.name == EVALUATIONS_FILE or row.get("kind") == EVALUATION
                    if row["step"] <= (evaluated if of_evaluation else step):
                        kept.write(line.removesuffix(b"\n") + b"\n")
