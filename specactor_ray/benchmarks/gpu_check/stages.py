"""Runs the stages one after the other within a budget of time, and keeps what each has measured.

A stage is a function that fills `Stage.figures`, calls `check` before each measurement and `note` after it. One that is
out of time is cut at its next `check`; one that fails says why; the others still run.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.benchmarks.gpu_check.report import Report
from specactor_ray.benchmarks.gpu_check.settings import Settings
from specactor_ray.signals import interruption


class OutOfTime(Exception):
    """The stage has used up its share of the time."""


@dataclass
class Stage:
    """What a stage works with."""

    name: str
    settings: Settings
    deadline: float
    """On the clock of `now`."""
    save: Callable[[], None]
    now: Callable[[], float] = time.monotonic
    figures: dict[str, Any] = field(default_factory=dict)
    """What was measured so far; plain data."""

    def check(self, what: str) -> None:
        """Raises OutOfTime, naming what comes next, when the stage's time is up."""
        if self.now() > self.deadline:
            raise OutOfTime(what)

    def note(self, line: str) -> None:
        """A group of figures is complete: show a line of progress and write the file."""
        say(f"{self.name}: {line}")
        self.save()


StageFunction = Callable[[Stage], None]


def say(line: str) -> None:
    sys.stderr.write(f"[gpu-check] {line}\n")
    sys.stderr.flush()


def run_stages(
    stages: Mapping[str, tuple[float, StageFunction]],
    settings: Settings,
    report: Report,
    end: float,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run all stages; what a stage leaves of its time is shared by those after it.

    Args:
        stages: Name → (weight in the sharing of the time, function).
        end: When all should be done, on the clock of `now`.
        now: Seconds.

    Raises:
        KeyboardInterrupt: The stage under way is marked and its figures are in the file.
    """
    weights = [weight for weight, _ in stages.values()]
    for index, (name, (weight, function)) in enumerate(stages.items()):
        left = end - now()
        share_s = left * weight / sum(weights[index:])
        entry = report.open_stage(name)
        if share_s <= 0:
            entry |= {"status": "cut", "error": "no time was left for it"}
            report.save()
            continue
        say(f"{name}: at most {share_s:.0f} s")
        stage = Stage(name, settings, now() + share_s, report.save, now, entry["figures"])
        _run_stage(function, stage, entry)
        report.save()
        _free_memory()


def _run_stage(function: StageFunction, stage: Stage, entry: dict[str, Any]) -> None:
    begin = stage.now()
    entry["status"], entry["error"] = "interrupted", "Ctrl-C or SIGTERM"
    try:
        function(stage)
        entry["status"], entry["error"] = "complete", ""
    except OutOfTime as cut:
        entry["status"], entry["error"] = "cut", f"out of time before {cut}"
    except KeyboardInterrupt as error:
        entry["error"] = interruption(error)
        raise
    except Exception as error:  # noqa: BLE001 - whatever breaks one stage, the others are measured
        entry["status"], entry["error"] = "failed", f"{type(error).__name__}: {error}"
        entry["traceback"] = traceback.format_exc()
    finally:
        entry["seconds"] = stage.now() - begin
        say(f"{stage.name}: {entry['status']} after {entry['seconds']:.1f} s {entry['error']}".rstrip())


def _free_memory() -> None:
    """A stage's models and caches are gone before the next one makes its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
