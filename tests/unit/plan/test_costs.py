"""Costs: grids are exact where it was measured; the learned cost of a step never falls, is optimistic, and forgets."""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.errors import InputError
from specactor_ray.plan.costs import CostPoint, GridCost, StepCost, cost_grids, ends_of, range_number

# ---- grids ----


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


def test_a_hole_in_the_grid_is_named() -> None:
    points = [point for point in grid(lambda g, w, c, b: 0.1 * b) if (point.window, point.batch) != (4, 16)]
    with pytest.raises(InputError, match="the step of 16 rows, 5 positions and 64 tokens is missing"):
        cost_grids(points)


AXIS = st.lists(st.integers(1, 50), min_size=1, max_size=3, unique=True)


@given(axes=st.tuples(AXIS, AXIS, AXIS), noise=st.randoms(use_true_random=False), data=st.data())
def test_more_work_never_costs_less_on_noisy_grids(
    axes: tuple[list[int], ...], noise: random.Random, data: st.DataObject
) -> None:
    table = GridCost({point: 0.1 + noise.random() for point in itertools.product(*axes)})
    low = [data.draw(st.integers(1, 400)) for _ in range(3)]
    high = [value + data.draw(st.integers(0, 400)) for value in low]
    (r0, p0, c0), (r1, p1, c1) = low, high
    assert table.seconds(r0, r0 * p0, r0 * c0) <= table.seconds(r1, r1 * p1, r1 * c1) * (1 + 1e-9)


def test_a_prompt_position_costs_as_much_as_one_of_the_largest_step() -> None:
    table = GridCost(
        {(r, p, c): 0.005 + 1e-5 * r * p + 1e-8 * r * c for r in (1, 8) for p in (1, 4) for c in (512, 4096)}
    )
    step_s = table.seconds(8, 32, 8 * 4096)
    assert table.seconds(8, 32, 8 * 4096, 320) == pytest.approx(step_s * 11)
    assert table.seconds(0, 0, 0, 320) == pytest.approx(step_s * 10)


# ---- learned ----


FORGET = 256


def seconds(cost: StepCost, *counts: int) -> list[float]:
    return [float(cost.curve(count, 0)[0]) for count in counts]


def trained(*observations: tuple[int, float], repeats: int = 8) -> StepCost:
    cost = StepCost()
    for _ in range(repeats):
        for count, took in observations:
            cost.record(count, took)
    return cost


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10.0)), max_size=80), st.integers(1, 40))
def test_predictions_are_positive_and_never_fall(observations: list[tuple[int, float]], rows: int) -> None:
    cost = trained(*observations, repeats=1)
    curve = cost.curve(rows, 400)
    assert len(curve) == 401 and (curve > 0).all() and np.isfinite(curve).all()
    assert (np.diff(curve) >= -1e-12).all()
    assert curve.max() <= max([took for _, took in observations], default=1.0) * (1 + 1e-9)


def test_a_straight_line_is_learned_between_what_was_seen() -> None:
    cost = trained(*((count, 0.01 + 0.002 * count) for count in (1, 4, 11, 40)))
    known = (1, 4, 8, 11, 30, 40)
    assert seconds(cost, *known) == pytest.approx([0.01 + 0.002 * count for count in known])
    assert cost.curve(4, 7)[[0, 4, 7]] == pytest.approx(seconds(cost, 4, 8, 11))


def test_of_the_unknown_the_best_is_hoped_for() -> None:
    cost = StepCost()
    assert not cost.is_known
    cost.record(16, 0.4)
    assert cost.is_known
    assert seconds(cost, 17, 1000) == pytest.approx([0.4, 0.4]), "longer steps cost nothing more"
    assert seconds(cost, 8, 4) == pytest.approx([0.2, 0.1]), "shorter ones their share"


def test_ranges_follow_each_other() -> None:
    numbers = [range_number(count) for count in range(1, 4097)]
    assert numbers == sorted(numbers) and all(
        first <= count <= last for count, number in enumerate(numbers, 1) for first, last in [ends_of(number)]
    )


TILE = 0.006


@pytest.mark.parametrize(("tile_s", "position_s"), [(TILE, 0.0), (TILE, 1e-5), (0.0, TILE / 128)])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_stairs_are_kept_and_noise_is_none(tile_s: float, position_s: float, noise: float, seed: int) -> None:
    """Steps of 100 to 900 positions: whole tiles of 128, or a line."""
    rng, cost = random.Random(seed), StepCost()

    def true(count: float) -> float:
        return 0.03 + tile_s * -(-count // 128) + position_s * count

    for _ in range(3000):
        count = rng.randint(129, 900)
        cost.record(count, true(count) * rng.gauss(1.0, noise))
    for edge in (256, 384, 512, 640, 768):
        here, beyond = seconds(cost, edge, edge + 1)
        assert beyond - here > 0.5 * tile_s if tile_s else beyond - here < 0.25 * TILE + position_s
    errors = [abs(here - true(count)) for count, here in zip(range(150, 890), cost.curve(150, 739), strict=True)]
    assert statistics.mean(errors) < (0.15 + 10 * noise) * TILE


def test_interrupted_steps_hardly_move_it() -> None:
    rng, cost = random.Random(1), trained((8, 0.01))
    highest = 0.0
    for _ in range(400):
        cost.record(8, 5.0 if rng.random() < 0.05 else 0.01)
        highest = max(highest, *seconds(cost, 8))
    assert highest < 0.03


def test_a_change_for_good_is_followed() -> None:
    cost = trained((8, 0.01))
    for _ in range(60):
        cost.record(8, 0.05)
    assert seconds(cost, 8) == pytest.approx([0.05], rel=0.01)


@pytest.mark.parametrize(("later", "forgotten"), [(FORGET - 4, False), (FORGET + 4, True)])
def test_what_was_not_seen_for_long_is_forgotten(later: int, forgotten: bool) -> None:
    cost = trained((4, 0.1), (64, 9.0))
    for _ in range(later):
        cost.record(4, 0.1)
    assert seconds(cost, 64) == pytest.approx([0.1 if forgotten else 9.0])
    cost.record(64, 0.2)
    assert (seconds(cost, 64) == pytest.approx([0.2])) == forgotten, "what comes back begins anew"


@pytest.mark.parametrize("nonsense", [(0, 0.1), (-3, 0.1), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))])
def test_nonsense_is_ignored(nonsense: tuple[int, float]) -> None:
    cost = trained(nonsense)
    assert not cost.is_known and seconds(cost, 1, 9) == [1.0, 1.0]
