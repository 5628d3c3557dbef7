"""What a chaos run writes down: faults with their times, differences from the calm run, and what was left over."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRIALS = ("kill driver", "kill verifier", "stop trainer", "kill trainer", "kill controller", "full disk", "kill GCS")
"""Faults of training runs; the others are in `faults.py`."""


@dataclass
class Fault:
    """One fault; times in seconds after it struck."""

    kind: str
    target: str = ""
    at_s: float = 0.0
    """Since the stage began."""
    lasted_s: float = 0.0
    """Until the fault itself was over: stopped processes continued, a lost node replaced."""
    detected_s: float | None = None
    """Until the status no longer called its targets healthy; None where there was nothing to detect."""
    recovered_s: float | None = None
    """Until the desired state was reached again and tokens (or steps) were made; None: it was not."""
    note: str = ""


@dataclass
class Stage:
    """What became of one stage."""

    name: str
    faults: list[Fault] = field(default_factory=list)
    compared: int = 0
    """Trajectories, or training steps, that were compared with the calm run's."""
    differences: list[str] = field(default_factory=list)
    """From what must hold; empty: passed."""
    left: list[str] = field(default_factory=list)
    """Processes, placement groups, files and shared memory left over."""
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.differences and not self.left

    def differ(self, what: str) -> None:
        if len(self.differences) < 50:
            self.differences.append(what)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Stage:
        plain = json.loads(path.read_text(encoding="utf-8"))
        faults = [Fault(**fault) for fault in plain.pop("faults")]
        return cls(faults=faults, **plain)


def by_kind(faults: Iterable[Fault]) -> dict[str, dict[str, Any]]:
    """Kind → how many, how many detected and recovered, median and longest seconds until then."""
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    return {kind: _summary(members) for kind, members in sorted(kinds.items())}


def _summary(faults: Sequence[Fault]) -> dict[str, Any]:
    detected = [fault.detected_s for fault in faults if fault.detected_s is not None]
    recovered = [fault.recovered_s for fault in faults if fault.recovered_s is not None]
    return {
        "injected": len(faults),
        "detected": len(detected),
        "recovered": len(recovered),
        "detected_s": _middle_and_end(detected),
        "recovered_s": _middle_and_end(recovered),
        "notes": sorted({fault.note for fault in faults if fault.note}),
    }


def _middle_and_end(seconds: Sequence[float]) -> list[float] | None:
    return [round(statistics.median(seconds), 2), round(max(seconds), 2)] if seconds else None
