"""What drafting and verifying cost: measured points, and the grid between them.

    D(g, b)    seconds to draft one token for each of b requests on g devices
    V(g, w, b) seconds to verify w + 1 tokens for each of b requests on g devices

SpecActor (arXiv 2511.16193, section 4) fits lines over b. Steps bend where a device is saturated, and what was measured
is known, so costs are interpolated here; docs/design/plan.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specactor_ray.errors import InputError

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
    spread: float = 0.0
    """Distance between the quartiles of the repeats, in seconds."""


class GridCost:
    """Seconds of a step, interpolated linearly along each axis of a measured grid.

    Beyond the last knot of an axis the line through the last two is followed; before the first one the first counts. A
    point that is missing (large steps run out of memory) lies on the line through the two before it along rows, or else
    along positions or context.
    Noise is ironed out upwards: no cell is below one with fewer rows, positions or tokens, so that more work never
    costs less. Prompt positions cost what a position of the largest measured step does.

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
        grid: NDArray[np.float64] = np.empty([len(axis) for axis in axes])
        for index in np.ndindex(*grid.shape):
            measured = seconds.get((axes[0][index[0]], axes[1][index[1]], axes[2][index[2]]))
            grid[index] = _continued(grid, axes, index) if measured is None else measured
        self._position_s = float(grid[-1, -1, -1]) / (axes[0][-1] * axes[1][-1])
        for axis in range(3):
            grid = _extend(grid, axes[axis], axis)
        for axis in range(3):
            grid = np.maximum.accumulate(grid, axis=axis)
        self._axes = axes
        self._grid: list[list[list[float]]] = grid.tolist()

    def seconds(self, rows: int, positions: int, context_tokens: float, prefill_tokens: int = 0) -> float:
        """See `simulation.roofline.StepCost`; positions and context are those of all rows."""
        prefill_s = self._position_s * prefill_tokens
        if rows <= 0:
            return prefill_s
        axes = self._axes
        r, fr = _place(axes[0], rows)
        p, fp = _place(axes[1], positions / rows)
        c, fc = _place(axes[2], context_tokens / rows)
        r1, p1, c1 = min(r + 1, len(axes[0]) - 1), min(p + 1, len(axes[1]) - 1), min(c + 1, len(axes[2]) - 1)
        low, high = self._grid[r], self._grid[r1]
        return (
            (1.0 - fr) * _bilinear(low, p, p1, fp, c, c1, fc) + fr * _bilinear(high, p, p1, fp, c, c1, fc) + prefill_s
        )

    def draft_seconds(self, rows: int, tokens_per_row: int, context_tokens: int) -> float:
        """Seconds to draft `tokens_per_row` tokens for every row, one after the other; see `RooflineCost`."""
        return tokens_per_row * self.seconds(rows, rows, context_tokens + rows * max(tokens_per_row - 1, 0) // 2)


class CostTable:
    """Costs of one thing (verifying, or one draft method) on every measured device count.

    Args:
        points: For every device count a grid of windows, contexts and batches.

    Raises:
        InputError: There are no points, one of the grid is missing, or a figure is not positive.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        measured: dict[int, dict[Point, float]] = {}
        for point in points:
            if not 0.0 < point.seconds < float("inf") or point.batch < 1 or point.window < 0 or point.context < 0:
                raise InputError(f"{point} is not a cost that can have been measured")
            measured.setdefault(point.devices, {})[point.batch, point.window + 1, point.context] = point.seconds
        if not measured:
            raise InputError("no costs were measured")
        self._grids = {devices: GridCost(measured[devices]) for devices in sorted(measured)}

    @property
    def devices(self) -> tuple[int, ...]:
        """Device counts that were measured, ascending."""
        return tuple(self._grids)

    def batches(self, devices: int) -> tuple[float, ...]:
        return self._grids[devices].knots[0]

    def largest_window(self, devices: int) -> int:
        return int(self._grids[devices].knots[1][-1]) - 1

    def contexts(self, devices: int) -> tuple[float, ...]:
        return self._grids[devices].knots[2]

    def on(self, devices: int) -> GridCost:
        """The costs on this number of devices, a window of w being w + 1 positions per row.

        Raises:
            InputError: This number was not measured.
        """
        if devices not in self._grids:
            measured = ", ".join(map(str, self._grids))
            raise InputError(f"{devices} devices were not measured; those measured are {measured}")
        return self._grids[devices]

    def seconds(self, devices: int, batch: int, context: float, window: int = 0) -> float:
        """D, or V at this window."""
        return self.on(devices).seconds(batch, batch * (window + 1), batch * context)


def _continued(grid: NDArray[np.float64], axes: Sequence[Sequence[float]], index: tuple[int, ...]) -> float:
    """The value at a missing point, from those before it, which are filled."""
    for axis, knots in enumerate(axes):
        at = index[axis]
        if at >= 2:
            first, second = (grid[(*index[:axis], before, *index[axis + 1 :])] for before in (at - 2, at - 1))
            slope = max(second - first, 0.0) / (knots[at - 1] - knots[at - 2])
            return float(second + slope * (knots[at] - knots[at - 1]))
    rows, positions, context = (knots[at] for knots, at in zip(axes, index, strict=True))
    raise InputError(f"the step of {rows:g} rows, {positions:g} positions and {context:g} tokens is missing")


def _extend(grid: NDArray[np.float64], knots: list[float], axis: int) -> NDArray[np.float64]:
    """The grid with one far knot more along an axis, on the line through the last two; an axis of one knot as it is."""
    if len(knots) < 2:
        return grid
    far = max(knots[-1], 1.0) * _FAR
    last, before = np.take(grid, -1, axis), np.take(grid, -2, axis)
    slope = np.maximum(last - before, 0.0) / (knots[-1] - knots[-2])
    beyond = last + slope * (far - knots[-1])
    knots.append(far)
    return np.concatenate([grid, np.expand_dims(beyond, axis)], axis)


def _place(knots: Sequence[float], x: float) -> tuple[int, float]:
    """The knot before x, and how far x is on the way to the next one."""
    if x <= knots[0]:
        return 0, 0.0
    if x >= knots[-1]:
        return len(knots) - 1, 0.0
    index = bisect_right(knots, x) - 1
    return index, (x - knots[index]) / (knots[index + 1] - knots[index])


def _bilinear(plane: list[list[float]], p: int, p1: int, fp: float, c: int, c1: int, fc: float) -> float:
    low, high = plane[p], plane[p1]
    first = low[c] + fc * (low[c1] - low[c])
    return first + fp * (high[c] + fc * (high[c1] - high[c]) - first)
