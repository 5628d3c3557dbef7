"""How a training run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXIT_CODES = {"complete": 0, "failed": 1, "interrupted": 130}


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """How a training run ended."""

    status: str
    """`complete`: all steps are done and their weights are saved. `interrupted`: with a checkpoint, by Ctrl-C or
    SIGTERM. `failed`: by an error, or without the last checkpoint."""
    folder: Path
    summary: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.status]
