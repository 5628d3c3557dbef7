"""Cost models: the fit, which model predicts held-out points, interpolation over window and context."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.errors import InputError
from specactor_ray.speculation.costs import CostPoint, CostTable, fit_batch_cost

SECONDS = st.floats(1e-4, 10.0)
COEFFICIENTS = st.floats(0.0, 1.0)
KNOTS = st.dictionaries(st.integers(1, 256), SECONDS, min_size=2, max_size=6).map(lambda d: sorted(d.items()))


def grid(seconds, devices=(1,), windows=(0, 4), contexts=(64, 512), batches=(1, 4, 16)) -> list[CostPoint]:
    axes = itertools.product(devices, windows, contexts, batches)
    return [CostPoint(g, w, c, b, seconds(g, w, c, b)) for g, w, c, b in axes]


def squared_relative_errors(knots, slope, intercept) -> float:
    return sum(((slope * b + intercept) / y - 1.0) ** 2 for b, y in knots)


class TestFit:
    @given(COEFFICIENTS, st.floats(1e-4, 1.0), st.sets(st.integers(1, 64), min_size=2, max_size=5))
    def test_a_line_is_found_again(self, slope: float, intercept: float, batches: set[int]) -> None:
        cost = fit_batch_cost([(b, slope * b + intercept) for b in batches])
        for b in (*batches, 100):
            assert cost.linear(b) == pytest.approx(slope * b + intercept, rel=1e-5)

    @given(KNOTS, st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)), min_size=20, max_size=20))
    def test_no_other_line_with_coefficients_of_0_or_more_is_nearer(self, knots, factors) -> None:
        cost = fit_batch_cost(knots)
        assert cost.slope >= 0.0 and cost.intercept >= 0.0
        least = squared_relative_errors(knots, cost.slope, cost.intercept)
        largest_slope = max(y / b for b, y in knots)
        largest_intercept = max(y for _, y in knots)
        others = [(cost.slope * s, cost.intercept * i) for s, i in factors]
        others += [(largest_slope * s, largest_intercept * i) for s, i in factors]
        for slope, intercept in others:
            assert least <= squared_relative_errors(knots, slope, intercept) * (1 + 1e-9) + 1e-12

    def test_one_batch_is_a_constant(self) -> None:
        assert fit_batch_cost([(4, 0.25)]).linear(9) == 0.25


class TestWhichModel:
    def test_a_line_is_used_where_it_fits(self) -> None:
        fit = CostTable(grid(lambda g, w, c, b: 0.01 * b + 0.05)).fits[1]
        assert fit.kind == "linear" and fit.max_error < 1e-9 and fit.words.startswith("a line fits")

    def test_interpolation_is_used_where_a_line_misses(self) -> None:
        """Flat up to a batch of 8, then proportional, as when a weight-bound step becomes compute-bound."""
        batches = (1, 2, 4, 8, 16, 32, 64)
        table = CostTable(grid(lambda g, w, c, b: 0.1 * max(b, 8), batches=batches))
        fit = table.fits[1]
        assert fit.kind == "interpolated" and "a line does not fit well" in fit.words
        assert fit.held_out_interpolated is not None and fit.held_out_linear is not None
        assert fit.held_out_interpolated < fit.held_out_linear
        for batch in batches:
            assert table.seconds(1, batch, 64) == pytest.approx(0.1 * max(batch, 8))
        assert table.seconds(1, 12, 64) == pytest.approx(1.2)
        assert table.seconds(1, 128, 64) > table.seconds(1, 64, 64)

    def test_three_batches_cannot_tell_by_holding_out(self) -> None:
        """The inner batch is then predicted by the same line; how well all points are described decides."""
        bent = CostTable(grid(lambda g, w, c, b: 0.1 * max(b, 8), batches=(1, 8, 64))).fits[1]
        assert bent.held_out_linear == pytest.approx(bent.held_out_interpolated)
        assert bent.kind == "interpolated" and bent.words.endswith("interpolation is used")
        assert CostTable(grid(lambda g, w, c, b: 0.1 * b + 0.05)).fits[1].kind == "linear"

    def test_two_batches_cannot_tell(self) -> None:
        fit = CostTable(grid(lambda g, w, c, b: 0.1 * b, batches=(1, 8))).fits[1]
        assert fit.kind == "linear" and fit.held_out_linear is None and "a third would tell" in fit.words


class TestBetweenMeasured:
    table = CostTable(grid(lambda g, w, c, b: b * (0.01 + 0.002 * w) + 0.05 + 1e-4 * c, windows=(0, 1, 2, 4, 8)))

    @given(st.integers(0, 8), st.floats(64, 512), st.integers(1, 40))
    def test_windows_and_contexts_are_interpolated(self, window: int, context: float, batch: int) -> None:
        expected = batch * (0.01 + 0.002 * window) + 0.05 + 1e-4 * context
        assert self.table.seconds(1, batch, context, window) == pytest.approx(expected)
        slope, intercept = self.table.line(1, context, window)
        assert batch * slope + intercept == pytest.approx(expected)

    def test_beyond_the_contexts_the_nearest_counts(self) -> None:
        assert self.table.seconds(1, 4, 9000, 2) == self.table.seconds(1, 4, 512, 2)
        assert self.table.seconds(1, 4, 0, 2) == self.table.seconds(1, 4, 64, 2)

    def test_windows_and_devices_that_were_not_measured(self) -> None:
        with pytest.raises(ValueError, match="window 9 is outside the measured 0 to 8"):
            self.table.seconds(1, 4, 64, 9)
        with pytest.raises(KeyError):
            self.table.seconds(2, 4, 64, 1)


class TestRefused:
    def test_a_hole_in_the_grid_is_named(self) -> None:
        points = grid(lambda g, w, c, b: 1.0)
        missing = next(p for p in points if (p.window, p.context, p.batch) == (4, 512, 16))
        points.remove(missing)
        with pytest.raises(InputError, match=r"batch 16 at 1 device\(s\), window 4, context 512 is missing"):
            CostTable(points)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_times_that_cannot_be(self, seconds: float) -> None:
        with pytest.raises(InputError, match="not a cost that can have been measured"):
            CostTable(grid(lambda g, w, c, b: seconds))

    def test_no_points(self) -> None:
        with pytest.raises(InputError, match="no costs were measured"):
            CostTable([])
