"""Verify lengths against brute force, the step cost model, and the wait rule."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.speculation.acceptance import expected_accepted
from specactor_ray.speculation.step_cost import StepCostModel, isotonic
from specactor_ray.speculation.window import VerifyCandidate, choose_verify_lengths, choose_wait_s

candidates = st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 4)), min_size=1, max_size=4)
costs = st.lists(st.floats(0.01, 10.0), min_size=21, max_size=21)


@settings(max_examples=200, deadline=None)
@given(candidates, costs)
def test_no_other_choice_commits_more_per_second(rows: list[tuple[float, int]], cost: list[float]) -> None:
    """Any cost curve at all, also one that falls."""
    named = [VerifyCandidate(str(number), p, supply) for number, (p, supply) in enumerate(rows)]

    def ratio(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + expected_accepted(row.probability, n) for row, n in zip(named, lengths, strict=True))
        return tokens / cost[len(named) + sum(lengths)]

    chosen = choose_verify_lengths(named, lambda rows, tokens: cost[tokens])
    assert list(chosen) == [row.request_id for row in named]
    lengths = tuple(chosen.values())
    assert all(0 <= n <= row.supply for n, row in zip(lengths, named, strict=True))
    best = max(ratio(other) for other in product(*(range(row.supply + 1) for row in named)))
    assert ratio(lengths) == pytest.approx(best, rel=1e-9)


def test_free_positions_take_all_and_dear_ones_none() -> None:
    rows = [("a", 0.9, 4), ("b", 0.2, 4), ("c", 0.0, 4), ("d", 1.0, 3), ("e", 0.5, 0)]
    assert choose_verify_lengths(rows, lambda r, n: 1.0) == {"a": 4, "b": 4, "c": 0, "d": 3, "e": 0}
    assert set(choose_verify_lengths(rows, lambda r, n: float(n) ** 3).values()) == {0}
    assert choose_verify_lengths([], lambda r, n: 1.0) == {}
    assert choose_verify_lengths(rows, lambda r, n: 0.0)["a"] == 4, "a cost of zero divides nothing"


def test_the_better_request_gets_the_positions() -> None:
    def cost(rows: int, tokens: int) -> float:
        return 1.0 if tokens <= 6 else 100.0

    chosen = choose_verify_lengths([("good", 0.9, 8), ("bad", 0.3, 8)], cost)
    assert chosen == {"good": 4, "bad": 0}


def trained(cost, counts, repeats: int = 9) -> StepCostModel:
    model = StepCostModel()
    for _ in range(repeats):
        for count in counts:
            model.record(count, cost(count))
    return model


def test_a_straight_line_is_learned_and_carried_on() -> None:
    model = trained(lambda n: 0.01 + 0.002 * n, [1, 2, 3, 4, 6, 12, 24])
    for count in (1, 2, 5, 9, 20, 24, 48, 96):
        assert model.seconds(1, count) == pytest.approx(0.01 + 0.002 * count)


def test_interrupted_steps_do_not_move_it() -> None:
    generator, model = random.Random(1), StepCostModel()
    for _ in range(400):
        count = generator.choice([1, 4, 8, 16])
        seconds = 0.01 + 0.001 * count
        model.record(count, seconds * (50.0 if generator.random() < 0.1 else 1.0))
    for count in (1, 4, 8, 16):
        assert model.seconds(1, count) == pytest.approx(0.01 + 0.001 * count)


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(1e-4, 10.0)), max_size=60))
def test_predictions_are_positive_and_never_fall(observations: list[tuple[int, float]]) -> None:
    model = StepCostModel(memory=3, forget_after=20)
    for count, seconds in observations:
        model.record(count, seconds)
    predictions = [model.seconds(1, count) for count in range(1, 140)]
    assert all(later >= earlier * (1 - 1e-9) > 0 for earlier, later in pairwise(predictions))


def test_explores_before_it_can_tell_lengths_apart() -> None:
    model = StepCostModel()
    rows = [("a", 0.3, 8)]
    assert choose_verify_lengths(rows, model.seconds) == {"a": 8}
    model.record(1, 0.1)
    assert model.num_ranges == 1
    assert choose_verify_lengths(rows, model.seconds) == {"a": 8}
    model.record(9, 10.0)
    assert choose_verify_lengths(rows, model.seconds) == {"a": 0}


def test_a_slow_spell_is_forgotten() -> None:
    model = StepCostModel(forget_after=50)
    model.record(1, 0.1)
    model.record(9, 10.0)
    for _ in range(50):
        model.record(1, 0.1)
    assert model.seconds(1, 9) == pytest.approx(10.0)
    model.record(1, 0.1)
    assert model.seconds(1, 9) == pytest.approx(0.1)


def test_nonsense_observations_are_ignored() -> None:
    model = StepCostModel()
    for count, seconds in ((0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
        model.record(count, seconds)
    assert model.num_ranges == 0
    with pytest.raises(ValueError, match="memory"):
        StepCostModel(memory=0)


def test_ranges_have_two_bounds_per_doubling() -> None:
    model = StepCostModel(memory=1000)
    upper_bounds = []
    for count in range(1, 65):
        before = model.num_ranges
        model.record(count, 1.0)
        if model.num_ranges > before and count > 1:
            upper_bounds.append(count - 1)
    assert upper_bounds == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=8))
def test_isotonic_is_the_nearest_rising_sequence(points: list[tuple[float, int]]) -> None:
    values, weights = [v for v, _ in points], [w for _, w in points]
    fitted = isotonic(values, weights)
    assert all(b >= a - 1e-9 for a, b in pairwise(fitted))
    # The max-min formula of isotonic regression, an independent way to the same answer.
    for i, fit in enumerate(fitted):
        averages = [
            min(sum(v * w for v, w in points[a : b + 1]) / sum(weights[a : b + 1]) for b in range(i, len(points)))
            for a in range(i + 1)
        ]
        assert fit == pytest.approx(max(averages), abs=1e-9)


def test_waiting_pays_up_to_the_extra_tokens_times_the_time_of_a_token() -> None:
    extra, now, step = 3.0, 16.0, 0.08
    wait = choose_wait_s(extra, now, step, cap_s=1.0, share=1.0)
    assert (now + extra) / (step + wait) == pytest.approx(now / step), "break-even"
    assert choose_wait_s(extra, now, step, cap_s=1.0) == pytest.approx(wait / 2)
    assert choose_wait_s(extra, now, step) <= 0.020
    assert choose_wait_s(100.0, 1.0, 1.0) == 0.020


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (float("nan"), 1.0, 1.0)])
def test_nothing_known_means_no_wait(arguments: tuple[float, float, float]) -> None:
    assert choose_wait_s(*arguments) == 0.0
