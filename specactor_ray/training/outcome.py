"""How a training run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specactor_ray.errors import EXIT_FAILED, EXIT_INTERRUPTED

_EXIT_CODES = {"complete": 0, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}


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
