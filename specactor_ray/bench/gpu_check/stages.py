"""Stages within a budget of time. Slow, late, too large or failed measurements are reported; all others are made."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specactor_ray.bench.gpu_check.settings import Settings

_FEWEST, _MOST, _ENOUGH_S = 3, 20, 0.15
"""Bounds of the timed calls of a figure, and seconds that they may take: as many calls as fit."""
StageFunction = Callable[["Stage"], None]


class OutOfTime(Exception):
    """The budget of the stage is spent."""


class TooSlow(Exception):
    """A step took longer than the stage's limit."""


@dataclass
class Stage:
    """Context and results of a stage."""

    name: str
    settings: Settings
    deadline: float
    """End of the stage's share, on the clock of `now`."""
    changed: Callable[[str], None] = lambda line: None
    """Called with a line of progress when `entry` has changed."""
    now: Callable[[], float] = time.perf_counter
    entry: dict[str, Any] = field(default_factory=lambda: {"points": [], "figures": {}, "not_measured": []})
    """Plain data: `points`, a table; `figures`, single ones; `not_measured`, a line with the reason for each."""
    end: float = math.inf
    """End of all stages, on the clock of `now`."""

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the body, which makes models and compiles, from the stage's share; later stages have less time."""
        begin = self.now()
        yield
        self.deadline = min(self.deadline + self.now() - begin, self.end)

    def point(self, key: Mapping[str, Any], **columns: Any) -> None:
        """Add columns to the table's line with this key."""
        points = self.entry["points"]
        if not any(point.items() >= key.items() for point in points):
            points.append(dict(key))
        next(point for point in points if point.items() >= key.items()).update(columns)

    def each(self, points: Iterable[tuple[Any, ...]], measure: Callable[..., str]) -> None:
        """Call `measure` with every point; it returns a line of progress. Failures of a point are noted."""
        listed, missing = list(points), self.entry["not_measured"]
        names = [", ".join(map(str, point)) for point in listed]
        for index, (point, name) in enumerate(zip(listed, names, strict=True)):
            try:
                line = measure(*point)
            except OutOfTime:
                missing += [f"{other}: no time was left" for other in names[index:]]
                self.changed(f"{self.name}: no time was left for {len(listed) - index} of {len(listed)}")
                break
            except (TooSlow, torch.OutOfMemoryError) as error:
                line = str(error) if isinstance(error, TooSlow) else "out of memory"
                missing.append(f"{name}: {line}")
            self.changed(f"{self.name}, {name}: {line}")

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call, to the end of its work on the device. Raises OutOfTime if the time was up before."""
        begin = self.now()
        if begin > self.deadline:
            raise OutOfTime
        call()
        synchronize(self.settings.device)
        return self.now() - begin

    def step(self, call: Callable[[], object], done: int, of: int) -> float:
        """`seconds` of call number `done` of `of`, from 0. Raises TooSlow above the limit."""
        seconds, limit_s = self.seconds(call), self.settings.limit_s
        if seconds > limit_s:
            took = f"a step took {seconds:.3g} s, slower than its limit of {limit_s:g} s"
            raise TooSlow(f"{took}: {done} of {of} steps measured")
        return seconds

    def median_s(self, call: Callable[[], object]) -> float:
        """Median seconds of a call. The first one, which may compile or allocate, has no limit and does not count."""
        self.seconds(call)
        times: list[float] = []
        while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < _ENOUGH_S):
            times.append(self.step(call, len(times), _MOST))
        return statistics.median(times)

    def peak_gb(self, call: Callable[[], object]) -> float | None:
        """Peak GPU memory in GB that a call allocates in addition; None on a CPU."""
        if self.settings.device != "cuda":
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.seconds(call)
        return (torch.cuda.max_memory_allocated() - before) / 1e9


def synchronize(device: str) -> None:
    """Wait until the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def run_stages(
    stages: Mapping[str, tuple[float, StageFunction]],
    settings: Settings,
    entries: dict[str, dict[str, Any]],
    changed: Callable[[str], None],
    end: float,
    now: Callable[[], float] = time.perf_counter,
) -> None:
    """Run stages (name → weight in the sharing of the time, function) up to `end`; unused time of a stage goes to the
    stages after it. `entries` receives their `Stage.entry` with `status` (`running`, `complete`, `partial`, `skipped`,
    `failed` or `interrupted`), `seconds` and `error`."""
    weights = [weight for weight, _ in stages.values()]
    for index, (name, (weight, function)) in enumerate(stages.items()):
        share_s = max(end - now(), 0.0) * weight / sum(weights[index:])
        stage = Stage(name, settings, now() + share_s, changed, now, end=end)
        stage.entry |= {"status": "interrupted", "seconds": 0.0, "error": ""}  # if interrupted right here
        entries[name] = stage.entry
        _run_stage(function, stage, share_s)
        gc.collect()  # frees a stage's models before the next stage makes its own
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _run_stage(function: StageFunction, stage: Stage, share_s: float) -> None:
    begin, entry, status, error = stage.now(), stage.entry, "interrupted", ""
    try:
        entry["status"] = "running"
        stage.changed(f"{stage.name}: at most {share_s:.0f} s")
        function(stage)
        status = (
            "complete" if not entry["not_measured"] else "partial" if entry["points"] or entry["figures"] else "skipped"
        )
    except Exception as failure:  # noqa: BLE001 - the other stages are measured after any failure
        lines = f"{type(failure).__name__}: {failure}".strip().splitlines()
        status, error = "failed", " ... ".join(dict.fromkeys((lines[0], lines[-1])))
        entry["traceback"] = traceback.format_exc()
    finally:
        entry |= {"status": status, "error": error, "seconds": stage.now() - begin}
        stage.changed(f"{stage.name}: {status} after {entry['seconds']:.1f} s {error}".rstrip())
