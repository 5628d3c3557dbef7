"""Stages within a budget of time. What is slow, late, too large or broken is shown, and everything else is measured."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.settings import Settings
from specactor_ray.signals import interruption

_FEWEST, _MOST, _ENOUGH_S = 3, 20, 0.15
"""Timed calls of a figure: as many as fit into this time, within these bounds."""

Clock = Callable[[], float]


class OutOfTime(Exception):
    """The budget of the stage is spent."""


class TooSlow(Exception):
    """A step took longer than the stage's limit."""


class Skipped(Exception):
    """The stage cannot run here; the message is the reason."""


@dataclass
class Stage:
    """What a stage works with."""

    name: str
    settings: Settings
    deadline: float
    """On the clock of `now`, seconds."""
    limit_s: float
    """Longest step; a measurement with a longer one is abandoned."""
    changed: Callable[[str], None] = lambda line: None
    """Called with a line of progress when figures were added."""
    now: Clock = time.perf_counter
    entry: dict[str, Any] = field(default_factory=lambda: {"points": [], "figures": {}, "not_measured": []})
    """Plain data: `points`, a table; `figures`, single ones; `not_measured`, a line with the reason for each."""

    def point(self, **columns: Any) -> None:
        """Add a line to the table."""
        self.entry["points"].append(columns)

    def each(self, points: Iterable[tuple[Any, ...]], measure: Callable[..., str]) -> None:
        """Call `measure` with every point; it returns a line of progress. What goes wrong with one is noted."""
        listed = list(points)
        for index, point in enumerate(listed):
            name = _name(point)
            try:
                line = measure(*point)
            except OutOfTime:
                self.entry["not_measured"] += [f"{_name(other)}: no time was left" for other in listed[index:]]
                return self.changed(f"{self.name}: no time was left for {len(listed) - index} of {len(listed)}")
            except (TooSlow, torch.OutOfMemoryError) as error:
                line = str(error) if isinstance(error, TooSlow) else "out of memory"
                self.entry["not_measured"].append(f"{name}: {line}")
            self.changed(f"{self.name}, {name}: {line}")

    def seconds(self, call: Callable[[], object]) -> float:
        """Duration of a call, to the end of its work on the device.

        Raises:
            OutOfTime: The stage's time was up before.
        """
        begin = self.now()
        if begin > self.deadline:
            raise OutOfTime
        call()
        synchronize(self.settings.device)
        return self.now() - begin

    def step(self, call: Callable[[], object], done: int, of: int) -> float:
        """`seconds` of a call that is number `done` of `of`, from 0.

        Raises:
            TooSlow: It took longer than the limit.
        """
        seconds = self.seconds(call)
        if seconds > self.limit_s:
            limit = f"slower than its limit of {self.limit_s:g} s"
            raise TooSlow(f"a step took {seconds:.3g} s, {limit}: {done} of {of} steps measured")
        return seconds

    def median_s(self, call: Callable[[], object]) -> float:
        """Median seconds of a call. The first one, which may compile or allocate, has no limit and does not count."""
        self.seconds(call)
        times: list[float] = []
        while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < _ENOUGH_S):
            times.append(self.step(call, len(times), _MOST))
        return statistics.median(times)


StageFunction = Callable[[Stage], None]


def _name(point: tuple[Any, ...]) -> str:
    return ", ".join(map(str, point))


def synchronize(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def run_stages(
    stages: Mapping[str, tuple[float, float, StageFunction]],
    settings: Settings,
    entries: dict[str, dict[str, Any]],
    changed: Callable[[str], None],
    end: float,
    now: Clock = time.perf_counter,
) -> None:
    """Run all stages; what one leaves of its time is shared by those after it.

    Args:
        stages: Name → weight in the sharing of the time, longest step in seconds, function.
        settings: What is measured.
        entries: Takes an entry per stage: its status (`running`, `complete`, `partial`, `skipped`, `failed` or
            `interrupted`), seconds and error beside what `Stage.entry` holds.
        changed: Called with a line of progress whenever there is something new in `entries`.
        end: When all should be done, on the clock of `now`.
        now: Seconds.

    Raises:
        KeyboardInterrupt: The stage under way is marked and its figures are in `entries`.
    """
    weights = [weight for weight, _, _ in stages.values()]
    for index, (name, (weight, limit_s, function)) in enumerate(stages.items()):
        share_s = max(end - now(), 0.0) * weight / sum(weights[index:])
        stage = Stage(name, settings, now() + share_s, limit_s, changed, now)
        entries[name] = stage.entry
        stage.entry |= {"status": "running", "seconds": 0.0, "error": ""}
        changed(f"{name}: at most {share_s:.0f} s")
        _run_stage(function, stage)
        free_memory()


def _run_stage(function: StageFunction, stage: Stage) -> None:
    begin, entry = stage.now(), stage.entry
    status, error = "interrupted", ""
    try:
        function(stage)
        status = "partial" if entry["not_measured"] else "complete"
    except Skipped as reason:
        status, error = "skipped", str(reason)
    except OutOfTime:
        status, error = "partial", "no time was left"
    except TooSlow as slow:
        status, error = "partial", str(slow)
    except KeyboardInterrupt as interrupt:
        error = interruption(interrupt)
        raise
    except Exception as failure:  # noqa: BLE001 - whatever breaks one stage, the others are measured
        status, error = "failed", f"{type(failure).__name__}: {failure}"
        entry["traceback"] = traceback.format_exc()
    finally:
        entry |= {"status": status, "error": error, "seconds": stage.now() - begin}
        stage.changed(f"{stage.name}: {status} after {entry['seconds']:.1f} s {error.partition(chr(10))[0]}".rstrip())


def free_memory() -> None:
    """What a stage has made is gone before the next one makes its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_gb(call: Callable[[], object], stage: Stage) -> dict[str, float]:
    """`GB`: most memory of the GPU that the call allocates above what was before it; nothing on a CPU."""
    if stage.settings.device != "cuda":
        return {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stage.seconds(call)
    return {"GB": (torch.cuda.max_memory_allocated() - before) / 1e9}
