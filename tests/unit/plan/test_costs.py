"""Cost grids: exact where it was measured, lines between, what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.errors import InputError
from specactor_ray.plan.costs import CostPoint, cost_grids


def grid(seconds, devices=(1,), windows=(0, 4), contexts=(64, 512), batches=(1, 4, 16)) -> list[CostPoint]:
    axes = itertools.product(devices, windows, contexts, batches)
    return [CostPoint(g, w, c, b, seconds(g, w, c, b)) for g, w, c, b in axes]


class TestBetweenMeasured:
    table = cost_grids(grid(lambda g, w, c, b: b * (0.01 + 0.002 * w) + 0.05 + 1e-4 * c, windows=(0, 1, 2, 4, 8)))

    @given(st.integers(0, 8), st.floats(64, 512), st.integers(1, 40))
    def test_windows_and_contexts_are_interpolated(self, window: int, context: float, batch: int) -> None:
        expected = batch * (0.01 + 0.002 * window) + 0.05 + 1e-4 * context
        assert self.table[1].step(batch, context, window) == pytest.approx(expected)

    def test_beyond_the_measured_lines_go_on_and_below_it_the_nearest_counts(self) -> None:
        assert self.table[1].step(4, 9000, 2) == pytest.approx(4 * 0.014 + 0.05 + 0.9)
        assert self.table[1].step(4, 0, 2) == self.table[1].step(4, 64, 2)

    def test_a_bend_is_followed(self) -> None:
        """Flat up to a batch of 8, then proportional, as when a weight-bound step becomes compute-bound."""
        table = cost_grids(grid(lambda g, w, c, b: 0.1 * max(b, 8), batches=(1, 2, 4, 8, 16, 32, 64)))
        for batch, rows in ((1, 8), (5, 8), (8, 8), (12, 12), (64, 64), (128, 128)):
            assert table[1].step(batch, 64) == pytest.approx(0.1 * rows)


class TestRefused:
    def test_a_hole_in_the_grid_is_named(self) -> None:
        """Where large steps are missing, which may not have fitted the memory, the line goes on."""
        points = grid(lambda g, w, c, b: 0.1 * b)
        large, small = (next(p for p in points if (p.window, p.context, p.batch) == (4, 512, b)) for b in (16, 1))
        points.remove(large)
        assert cost_grids(points)[1].step(16, 512, 4) == pytest.approx(1.6)
        points.remove(small)
        with pytest.raises(InputError, match="the step of 1 rows, 5 positions and 512 tokens is missing"):
            cost_grids(points)
