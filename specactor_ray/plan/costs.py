"""Costs of drafting and verifying: measured points with the grid between them, and means of running steps.

    D(g, b)    seconds to draft one token for each of b requests on g devices
    V(g, w, b) seconds to verify w + 1 tokens for each of b requests on g devices

SpecActor fits lines over b. Steps bend where a device is saturated, so costs are interpolated; docs/design/plan.md.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specactor_ray.core.errors import InputError

_FAR = 64
"""The grid is extended on straight lines to this multiple of its last knots; beyond that it is flat."""

Point = tuple[float, float, float]
"""(rows, positions per row, context per row)."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured cost: the median `seconds` of the repeats, for requests of `context` tokens of prompt and output.
    For drafting, `window` is 0 and `seconds` are those of one token per request."""

    devices: int
    window: int
    context: int
    batch: int
    seconds: float


class GridCost:
    """Seconds of a step, interpolated linearly along each axis of a measured grid.

    Beyond the last knot of an axis the grid follows the line through the last two, before the first it is flat. Noise
    is smoothed upwards, so more work never costs less. A prompt position costs as much as a position of the largest
    measured step.

    InputError: There are no points, or one of the grid is missing.
    """

    def __init__(self, seconds: Mapping[Point, float]) -> None:
        if not seconds:
            raise InputError("no steps were measured")
        axes = [sorted({point[axis] for point in seconds}) for axis in range(3)]
        self.knots = tuple(tuple(axis) for axis in axes)
        """Measured rows, positions per row, contexts."""
        points = list(itertools.product(axes[0], axes[1], axes[2]))
        if missing := [point for point in points if point not in seconds]:
            rows, positions, context = missing[0]
            raise InputError(f"the step of {rows:g} rows, {positions:g} positions and {context:g} tokens is missing")
        grid = np.array([seconds[point] for point in points]).reshape([len(axis) for axis in axes])
        self._position_s = float(grid[-1, -1, -1]) / (axes[0][-1] * axes[1][-1])
        for axis, knots in enumerate(axes):
            if len(knots) > 1:
                before, last = grid.take(-2, axis), grid.take(-1, axis)
                far = max(knots[-1], 1.0) * _FAR
                slope = np.maximum(last - before, 0.0) / (knots[-1] - knots[-2])
                grid = np.append(grid, np.expand_dims(last + slope * (far - knots[-1]), axis), axis)
                knots.append(far)
        for axis in range(3):
            grid = np.maximum.accumulate(grid, axis=axis)
        self._axes = axes
        self._grid: list[list[list[float]]] = np.pad(grid, (0, 1), mode="edge").tolist()
        """Seconds of each cell, the last cell of each axis twice, so that every cell has a next one."""

    def seconds(self, rows: float, positions: float, context_tokens: float, prefill_tokens: int = 0) -> float:
        """Seconds of a step; positions and context are those of all rows."""
        prefill_s = self._position_s * prefill_tokens
        if rows <= 0:
            return prefill_s
        r, fr = _place(self._axes[0], rows)
        p, fp = _place(self._axes[1], positions / rows)
        c, fc = _place(self._axes[2], context_tokens / rows)
        low, high = _bilinear(self._grid[r], p, fp, c, fc), _bilinear(self._grid[r + 1], p, fp, c, fc)
        return (1.0 - fr) * low + fr * high + prefill_s

    def step(self, batch: float, context: float, window: int = 0) -> float:
        """D, or V at this window, for requests of `context` tokens each."""
        return self.seconds(batch, batch * (window + 1), batch * context)


def cost_grids(points: Iterable[CostPoint]) -> dict[int, GridCost]:
    """Device count → costs measured on that many devices, ascending. InputError: a point of a grid is missing."""
    measured: dict[int, dict[Point, float]] = {}
    for point in points:
        measured.setdefault(point.devices, {})[point.batch, point.window + 1, point.context] = point.seconds
    return {devices: GridCost(measured[devices]) for devices in sorted(measured)}


def _place(knots: Sequence[float], x: float) -> tuple[int, float]:
    """Index of the knot before x, and the part of the way to the next knot at which x lies."""
    if x <= knots[0]:
        return 0, 0.0
    if x >= knots[-1]:
        return len(knots) - 1, 0.0
    index = bisect_right(knots, x) - 1
    return index, (x - knots[index]) / (knots[index + 1] - knots[index])


def _bilinear(plane: list[list[float]], p: int, fp: float, c: int, fc: float) -> float:
    low, high = plane[p], plane[p + 1]
    first = low[c] + fc * (low[c + 1] - low[c])
    return first + fp * (high[c] + fc * (high[c + 1] - high[c]) - first)


# ---- learned ----

_RANGES = 64
_LEAST_WEIGHT = 0.15
"""Least weight of the newest step in the moving mean of its range."""
_SLOPE_WEIGHT = 0.02
"""Least weight of the newest step in the slope of its range."""
_ERRORS = 2.0
"""Standard errors by which a slope must differ from that between ranges to count."""
_LEAST_STEPS = 8
"""Least steps of a range with a slope of its own."""
_OUTLIER = 3.0
"""Factor of the mean to which an interrupted step is limited."""
_FORGET_STEPS = 256
"""Steps without an observation after which a range is dropped."""
_REFIT_EVERY = 4


class StepCost:
    """Moving means per range of position counts, made monotone, with straight lines between. Where the steps of a range
    show another slope than those lines, the range has it, so stairs at the ends of ranges are kept: those of matrix
    products in tiles of 64 and, above 256 positions, 128.

    Above the largest known range further positions cost nothing, below the smallest each position costs its share, so
    longer and shorter steps are tried, and again when they were dropped."""

    def __init__(self) -> None:
        self._tokens, self._seconds = [0.0] * _RANGES, [0.0] * _RANGES
        self._count, self._seen = [0] * _RANGES, [-_FORGET_STEPS] * _RANGES
        self._squares = [[0.0, 0.0, 0.0] for _ in range(_RANGES)]
        """By range, moving means of squared deviations of positions, of their products with those of seconds, and of
        squared ones of seconds."""
        self._steps = 0
        self._knots = (np.array([0.0, 1.0]), np.array([1.0, 1.0]))

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record the seconds of a step over `num_tokens` positions; invalid values are ignored."""
        if num_tokens < 1 or not 0.0 < seconds < float("inf"):
            return
        self._steps += 1
        at = range_number(num_tokens)
        is_new = self._steps - self._seen[at] > _FORGET_STEPS
        if is_new:
            self._count[at] = 0
        self._count[at] += 1
        count = self._count[at]
        if count > 3:
            seconds = min(seconds, _OUTLIER * self._seconds[at])
        more, longer = num_tokens - self._tokens[at], seconds - self._seconds[at]
        if count > 1:
            weight = max(1.0 / (count - 1), _SLOPE_WEIGHT)
            xx, xy, yy = self._squares[at] if count > 2 else (0.0, 0.0, 0.0)
            self._squares[at] = [
                xx + weight * (more * more - xx),
                xy + weight * (more * longer - xy),
                yy + weight * (longer * longer - yy),
            ]
        weight = max(1.0 / count, _LEAST_WEIGHT)
        self._seconds[at] += weight * longer
        self._tokens[at] += weight * more
        self._seen[at] = self._steps
        if is_new or self._steps % _REFIT_EVERY == 0:
            self._fit()

    def curve(self, num_rows: int, most: int) -> np.ndarray:
        """`(most + 1,)`: seconds of a step with 0, 1, ..., `most` draft tokens beside one position per row."""
        seconds: np.ndarray = np.interp(np.arange(num_rows, num_rows + most + 1), *self._knots)
        return seconds

    def difference(self, num_tokens: int, fewer: int) -> float:
        """Additional seconds of a step with `num_tokens` positions over one with `fewer`."""
        more_s, less_s = np.interp((num_tokens, fewer), *self._knots)
        return max(float(more_s - less_s), 0.0)

    def points(self) -> list[tuple[float, float]]:
        """Positions and seconds of the known ranges; for any thread."""
        tokens, seconds = self._knots
        return list(zip(tokens[1:].tolist(), seconds[1:].tolist(), strict=True)) if self._steps else []

    @property
    def is_known(self) -> bool:
        """Whether a step was recorded."""
        return self._steps > 0

    def _fit(self) -> None:
        oldest = self._steps - _FORGET_STEPS
        known = [at for at in range(_RANGES) if self._count[at] and self._seen[at] >= oldest]
        tokens, seconds = [self._tokens[at] for at in known], np.array([self._seconds[at] for at in known])
        rising, falling = np.maximum.accumulate(seconds), np.minimum.accumulate(seconds[::-1])[::-1]
        x, y = [0.0, *tokens], [0.0, *((rising + falling) / 2.0).tolist()]
        lines = np.interp([_ENDS[at] for at in known], x, y).tolist()
        knots = dict(zip(x, y, strict=True))
        for index, at in enumerate(known, 1):
            (xx, xy, yy), count = self._squares[at], self._count[at]
            if count < _LEAST_STEPS or xx <= 0.0:
                continue
            (first, last), (low, high) = _ENDS[at], lines[index - 1]
            slope = max(xy / xx, 0.0)
            error = _ERRORS**2 * max(yy - xy * xy / xx, 0.0) / (xx * min(count, 1.0 / _SLOPE_WEIGHT))
            differs = (slope - (high - low) / (last - first)) ** 2
            if differs > error and first < x[index] < last:
                share, here = 1.0 - error / differs, y[index]
                least = y[index - 1] if index > 1 else here * first / x[1]
                most = y[index + 1] if index < len(known) else here
                below, above = here - slope * (x[index] - first), here + slope * (last - x[index])
                knots[first] = min(max(low + share * (below - low), least), here)
                knots[last] = min(max(high + share * (above - high), here), most)
        places = sorted(knots)
        self._knots = np.array(places), np.array([knots[place] for place in places])


def range_number(num_tokens: int) -> int:
    """Number of the range, of 1, 2, 3, 4, 5-6, 7-8, 9-12, ..., 385-512: two per doubling; then 513-640, ...: four."""
    octave = (num_tokens - 1).bit_length()
    if octave < 10:
        return 2 * octave + (4 * num_tokens > 3 << octave)
    return min(4 * octave - 24 + (num_tokens - 1 >> octave - 3), _RANGES - 1)


def ends_of(number: int) -> tuple[int, int]:
    """First and last position count of a range."""
    octave, part, parts = (*divmod(number, 2), 2) if number < 20 else (number // 4 + 5, number % 4, 4)
    begin = 1 << octave >> 1
    return begin + begin * part // parts + 1, max(begin + begin * (part + 1) // parts, 1)


_ENDS = tuple(map(ends_of, range(_RANGES)))
