"""The plan: the search against the written algorithm, and what must always hold."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.schema import ModeName
from specactor_ray.errors import InputError
from specactor_ray.spec.tgs import geometric
from specactor_ray.speculation.costs import CostPoint, CostTable
from specactor_ray.speculation.plan import DraftCosts, search_plan
from specactor_ray.speculation.survival import Survival, survival_from_counts

PROBABILITIES = st.one_of(st.sampled_from([0.0, 1.0, 1e-300, 1 - 2**-53, 0.5]), st.floats(0.0, 1.0))


def written_sum(p: float, window: int, *, decoupled: bool) -> Fraction:
    """τ(w) as design section 6 writes it, in exact arithmetic."""
    exact = Fraction(p)
    total = Fraction(0)
    for a in range(window):
        total += exact**a * (1 - exact) * (a + 1) / (2 if decoupled else 1)
    return total + exact**window * (window if decoupled else window + 1)


class TestSurvival:
    @given(st.floats(1e-3, 1.0), st.integers(1, 12))
    def test_geometric_survival_gives_its_p_at_every_window(self, p: float, depth: int) -> None:
        survival = Survival(tuple(p**i for i in range(1, depth + 1)))
        for window in range(1, depth + 5):
            assert survival.probability(window) == pytest.approx(p, rel=1e-9)
            assert survival.within(window) == pytest.approx(geometric(np.array([p]), window)[0], rel=1e-9)

    def test_measured_rates_are_taken_as_they_are(self) -> None:
        survival = Survival((0.5, 0.4, 0.0))
        assert survival.within(2).tolist() == [1.0, 0.5, 0.4]
        assert survival.within(5).tolist() == [1.0, 0.5, 0.4, 0.0, 0.0, 0.0]
        assert survival.probability(2) == pytest.approx(0.9 / 1.5)

    def test_from_counts(self) -> None:
        assert survival_from_counts([10, 8, 0], [5, 2, 0]).rates == (0.5, 0.25)
        assert survival_from_counts([10, 2], [5, 2]).rates == (0.5, 0.5)
        with pytest.raises(InputError, match="no draft could be held against"):
            survival_from_counts([0, 0], [0, 0])

    @pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.1,), (0.5, -0.1), (float("nan"),)])
    def test_refused(self, rates: tuple[float, ...]) -> None:
        with pytest.raises(InputError, match="no survival rates"):
            Survival(rates)


WINDOWS, BATCHES, CONTEXT = (0, 1, 3, 6), (1, 32), 64


def table(slopes: dict[int, float], intercept: float, windows=(0,), per_token: float = 0.0) -> CostTable:
    """A linear cost whose price per draft token is `per_token` per request."""
    return CostTable(
        CostPoint(g, w, CONTEXT, b, b * (slope + per_token * w) + intercept / g)
        for g, slope in slopes.items()
        for w in windows
        for b in BATCHES
    )


@st.composite
def problems(draw: st.DrawFn) -> dict:
    costs = st.floats(1e-4, 0.1)
    verifiers = draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))
    drafters = draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))
    methods = draw(st.lists(st.sampled_from(["ngram", "draft_model", "eagle"]), min_size=1, max_size=2, unique=True))
    verify = table({g: draw(costs) for g in sorted(verifiers)}, draw(costs), WINDOWS, draw(st.floats(0.0, 0.05)))
    drafting = {
        method: DraftCosts(table({g: draw(costs) for g in sorted(drafters)}, draw(costs)), draw(st.booleans()))
        for method in methods
    }
    acceptance = {method: Survival((draw(st.floats(0.0, 1.0)),)) for method in methods}
    return {
        "verify": verify,
        "drafting": drafting,
        "acceptance": acceptance,
        "devices": draw(st.integers(max(1, min(verifiers)), 9)),
        "requests": draw(st.integers(1, 40)),
        "context": CONTEXT,
        "round_trip_s": draw(st.sampled_from([None, 0.0, 0.003])),
    }


def brute_force(problem: dict) -> list[tuple[float, tuple]]:
    """Algorithm 1, written down a second time, with none of the code under test but the fitted costs."""
    verify: CostTable = problem["verify"]
    G, B = problem["devices"], problem["requests"]
    found = []
    for g_v in verify.devices:
        if g_v <= G:
            b = math.ceil(g_v * B / G)
            speed = min(B, (G // g_v) * b) / verify.seconds(g_v, b, CONTEXT, 0)
            found.append((speed, ("plain", None, 0, g_v, 0)))
        for method, costs in problem["drafting"].items():
            p = problem["acceptance"][method].rates[0]
            layouts = [("coupled", 0, g_v)]
            layouts += [("decoupled", g, g) for g in range(1, g_v + 1)] if not costs.free else [("decoupled", 0, 0)]
            for mode, g_d, on in layouts:
                on = costs.table.devices[0] if costs.free else on
                if g_v + g_d > G or on not in costs.table.devices:
                    continue
                b = math.ceil((g_v + g_d) * B / G)
                D = costs.table.seconds(on, b, CONTEXT)
                for w in range(1, WINDOWS[-1] + 1):
                    V = verify.seconds(g_v, b, CONTEXT, w)
                    if mode == "coupled":
                        speed = float(written_sum(p, w, decoupled=False)) / (w * D + V)
                    else:
                        speed = float(written_sum(p, w, decoupled=True)) / max(w * D, V)
                        round_trip_s = problem["round_trip_s"]
                        if round_trip_s is not None and (wait := w * D + round_trip_s) <= 0.020:
                            speed = max(speed, float(written_sum(p, w, decoupled=False)) / (wait + V))
                    found.append((min(B, (G // (g_v + g_d)) * b) * speed, (mode, method, g_d, g_v, w)))
    return found


class TestSearch:
    @settings(max_examples=60)
    @given(problems())
    def test_equal_to_brute_force(self, problem: dict) -> None:
        plan, expected = search_plan(**problem), brute_force(problem)
        got = {
            (c.mode.value, c.method, c.draft_devices, c.verify_devices, c.window): c.tokens_per_s
            for c in plan.candidates
        }
        assert got.keys() == {key for _, key in expected}
        for speed, key in expected:
            assert got[key] == pytest.approx(speed, rel=1e-9)
        assert plan.chosen.tokens_per_s == pytest.approx(max(speed for speed, _ in expected), rel=1e-9)

    @settings(max_examples=60)
    @given(problems())
    def test_never_below_plain_and_never_more_than_there_is(self, problem: dict) -> None:
        plan = search_plan(**problem)
        plain = [c.tokens_per_s for c in plan.candidates if c.mode is ModeName.plain]
        assert plain and plan.chosen.tokens_per_s >= max(plain)
        for c in plan.candidates:
            assert c.groups * (c.draft_devices + c.verify_devices) <= problem["devices"]
            assert 1 <= c.batch <= problem["requests"]
            running = min(problem["requests"], c.groups * c.batch)
            assert c.tokens_per_s == pytest.approx(running * c.tokens_per_iteration / c.iteration_s)

    @settings(max_examples=60)
    @given(problems(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
    def test_monotone_in_p(self, problem: dict, one: float, other: float) -> None:
        low, high = sorted((one, other))
        speeds = []
        for p in (low, high):
            problem["acceptance"] = dict.fromkeys(problem["drafting"], Survival((p,)))
            speeds.append(search_plan(**problem).chosen.tokens_per_s)
        assert speeds[0] <= speeds[1] * (1 + 1e-12)

    @settings(max_examples=60)
    @given(problems())
    def test_every_layout_is_chosen_or_rejected_with_a_reason(self, problem: dict) -> None:
        plan = search_plan(**problem)
        rejected = {(r.mode, r.method, r.draft_devices, r.verify_devices) for r in plan.rejected}
        for g_v in problem["verify"].devices:
            layouts = [(ModeName.plain, None, 0, g_v)]
            for method, costs in problem["drafting"].items():
                layouts.append((ModeName.coupled, method, 0, g_v))
                drafters = [0] if costs.free else range(1, g_v + 1)
                layouts += [(ModeName.decoupled, method, g_d, g_v) for g_d in drafters]
            for layout in layouts:
                assert layout == plan.chosen.layout or layout in rejected
        assert all(r.reason for r in plan.rejected)

    def test_where_groups_divide_the_devices_the_order_is_that_of_tgs(self) -> None:
        plan = search_plan(**self.even(0.8))
        by_tgs = max(plan.candidates, key=lambda c: c.tgs)
        assert plan.chosen.tgs == by_tgs.tgs

    def test_p_0_gives_plain_and_p_1_gives_drafting(self) -> None:
        assert search_plan(**self.even(0.0)).chosen.mode is ModeName.plain
        assert search_plan(**self.even(1.0)).chosen.mode is not ModeName.plain

    @staticmethod
    def even(p: float) -> dict:
        return {
            "verify": table({1: 0.01, 2: 0.006}, 0.05, WINDOWS, 0.001),
            "drafting": {"draft_model": DraftCosts(table({1: 0.001, 2: 0.0008}, 0.004))},
            "acceptance": {"draft_model": Survival((p,))},
            "devices": 4,
            "requests": 16,
            "context": CONTEXT,
        }

    def test_a_decoupled_verifier_that_waits_beats_one_that_never_does(self) -> None:
        """A drafter that answers at once and is right half the time: the paper's model gives up half of each miss."""
        problem = self.even(0.5)
        problem["drafting"] = {"ngram": DraftCosts(table({1: 1e-6, 2: 1e-6}, 1e-5))}
        problem["acceptance"] = {"ngram": Survival((0.5,))}
        problem["modes"] = [ModeName.decoupled]
        never = search_plan(**problem).chosen.tokens_per_s
        assert search_plan(**problem, round_trip_s=0.003).chosen.tokens_per_s > 1.3 * never
        assert search_plan(**problem, round_trip_s=0.5).chosen.tokens_per_s == never

    def test_reasons(self) -> None:
        problem = self.even(0.5)
        problem["drafting"]["ngram"] = DraftCosts(table({1: 1e-6}, 1e-6))
        problem["drafting"]["suffix"] = DraftCosts(table({1: 1e-6}, 1e-6))
        problem["acceptance"]["ngram"] = Survival((0.3,))
        problem["devices"] = 3
        plan = search_plan(**problem)
        reasons = {(r.kind, r.mode.value, r.method, r.draft_devices, r.verify_devices): r.reason for r in plan.rejected}
        assert "needs 4 devices, and there are 3" in reasons["does not fit", "decoupled", "ngram", 2, 2]
        assert "2 device(s) were not measured, only 1" in reasons["not measured", "coupled", "ngram", 0, 2]
        assert "acceptance was not measured" in reasons["not measured", "coupled", "suffix", 0, 1]

    def test_what_lies_outside_the_measured_is_noted(self) -> None:
        problem = {**self.even(0.0), "context": 9000, "requests": 1000}
        notes = " ".join(search_plan(**problem).notes)
        assert "context 9000 is outside the measured 64" in notes and "outside the measured 1 to 32" in notes
        assert "window 6 is the largest that was measured" in " ".join(search_plan(**self.even(1.0)).notes)

    def test_refused(self) -> None:
        with pytest.raises(InputError, match="0 devices"):
            search_plan(**{**self.even(0.5), "devices": 0})
        with pytest.raises(InputError, match="does not fit 1 device"):
            search_plan(**{**self.even(0.5), "devices": 1, "verify": table({2: 0.1}, 0.1, WINDOWS)})
        with pytest.raises(InputError, match="no plan: decoupled"):
            search_plan(**{**self.even(0.5), "devices": 1, "modes": [ModeName.decoupled]})
