"""Seconds of a verify step by its positions, learned from steps."""

from __future__ import annotations

import numpy as np

_RANGES = 64
_LEAST_WEIGHT = 0.15
"""Least weight of the newest step in the moving mean of its range."""
_OUTLIER = 3.0
"""Factor of the mean to which an interrupted step is limited."""
_FORGET_STEPS = 256
"""Steps without an observation after which a range is dropped."""
_REFIT_EVERY = 4


class StepCost:
    """Moving means per range of position counts (two ranges per doubling), made monotone, with straight lines between.

    Unknown ranges are estimated optimistically: above the largest known range further positions cost nothing, below the
    smallest each position costs its share. So longer and shorter steps are tried, and again when they were dropped."""

    def __init__(self) -> None:
        self._tokens, self._seconds = [0.0] * _RANGES, [0.0] * _RANGES
        self._count, self._seen = [0] * _RANGES, [-_FORGET_STEPS] * _RANGES
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
        weight = max(1.0 / self._count[at], _LEAST_WEIGHT)
        if self._count[at] > 3:
            seconds = min(seconds, _OUTLIER * self._seconds[at])
        self._seconds[at] += weight * (seconds - self._seconds[at])
        self._tokens[at] += weight * (num_tokens - self._tokens[at])
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
        seconds = np.array([self._seconds[at] for at in known])
        rising, falling = np.maximum.accumulate(seconds), np.minimum.accumulate(seconds[::-1])[::-1]
        self._knots = np.array([0.0, *(self._tokens[at] for at in known)]), np.append(0.0, (rising + falling) / 2.0)


def range_number(num_tokens: int) -> int:
    """Number of the range, of 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ...: two per doubling."""
    octave = (num_tokens - 1).bit_length()
    return 2 * octave + (4 * num_tokens > 3 << octave)
