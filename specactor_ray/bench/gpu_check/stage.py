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


class ModelShape(NamedTuple):
    """Shape of a Qwen2 decoder, with transformers' names."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    def __str__(self) -> str:
        return self.name

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values of `tokens` tokens."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize * tokens


SMALL = ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936)
LARGE = ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064)


class Settings(NamedTuple):
    """Shapes and grids of a check; the defaults take minutes on a GPU."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    copy_bytes: int = 4 << 30
    matmul_size: int = 8192
    sampler_rows: tuple[int, ...] = (1, 128, 512, 1152, 2304)
    sampler_vocabs: tuple[int, ...] = (6016, 50_257, SMALL.vocab_size)
    """Vocabulary sizes: tokens are compared in all of them; the last one is timed."""
    shapes: tuple[ModelShape, ...] = (LARGE, SMALL)
    """Model shapes of `forwards`; the first is also that of `attention`, the last that of `drafting`."""
    attention_cells: tuple[tuple[int, int, int], ...] = (
        (1, 1, 1000),
        (1, 4, 1000),
        (128, 1, 1000),
        (128, 4, 1000),
        (256, 1, 1000),
        (1, 1, 8192),
    )
    """Rows, new tokens of each row, and tokens before them."""
    forward_rows: tuple[int, ...] = (1, 8, 32, 128)
    forward_positions: tuple[int, ...] = (1, 2, 4, 9)
    forward_contexts: tuple[int, ...] = (2048, 512, 8192)
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
        gc.collect()  # frees the models before the next stage makes its own
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
