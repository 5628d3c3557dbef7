"""Seconds of an engine's or drafter's steps by their positions, learned while they run."""

from __future__ import annotations

import numpy as np

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
        """Mean positions and seconds of all ranges since the start, dropped ones included; for any thread."""
        return [(self._tokens[at], self._seconds[at]) for at in range(_RANGES) if self._tokens[at]]

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
        self._knots = np.array(places), np.maximum.accumulate([knots[place] for place in places])


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
