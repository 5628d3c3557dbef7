"""Each choice of the policy beside all alternatives: verify lengths, tails, rounds, the ladder. Plans of Algorithm 1:
`tests/unit/plan/test_search.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from specactor_ray.verify import _kernels
from specactor_ray.verify.policy import Drafter
from tests.unit.verify.test_policy import MODEL, WINDOW, Bench, chosen, gained, spec_of, step_cost


def frontier(p: np.ndarray, supply: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The most expected tokens by total number of draft tokens, over all seats and lengths of all rows."""
    most = np.array([float(len(room))])
    for row, limit in enumerate(room.tolist()):
        lengths = np.minimum(supply[:, row], limit).tolist()
        gains = [
            max(gained(c, n) for c, m in zip(p[:, row], lengths, strict=True) if m >= n)
            for n in range(max(lengths) + 1)
        ]
        longer = np.full(len(most) + len(gains) - 1, -np.inf)
        for length, gain in enumerate(gains):
            part = longer[length : length + len(most)]
            np.maximum(part, most + gain, out=part)
        most = longer
    return most


def some_rows(rng: np.random.Generator, seats: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chances and tokens of the tails, and room, of up to 8 rows."""
    rows = int(rng.integers(1, 9))
    p = (
        rng.uniform(0.02, 1.0, (seats, rows))
        if rng.random() < 0.7
        else rng.choice([0.5, 0.9, 0.99, 1.0], (seats, rows))
    )
    return p, rng.integers(0, 9, (seats, rows)).astype(np.int32), rng.integers(0, 9, rows).astype(np.int32)


def smooth(rng: np.random.Generator, count: int) -> np.ndarray:
    """Positions that cost the same or ever more, or have a bend."""
    positions, bend = np.arange(count), rng.integers(1, count + 1)
    slope = 10 ** rng.uniform(-4, -0.5)
    curve: np.ndarray = 0.05 + slope * positions ** rng.uniform(1.0, 1.5)
    return curve if rng.random() < 0.5 else 0.05 + slope * (0.02 * positions + np.maximum(positions - bend, 0))


def stairs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Steps of any width and height."""
    rises = 10 ** rng.uniform(-3, 0, count) * (rng.random(count) < rng.uniform(0.05, 0.5))
    curve: np.ndarray = 1.0 + np.cumsum(rises)
    return curve


@pytest.mark.parametrize(
    ("seats", "curve_of", "mean", "worst"),
    [
        (1, smooth, 0.99999, 0.9998),
        (1, stairs, 0.99999, 0.9998),
        (3, smooth, 0.99999, 0.998),
        (3, stairs, 0.9999, 0.98),
    ],
)
def test_no_other_tails_and_lengths_commit_more_per_second(
    seats: int, curve_of: Callable[[np.random.Generator, int], np.ndarray], mean: float, worst: float
) -> None:
    """1,000 cases of up to 8 rows. Below 1: gains are told apart to 1/256 where a stair cuts them, and a row with
    several tails takes whole segments of their hull."""
    ratios = []
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        p, supply, room = some_rows(rng, seats)
        best = frontier(p, supply, room)
        curve = curve_of(rng, len(best))
        rate, chose, lengths = chosen(p, supply, room, curve)
        tokens = float(len(room))
        for row, (seat, length) in enumerate(zip(chose, lengths, strict=True)):
            assert length <= min(supply[seat, row], room[row]) if seat >= 0 else length == 0
            tokens += gained(p[seat, row], length)
        assert rate == pytest.approx(tokens / curve[sum(lengths)])
        ratios.append(rate / (best / curve).max())
    assert np.mean(ratios) >= mean and np.min(ratios) >= worst


@pytest.mark.parametrize("curve_of", [smooth, stairs])
def test_no_other_number_of_rounds_commits_more_per_second(
    curve_of: Callable[[np.random.Generator, int], np.ndarray],
) -> None:
    """200 cases. Each round costs the drafters that still have a tail to lengthen, so an idle one costs nothing."""
    for seed in range(200):
        rng, most = np.random.default_rng(seed), 6
        p, supply, room = some_rows(rng, seats=3)
        windows = rng.integers(0, most + 1, (3, 1)) * (rng.random(supply.shape) < 0.6)
        longest = np.maximum(supply, windows).astype(np.int32)
        curve, token_s = curve_of(rng, 8 * len(room) + 1), 10 ** rng.uniform(-3, -0.5, 3)
        rates, seconds = list[float](), 0.0
        for number in range(most + 1):
            grown = np.minimum(supply + number, longest)
            if number:
                seconds += float(token_s @ (grown > np.minimum(supply + number - 1, longest)).any(axis=1))
            best = frontier(p, grown, room)
            rates.append(float((best / (curve[: len(best)] + seconds)).max()))
        found = _kernels.best_rounds(p, supply, longest, room, curve, token_s, most, 1.0)
        assert rates[found] >= 0.99 * max(rates)


def test_a_model_without_requests_costs_nothing() -> None:
    """Its place is the first or the second; it is slow, and its pace may be unknown."""
    alone = Bench(MODEL)
    assert alone.rounds > 0
    for token_s in (0.0, 10.0):
        for place in (0, 1):
            idle = replace(MODEL, drafter_id="i", spec=spec_of("draft_model", 16), token_s=token_s)
            bench = Bench(*((idle, MODEL) if place == 0 else (MODEL, idle)))
            for row in bench.rows.tolist():
                bench.table.release(place, row)
            assert bench.rounds == alone.rounds
            bench.table.assign(place, int(bench.rows[0]))
            assert bench.rounds == (min(alone.rounds, 3) if token_s == 0.0 else 0), "with one it costs a whole round"


def test_the_ladder_orders_models_by_the_equation_of_the_mode() -> None:
    """200 pairs of models, in turns with the verifier or apart, each model at its best window by plain loops."""
    rng = np.random.default_rng(0)
    for number in range(100):
        rows, base_s, position_s = int(rng.choice([1, 4, 16])), 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-6, -3)
        chances, paces = rng.uniform(0.05, 0.99, 2), base_s * 10 ** rng.uniform(-2, 0, 2)
        for hosted in (True, False):
            models = [
                Drafter(method, spec_of(method), token_s=pace, hosted=hosted)
                for method, pace in zip(("eagle", "draft_model"), paces.tolist(), strict=True)
            ]
            bench = Bench(*models, rows=1, cost=step_cost(base_s, position_s))
            bench.policy.rows = rows
            verify_s = bench.policy.cost.curve(rows, rows * WINDOW)[::rows].tolist()
            rate_of = coupled_rate if hosted else decoupled_rate
            expected, found = [], []
            for model, p in zip(models, chances.tolist(), strict=True):
                rates = [rate_of(p, window, model.token_s, verify_s) for window in range(1, WINDOW + 1)]
                expected.append(max(1.0 / verify_s[0], *rates))
                found.append(float(bench.policy.predict(model.spec.method, np.array([p]))[0]))
            assert found == pytest.approx(expected), number


def coupled_rate(p: float, window: int, draft_s: float, verify_s: list[float]) -> float:
    """Drafting and verifying one after the other; right tokens until the first wrong one, and the target's own."""
    tokens = sum(p**i * (1 - p) * (i + 1) for i in range(window)) + p**window * (window + 1)
    return tokens / (window * draft_s + verify_s[window])


def decoupled_rate(p: float, window: int, draft_s: float, verify_s: list[float]) -> float:
    """Side by side: steps with a tail, each of which is refuted or not, also by the token after it, and a step without
    one after each refuted tail."""
    share = 0.5  # of steps with a tail
    for _ in range(60):
        share = (share + share * p ** (window + 1) + (1.0 - share)) / 2
    seconds = share * verify_s[window] + (1.0 - share) * verify_s[0]
    return (1.0 + share * gained(p, window)) / max(seconds, (window + 1) * draft_s)
