"""The learned cost of a step never falls, is optimistic, and forgets; its points do not."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.step_cost import StepCost, ends_of, range_number

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
@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(2))
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
    assert (np.diff(cost.curve(100, 800)) >= 0.0).all(), "it never falls"
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


def test_points_are_those_of_the_whole_run() -> None:
    """At the end of a rollout few requests run for many steps."""
    cost = trained((4, 0.1), (64, 9.0))
    for _ in range(FORGET + 4):
        cost.record(4, 0.1)
    assert cost.points() == [(4.0, pytest.approx(0.1)), (64.0, pytest.approx(9.0))] and StepCost().points() == []


@pytest.mark.parametrize("nonsense", [(0, 0.1), (-3, 0.1), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))])
def test_nonsense_is_ignored(nonsense: tuple[int, float]) -> None:
    cost = trained(nonsense)
    assert not cost.is_known and seconds(cost, 1, 9) == [1.0, 1.0]
