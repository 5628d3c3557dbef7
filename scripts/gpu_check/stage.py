"""Shapes and grids of the check, and its stages: each measures its points until the time of the check is up."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_check.child import Report, run_in_child
from points import cell
from specactor_ray.core.errors import SpecActorError

_FEWEST, _MOST, _ENOUGH_S = 3, 20, 0.15
"""Bounds of the timed calls of a figure, and seconds that they may take: as many calls as fit."""
_PROFILED = 10
"""Number of calls under the profiler."""


DRAFTER = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
}
"""Shape of Qwen2.5-0.5B, with the names of transformers."""
TARGET = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
}
"""Shape of Qwen2.5-7B."""


class Settings(NamedTuple):
    """Shapes and grids of a check; the defaults take minutes on a GPU."""

    rows: tuple[int, ...] = (1, 16, 64, 128)
    """Numbers of requests that decode at once, in the stages with engines and drafters."""
    drafts: tuple[int, ...] = (0, 3)
    """Draft tokens of each request in a step."""
    accept: tuple[float, ...] = (0.7,)
    """Shares of draft tokens that are right, where all before them are."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    copy_bytes: int = 4 << 30
    matmul_size: int = 8192
    target: Mapping[str, int] = TARGET
    target_prompt: int = 512
    target_tokens: int = 128
    """Half of the output tokens of a request in stage `vllm`."""
    rounds: int = 3
    """Rounds in which the engines of stage `vllm` take turns."""
    drafter: Mapping[str, int] = DRAFTER
    drafting_prompt: int = 128

    @property
    def window(self) -> int:
        """Most draft tokens of a request, at least 1."""
        return max(1, *self.drafts)


class Kernels:
    """Record what a GPU runs from now until `end`, by torch's profiler; on a CPU nothing."""

    def __init__(self, device: str) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if device == "cuda" else None
        self.seconds: dict[str, float] = {}
        """Kernel → seconds in it."""
        self.busy_s: float | None = None
        """Seconds in which the GPU ran a kernel or a copy; None on a CPU."""
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.start()

    def end(self, calls: int = 1) -> Kernels:
        """Fill the figures; `calls` calls were recorded, and the figures are of one."""
        if self._profile is None:
            return self
        torch.cuda.synchronize()
        self._profile.stop()
        seen = [event for event in self._profile.events() or () if event.device_type == DeviceType.CUDA]
        spans = [(event.time_range.start, event.time_range.end, event.name[:60]) for event in seen]
        busy, last = 0.0, -math.inf
        for begin, end, name in sorted(spans):
            self.seconds[name] = self.seconds.get(name, 0.0) + 1e-6 * (end - begin) / calls
            busy += max(0.0, end - max(begin, last))
            last = max(last, end)
        self.busy_s = 1e-6 * busy / calls
        return self


class OutOfTime(Exception):
    """The time of the check is up."""


def _silent(line: str) -> None:
    del line


@dataclass
class Stage:
    """Context and results of a stage."""

    name: str
    settings: Settings
    deadline: float = math.inf
    """End of the check, on the clock of `now`."""
    changed: Callable[[str], None] = _silent
    """Called with a line of progress when `entry` has changed."""
    now: Callable[[], float] = time.perf_counter
    entry: dict[str, Any] = field(
        default_factory=lambda: {"status": "interrupted", "points": [], "figures": {}, "not_measured": [], "error": ""}
    )
    """Plain data: `points`, a table; `figures`, single ones; `not_measured`, a line with the reason for each; `status`
    (`complete`, `partial` or `failed`; `interrupted` until the end), `seconds`, the first `error` with its
    `traceback`, and `fewest_calls`, the least number of timed calls of a median."""

    def run(self, measure: Callable[[Stage], None]) -> None:
        """Measure the stage; a failure is recorded, so that other stages follow."""
        begin = self.now()
        try:
            self.require_time()
            measure(self)
        except OutOfTime:
            self.entry["not_measured"].append("the rest: no time was left")
        except Exception as failure:  # noqa: BLE001 - the other stages are measured after any failure
            self._note(failure)
        status = "failed" if self.entry["error"] else "partial" if self.entry["not_measured"] else "complete"
        self.entry |= {"status": status, "seconds": self.now() - begin}
        self.changed(f"{self.name}: {status} after {self.entry['seconds']:.1f} s {self.entry['error']}".rstrip())
        self.free()

    def free(self) -> None:
        """Return the memory of dropped models to the device."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def point(self, key: Mapping[str, Any], **columns: Any) -> dict[str, Any]:
        """Add columns to the table's line with this key. Returns the line."""
        points: list[dict[str, Any]] = self.entry["points"]
        if not any(point.items() >= key.items() for point in points):
            points.append(dict(key))
        found = next(point for point in points if point.items() >= key.items())
        found.update(columns)
        return found

    def apart(self, measure: Callable[..., None], *args: Any) -> None:
        """Call `measure(stage, *args)` in a process of its own. Its memory is free afterwards.

        Raises SpecActorError if it fails, OutOfTime if the time was up.
        """

        def show(report: tuple[str, dict[str, Any]]) -> None:
            line, entry = report
            self.entry.update(entry)
            self.changed(line)

        self.require_time()
        copy = Stage(self.name, self.settings, self.deadline)
        copy.entry = self.entry
        if not run_in_child(_measure, (copy, measure, args), f"gpu-check {self.name}", show):
            raise OutOfTime

    def each(self, points: Iterable[tuple[Any, ...]], measure: Callable[..., str]) -> None:
        """Call `measure` with every point; it returns a line of progress. Missing memory and time and failures are
        recorded, and the other points are measured."""
        for point in points:
            name = ", ".join(map(str, point))
            try:
                line = measure(*point)
            except (OutOfTime, torch.OutOfMemoryError) as error:
                line = "no time was left" if isinstance(error, OutOfTime) else "out of memory"
                self.entry["not_measured"].append(f"{name}: {line}")
            except Exception as failure:  # noqa: BLE001 - as in `run`
                line = self._note(failure)
                self.entry["not_measured"].append(f"{name}: {line}")
            self.changed(f"{self.name}, {name}: {line}")

    def _note(self, failure: Exception) -> str:
        """Record a failure in `entry`. Returns its reason in a line."""
        lines = str(failure).strip().splitlines() or [""]
        reason = lines[-1] if isinstance(failure, SpecActorError) else f"{type(failure).__name__}: {lines[0]}"
        if not self.entry["error"]:
            self.entry |= {"error": reason, "traceback": traceback.format_exc()}
        return reason

    def require_time(self) -> float:
        """The time. Raises OutOfTime after the deadline."""
        if (now := self.now()) > self.deadline:
            raise OutOfTime
        return now

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call, to the end of its work on the device. Raises OutOfTime if the time was up before."""
        begin = self.require_time()
        call()
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return self.now() - begin

    def median_s(self, call: Callable[[], object]) -> float:
        """Median seconds of a call. The first one, which may compile or allocate, does not count."""
        self.seconds(call)
        times: list[float] = []
        while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < _ENOUGH_S):
            times.append(self.seconds(call))
        self.entry["fewest_calls"] = min(len(times), self.entry.get("fewest_calls", _MOST))
        return statistics.median(times)

    def kernels(self, call: Callable[[], object]) -> Kernels:
        """What the GPU runs in a call."""
        seen = Kernels(self.settings.device)
        for _ in range(_PROFILED if self.settings.device == "cuda" else 0):
            self.seconds(call)
        return seen.end(_PROFILED)


def shown(figures: Mapping[str, Any]) -> str:
    """Figures as a line of progress."""
    return ", ".join(f"{name} {cell(value)}" for name, value in figures.items())


def _measure(work: tuple[Stage, Callable[..., None], tuple[Any, ...]], report: Report) -> bool:
    """Whether there was time to measure in this process."""
    stage, measure, args = work
    stage.changed = lambda line: report((line, stage.entry))
    try:
        measure(stage, *args)
    except OutOfTime:
        return False
    return True
