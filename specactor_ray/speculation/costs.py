"""What drafting and verifying cost, fitted from measured points (SpecActor, arXiv 2511.16193, section 4).

    D(g, b)    = b · D'(g) + α(g)          seconds to draft one token for each of b requests on g devices
    V(g, w, b) = b · V'(g, w) + β(g, w)    seconds to verify w + 1 tokens for each of b requests on g devices

Each device count has a table of its own over (window, context); a cell is fitted over the batch. Windows and contexts
that were not measured are interpolated between their neighbours. Where a straight line over the batch predicts batches
that were held out worse than interpolation between the measured batches does, interpolation is used in its place; where
that does not tell, it is used if the line misses the measured points by more than noise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from specactor_ray.errors import InputError

_LINE_FITS = 0.05
"""Largest mean relative error up to which a line is said to fit: about the noise of a measured step."""
_TIE = 0.005
"""Held-out errors nearer than this do not tell two models apart. With three batches they never do: both draw the same
line between the outer two."""


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


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Seconds over the batch at one (devices, window, context)."""

    slope: float
    """D' or V': seconds per further request, 0 or more."""
    intercept: float
    """α or β: seconds of the call itself, 0 or more."""
    knots: tuple[tuple[int, float], ...]
    """The measured (batch, seconds), by batch."""

    def linear(self, batch: float) -> float:
        return batch * self.slope + self.intercept

    def interpolated(self, batch: float) -> float:
        """Straight lines between the measured batches; outside of them the fitted slope goes on."""
        return _between(self.knots, batch, self.slope)


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well the cost of one device count is described. Errors are relative: |predicted - measured| / measured."""

    devices: int
    kind: str
    """`linear` or `interpolated`: what predictions use."""
    points: int
    mean_error: float
    """Of the straight line, over all measured points."""
    max_error: float
    held_out_linear: float | None
    """Mean error at batches left out of the fit; None with fewer than three batches."""
    held_out_interpolated: float | None
    words: str


class CostTable:
    """Costs of one thing (verifying, or one draft method) on every measured device count.

    Args:
        points: For every device count a full grid of windows, contexts and batches.

    Raises:
        InputError: There are no points, some of the grid are missing, or a figure is not positive.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        self.points = tuple(points)
        if not self.points:
            raise InputError("no costs were measured")
        self._cells: dict[int, dict[tuple[int, int], BatchCost]] = {}
        self.fits: dict[int, FitReport] = {}
        for devices in sorted({point.devices for point in self.points}):
            cells = _cells([point for point in self.points if point.devices == devices])
            self._cells[devices] = cells
            self.fits[devices] = _report(devices, list(cells.values()))

    @property
    def devices(self) -> tuple[int, ...]:
        """Device counts that were measured, ascending."""
        return tuple(self._cells)

    def windows(self, devices: int) -> tuple[int, ...]:
        return tuple(sorted({window for window, _ in self._cells[devices]}))

    def contexts(self, devices: int) -> tuple[int, ...]:
        return tuple(sorted({context for _, context in self._cells[devices]}))

    def batches(self, devices: int) -> tuple[int, ...]:
        return tuple(batch for batch, _ in next(iter(self._cells[devices].values())).knots)

    def seconds(self, devices: int, batch: int, context: float, window: int = 0) -> float:
        """Predicted seconds.

        Beyond the measured contexts the nearest one counts; beyond the measured batches the slope goes on.

        Raises:
            KeyError: This device count was not measured.
            ValueError: The window is outside the measured ones.
        """
        linear = self.fits[devices].kind == "linear"
        return self._interpolate(
            devices, context, window, lambda cell: cell.linear(batch) if linear else cell.interpolated(batch)
        )

    def line(self, devices: int, context: float, window: int = 0) -> tuple[float, float]:
        """`(slope, intercept)`: (D', α) or (V', β) of the fitted line. Raises as `seconds`."""
        slope = self._interpolate(devices, context, window, lambda cell: cell.slope)
        return slope, self._interpolate(devices, context, window, lambda cell: cell.intercept)

    def _interpolate(self, devices: int, context: float, window: int, value: Callable[[BatchCost], float]) -> float:
        windows, contexts = self.windows(devices), self.contexts(devices)
        if not windows[0] <= window <= windows[-1]:
            raise ValueError(f"window {window} is outside the measured {windows[0]} to {windows[-1]}")
        cells = self._cells[devices]
        nearest = min(max(context, contexts[0]), contexts[-1])
        over_windows = []
        for measured in windows:
            knots = [(known, value(cells[measured, known])) for known in contexts]
            over_windows.append((measured, _between(knots, nearest, 0.0)))
        return _between(over_windows, window, 0.0)


def fit_batch_cost(knots: Sequence[tuple[int, float]]) -> BatchCost:
    """The line over measured (batch, seconds) with coefficients of 0 or more and the least squared *relative* errors.

    Relative, because a step of a large batch takes many times that of a small one, and predictions of both are wanted
    to the same percentage. One point alone gives a constant.
    """
    knots = tuple(sorted(knots))
    if len(knots) == 1:
        return BatchCost(0.0, knots[0][1], knots)
    bb = sum(b * b / (y * y) for b, y in knots)
    b1 = sum(b / (y * y) for b, y in knots)
    one = sum(1.0 / (y * y) for _, y in knots)
    by, y1 = sum(b / y for b, y in knots), sum(1.0 / y for _, y in knots)
    determinant = bb * one - b1 * b1
    if determinant > 0.0:
        slope, intercept = (by * one - y1 * b1) / determinant, (bb * y1 - b1 * by) / determinant
        if slope >= 0.0 and intercept >= 0.0:
            return BatchCost(slope, intercept, knots)
    # The least squares of a convex problem then lie on the edge of what is allowed: one coefficient is 0.
    edges = [BatchCost(by / bb, 0.0, knots), BatchCost(0.0, y1 / one, knots)]
    return min(edges, key=lambda cost: sum((cost.linear(b) / y - 1.0) ** 2 for b, y in knots))


def _cells(points: Sequence[CostPoint]) -> dict[tuple[int, int], BatchCost]:
    measured: dict[tuple[int, int], dict[int, float]] = {}
    for point in points:
        if not 0.0 < point.seconds < float("inf") or point.batch < 1 or point.window < 0 or point.context < 0:
            raise InputError(f"{point} is not a cost that can have been measured")
        measured.setdefault((point.window, point.context), {})[point.batch] = point.seconds
    windows, contexts = {window for window, _ in measured}, {context for _, context in measured}
    batches = {point.batch for point in points}
    for window in windows:
        for context in contexts:
            missing = batches - measured.get((window, context), {}).keys()
            if missing:
                where = f"{points[0].devices} device(s), window {window}, context {context}"
                raise InputError(f"the cost of batch {min(missing)} at {where} is missing")
    return {cell: fit_batch_cost(list(costs.items())) for cell, costs in sorted(measured.items())}


def _report(devices: int, cells: Sequence[BatchCost]) -> FitReport:
    errors = [abs(cell.linear(b) / y - 1.0) for cell in cells for b, y in cell.knots]
    linear = _mean([error for cell in cells for error in _held_out(cell, interpolate=False)])
    interpolated = _mean([error for cell in cells for error in _held_out(cell, interpolate=True)])
    mean = fmean(errors)
    if linear is None or interpolated is None:
        use_line = True
    elif abs(linear - interpolated) <= _TIE:
        use_line = mean <= _LINE_FITS
    else:
        use_line = linear < interpolated
    return FitReport(
        devices=devices,
        kind="linear" if use_line else "interpolated",
        points=len(errors),
        mean_error=mean,
        max_error=max(errors),
        held_out_linear=linear,
        held_out_interpolated=interpolated,
        words=_in_words(mean, linear, interpolated, len(cells[0].knots), use_line),
    )


def _held_out(cell: BatchCost, *, interpolate: bool) -> list[float]:
    """Relative errors at the inner batches, each predicted from the others."""
    errors = []
    for number in range(1, len(cell.knots) - 1):
        batch, seconds = cell.knots[number]
        rest = fit_batch_cost([*cell.knots[:number], *cell.knots[number + 1 :]])
        predicted = rest.interpolated(batch) if interpolate else rest.linear(batch)
        errors.append(abs(predicted / seconds - 1.0))
    return errors


def _in_words(mean: float, linear: float | None, interpolated: float | None, batches: int, use_line: bool) -> str:
    if batches == 1:
        return "one batch only was measured: nothing is known of others"
    if linear is None or interpolated is None:
        return "a line through two batches; a third would tell whether it fits"
    figures = f"held-out batches are missed by {linear:.1%} with a line, by {interpolated:.1%} with interpolation"
    verdict = "a line fits" if mean <= _LINE_FITS else "a line does not fit well"
    return f"{verdict}; {figures}; {'the line' if use_line else 'interpolation'} is used"


def _between(knots: Sequence[tuple[float, float]], x: float, slope_outside: float) -> float:
    """Straight lines between knots (ascending); outside of them `slope_outside`, never below 0."""
    first, last = knots[0], knots[-1]
    if x <= first[0]:
        return max(first[1] - slope_outside * (first[0] - x), 0.0)
    if x >= last[0]:
        return last[1] + slope_outside * (x - last[0])
    right = bisect_right(knots, x, key=lambda knot: knot[0])
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def fits_to_dict(table: CostTable) -> list[dict[str, object]]:
    """The fits for files and tables: a row per device count."""
    return [asdict(fit) for fit in table.fits.values()]
