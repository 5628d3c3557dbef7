"""Costs of drafting and verifying: measured points, and the grid between them.

    D(g, b)    seconds to draft one token for each of b requests on g devices
    V(g, w, b) seconds to verify w + 1 tokens for each of b requests on g devices

SpecActor (arXiv 2511.16193, section 4) fits lines over b. Steps bend where a device is saturated, so costs are
interpolated here; docs/design/plan.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specactor_ray.core.errors import InputError

_FAR = 64
"""The grid is extended on straight lines to this multiple of its last knots; beyond that it is flat."""

Point = tuple[float, float, float]
"""(rows, positions per row, context per row)."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured cost. For drafting, `window` is 0 and `seconds` are those of one token per request."""

    devices: int
    window: int
    context: int
    """Tokens of prompt and output that each request had."""
    batch: int
    seconds: float
    """Median of the repeats."""


class GridCost:
    """Seconds of a step, interpolated linearly along each axis of a measured grid.

    Beyond the last knot of an axis the grid follows the line through the last two; before the first knot it has the
    value of the first. A missing point (large steps run out of memory) lies on the line through the two before it along
    rows, or else along positions or context.
    Noise is smoothed upwards: no cell is below one with fewer rows, positions or tokens, so more work never costs less.
    A prompt position costs as much as a position of the largest measured step.

    Args:
        seconds: Measured points.

    Raises:
        InputError: There are no points, or one is missing that has no two before it on any axis.
    """

    def __init__(self, seconds: Mapping[Point, float]) -> None:
        if not seconds:
            raise InputError("no steps were measured")
        axes = [sorted({point[axis] for point in seconds}) for axis in range(3)]
        self.knots = tuple(tuple(axis) for axis in axes)
        """Measured rows, positions per row, contexts."""
        for knots in axes:
            if len(knots) > 1:
                knots.append(max(knots[-1], 1.0) * _FAR)
        grid: NDArray[np.float64] = np.empty([len(axis) for axis in axes])
        for index in np.ndindex(*grid.shape):
            measured = seconds.get((axes[0][index[0]], axes[1][index[1]], axes[2][index[2]]))
            grid[index] = _continued(grid, axes, index) if measured is None else measured
        largest = grid[tuple(len(axis) - 1 for axis in self.knots)]
        self._position_s = float(largest) / (self.knots[0][-1] * self.knots[1][-1])
        for axis in range(3):
            grid = np.maximum.accumulate(grid, axis=axis)
        self._axes = axes
        self._grid: list[list[list[float]]] = np.pad(grid, (0, 1), mode="edge").tolist()
        """Seconds of each cell, the last cell of each axis twice, so that every cell has a next one."""

    def seconds(self, rows: float, positions: float, context_tokens: float, prefill_tokens: int = 0) -> float:
        """See `simulation.roofline.StepCost`; positions and context are those of all rows."""
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
    """Device count → costs measured on that many devices, ascending. A window of w is w + 1 positions per row.

    Raises:
        InputError: A point of a grid is missing.
    """
    measured: dict[int, dict[Point, float]] = {}
    for point in points:
        measured.setdefault(point.devices, {})[point.batch, point.window + 1, point.context] = point.seconds
    return {devices: GridCost(measured[devices]) for devices in sorted(measured)}


def _continued(grid: NDArray[np.float64], axes: Sequence[Sequence[float]], index: tuple[int, ...]) -> float:
    """The value at a point that was not measured, from those before it, which are filled: along the last axis on which
    it is far out, else along the first axis with two points."""
    far = [axis for axis in (2, 1, 0) if index[axis] > 1 and index[axis] == len(axes[axis]) - 1]
    for axis in (*far, 0, 1, 2):
        at, knots = index[axis], axes[axis]
        if at >= 2:
            first, second = (grid[(*index[:axis], before, *index[axis + 1 :])] for before in (at - 2, at - 1))
            slope = max(second - first, 0.0) / (knots[at - 1] - knots[at - 2])
            return float(second + slope * (knots[at] - knots[at - 1]))
    rows, positions, context = (knots[at] for knots, at in zip(axes, index, strict=True))
    raise InputError(f"the step of {rows:g} rows, {positions:g} positions and {context:g} tokens is missing")


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
