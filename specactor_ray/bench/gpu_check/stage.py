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

_FEWEST, _MOST, _ENOUGH_S = 3, 20, 0.15
"""Bounds of the timed calls of a figure, and seconds that they may take: as many calls as fit."""


DRAFTER = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
}
"""Shape of Qwen2.5-0.5B, with the names of transformers."""


class Settings(NamedTuple):
    """Shapes and grids of a check; the defaults take minutes on a GPU."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    copy_bytes: int = 4 << 30
    matmul_size: int = 8192
    sampler_rows: tuple[int, ...] = (1, 128, 512, 1152, 2304)
    sampler_vocabs: tuple[int, ...] = (6016, 50_257, DRAFTER["vocab_size"])
    """Vocabulary sizes: tokens are compared in all of them; the last one is timed."""
    attention_heads: tuple[int, int, int] = (28, 4, 128)
    """Heads, key/value heads and their size: those of Qwen2.5-7B."""
    attention_cells: tuple[tuple[int, int, int], ...] = (
        (1, 1, 1000),
        (1, 4, 1000),
        (128, 1, 1000),
        (128, 4, 1000),
        (256, 1, 1000),
        (1, 1, 8192),
    )
    """Rows, new tokens of each row, and tokens before them."""
    drafter: Mapping[str, int] = DRAFTER
    drafting_rows: tuple[int, ...] = (1, 8, 64, 256)
    drafting_prompt: int = 128


class OutOfTime(Exception):
    """The time of the check is up."""


@dataclass
class Stage:
    """Context and results of a stage."""

    name: str
    settings: Settings
    deadline: float = math.inf
    """End of the check, on the clock of `now`."""
    changed: Callable[[str], None] = lambda line: None
    """Called with a line of progress when `entry` has changed."""
    now: Callable[[], float] = time.perf_counter
    entry: dict[str, Any] = field(
        default_factory=lambda: {"status": "interrupted", "points": [], "figures": {}, "not_measured": []}
    )
    """Plain data: `points`, a table; `figures`, single ones; `not_measured`, a line with the reason for each; `status`
    (`complete`, `partial` or `failed`; `interrupted` until the end), `seconds` and `error`."""

    def run(self, measure: Callable[[Stage], None]) -> None:
        """Measure the stage; a failure is recorded, so that other stages follow."""
        begin, error = self.now(), ""
        try:
            measure(self)
        except OutOfTime:
            self.entry["not_measured"].append("the rest: no time was left")
        except Exception as failure:  # noqa: BLE001 - the other stages are measured after any failure
            error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
            self.entry["traceback"] = traceback.format_exc()
        status = "failed" if error else "partial" if self.entry["not_measured"] else "complete"
        self.entry |= {"status": status, "error": error, "seconds": self.now() - begin}
        self.changed(f"{self.name}: {status} after {self.entry['seconds']:.1f} s {error}".rstrip())
        gc.collect()  # frees what the next stage has no use for
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def point(self, key: Mapping[str, Any], **columns: Any) -> None:
        """Add columns to the table's line with this key."""
        points = self.entry["points"]
        if not any(point.items() >= key.items() for point in points):
            points.append(dict(key))
        next(point for point in points if point.items() >= key.items()).update(columns)

    def each(self, points: Iterable[tuple[Any, ...]], measure: Callable[..., str]) -> None:
        """Call `measure` with every point; it returns a line of progress. Missing memory and time are recorded."""
        for point in points:
            name = ", ".join(map(str, point))
            try:
                line = measure(*point)
            except (OutOfTime, torch.OutOfMemoryError) as error:
                line = "no time was left" if isinstance(error, OutOfTime) else "out of memory"
                self.entry["not_measured"].append(f"{name}: {line}")
            self.changed(f"{self.name}, {name}: {line}")

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call, to the end of its work on the device. Raises OutOfTime if the time was up before."""
        begin = self.now()
        if begin > self.deadline:
            raise OutOfTime
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
        return statistics.median(times)
