"""Seconds of a verify step as a function of its positions, learned while running."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

_UNKNOWN_S = 1.0
"""Cost of any step before the first observation; only that it is the same for all lengths matters."""


class StepCostModel:
    """Moving medians of step seconds per range of position counts, made monotone, with straight lines between.

    Positions are counted in ranges with bounds 1, 2, 3, 4, 6, 8, 12, 16, 24, ... Each keeps its last `memory` steps;
    their median withstands the odd step that was interrupted. Medians that fall where the count grows are noise and are
    pooled (isotonic regression). Beyond the largest range seen the last slope goes on; below the smallest the cost
    stays flat.

    Exploring. Before anything is known, and while only one range is, all lengths cost the same, so that whatever
    drafts there are get verified and the model sees more positions. A range that was not seen for `forget_after` steps
    is forgotten: if long tails were given up because of a slow spell they look affordable again after that and are
    tried anew, at the price of one step.

    Args:
        memory: Steps kept per range.
        forget_after: Steps after which a range that was not seen is forgotten.
    """

    def __init__(self, memory: int = 9, forget_after: int = 200) -> None:
        if memory < 1 or forget_after < 1:
            raise ValueError(f"memory is {memory} and forget_after is {forget_after}; both must be 1 or more")
        self._memory = memory
        self._forget_after = forget_after
        self._ranges: dict[int, deque[tuple[int, float]]] = {}
        self._last_seen: dict[int, int] = {}
        self._steps = 0
        self._knots: list[tuple[float, float]] = []

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step over so many positions took so many seconds. Steps that mostly prefill should be left out: their
        positions cost as much but say little about the range where the choice is made. Nonsense is ignored."""
        if num_tokens < 1 or not 0.0 < seconds < float("inf"):
            return
        self._steps += 1
        number = _range_number(num_tokens)
        self._ranges.setdefault(number, deque(maxlen=self._memory)).append((num_tokens, seconds))
        self._last_seen[number] = self._steps
        for old in [n for n, seen in self._last_seen.items() if self._steps - seen > self._forget_after]:
            del self._ranges[old], self._last_seen[old]
        self._knots = self._fit()

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """Predicted seconds of a step, above 0. A `step_cost` for `choose_verify_lengths`: `num_rows` is taken to fit
        that signature; what a step costs is governed by its positions."""
        knots = self._knots
        if not knots:
            return _UNKNOWN_S
        right = bisect_left(knots, (num_tokens, 0.0))
        if right == 0 or len(knots) == 1:
            return knots[0][1]
        right = min(right, len(knots) - 1)
        (x0, y0), (x1, y1) = knots[right - 1], knots[right]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)

    def seen(self, num_tokens: int) -> int:
        """Steps of about so many positions that the model remembers."""
        return len(self._ranges.get(_range_number(num_tokens), ()))

    @property
    def num_ranges(self) -> int:
        """Ranges with observations; from 2 on the model can tell lengths apart."""
        return len(self._ranges)

    def _fit(self) -> list[tuple[float, float]]:
        numbers = sorted(self._ranges)
        counts = [fmean(tokens for tokens, _ in self._ranges[number]) for number in numbers]
        costs = [median(seconds for _, seconds in self._ranges[number]) for number in numbers]
        weights = [len(self._ranges[number]) for number in numbers]
        return list(zip(counts, isotonic(costs, weights), strict=True))


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, float(weight), 1
        while blocks and blocks[-1][0] >= mean:
            previous, previous_total, previous_length = blocks.pop()
            mean = (mean * total + previous * previous_total) / (total + previous_total)
            total, length = total + previous_total, length + previous_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


def _range_number(num_tokens: int) -> int:
    """Ranges 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ...: two per doubling."""
    octave = (num_tokens - 1).bit_length()
    upper_half = 4 * num_tokens > 3 * 2**octave
    return 2 * octave + int(upper_half)
