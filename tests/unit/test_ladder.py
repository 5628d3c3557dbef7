"""The draft ladder: who is best where, and that a method which became good is found again."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.messages import Mode
from specactor_ray.speculation.acceptance import expected_accepted
from specactor_ray.speculation.ladder import BUCKET_NAMES, DraftLadder, Estimate, MethodPrior, bucket_of
from specactor_ray.speculation.tgs import best_window
from specactor_ray.speculation.track_record import TrackRecord

VERIFY_S = [0.05 + 0.002 * window for window in range(9)]
METHODS = ("ngram", "draft_model", "eagle")


def rate(method: str, known: Estimate, token_s: float) -> float:
    drafted = best_window(Mode.COUPLED, known.probability, token_s, VERIFY_S, 8)[0]
    return known.guessing * drafted + (1.0 - known.guessing) / VERIFY_S[0]


def order(ladder: DraftLadder, position: int = 0) -> list[str]:
    return [rung.method for rung in ladder.rank(bucket_of(position), METHODS, rate)]


def observe(ladder: DraftLadder, method: str, p: float, position: int, times: int = 100, length: int = 4) -> None:
    rng = random.Random(f"{method} {p} {position}")
    for _ in range(times):
        accepted = next((n for n in range(length) if rng.random() >= p), length)
        ladder.record(method, bucket_of(position), length, accepted)


def test_ranges_of_positions() -> None:
    assert [bucket_of(p) for p in (-1, 0, 63, 64, 255, 256, 1023, 1024, 10**6)] == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert len(BUCKET_NAMES) == 4


def test_offline_figures_decide_before_anything_is_observed() -> None:
    priors = {"ngram": MethodPrior(0.3), "draft_model": MethodPrior(0.7, 0.004), "eagle": MethodPrior(0.7, 0.002)}
    assert order(DraftLadder(priors)) == ["eagle", "draft_model", "ngram"]
    assert order(DraftLadder()) == list(METHODS), "of equal ones in the order given"


def test_observations_refresh_it_and_cost_counts() -> None:
    ladder = DraftLadder({"ngram": MethodPrior(0.9)})
    for method, p, token_s in (("ngram", 0.3, 0.0001), ("draft_model", 0.8, 0.040), ("eagle", 0.7, 0.004)):
        observe(ladder, method, p, 0)
        ladder.record_cost(method, token_s)
        assert ladder.probability(method, 0) == pytest.approx(p, abs=0.1)
        assert ladder.token_s(method) == token_s
    assert order(ladder)[0] == "eagle", "the most accepted one is too dear"
    ladder.record_cost("draft_model", 0.001)
    assert order(ladder)[0] == "draft_model"
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        ladder.record_cost("draft_model", nonsense)
    assert ladder.token_s("draft_model") == 0.001


def test_the_best_method_depends_on_the_place() -> None:
    ladder = DraftLadder()
    for method, early, late in (("ngram", 0.2, 0.9), ("draft_model", 0.8, 0.3), ("eagle", 0.5, 0.5)):
        observe(ladder, method, early, 10)
        observe(ladder, method, late, 300)
    assert order(ladder, 10)[0] == "draft_model" and order(ladder, 300)[0] == "ngram"


def test_a_method_that_seldom_has_a_guess_ranks_by_what_it_brings() -> None:
    ladder = DraftLadder()
    observe(ladder, "ngram", 0.9, 0)
    observe(ladder, "draft_model", 0.7, 0)
    observe(ladder, "eagle", 0.1, 0)
    assert order(ladder)[0] == "ngram"
    for step in range(100):
        ladder.record_answer("ngram", 0, guessed=step % 10 == 0)
    assert order(ladder)[0] == "draft_model"
    assert ladder.guessing("ngram", 0) < 0.2 and ladder.guessing("draft_model", 0) == 1.0


def play(ladder: DraftLadder, truth: dict[str, float], steps: int, rng: random.Random) -> Counter[str]:
    """One request that always takes the first of the ladder."""
    chosen: Counter[str] = Counter()
    for _ in range(steps):
        method = order(ladder)[0]
        accepted = next((n for n in range(4) if rng.random() >= truth[method]), 4)
        ladder.record(method, 0, 4, accepted)
        chosen[method] += 1
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_the_best_is_found_kept_and_found_again_when_another_becomes_good(seed: int) -> None:
    rng, ladder = random.Random(seed), DraftLadder()
    early = play(ladder, {"ngram": 0.3, "draft_model": 0.8, "eagle": 0.5}, 3000, rng)
    assert early["draft_model"] > 0.9 * 3000 and min(early.values()) > 0
    play(ladder, {"ngram": 0.3, "draft_model": 0.7, "eagle": 0.95}, 12000, rng)
    late = play(ladder, {"ngram": 0.3, "draft_model": 0.7, "eagle": 0.95}, 1000, rng)
    assert late["eagle"] > 900, "a method that became good was never tried again"


def test_figures_fade_by_half_however_long_it_runs() -> None:
    ladder, shown = DraftLadder(), []
    ladder.record("eagle", 0, 4096, 4096)
    for _ in range(600):  # far beyond where the weights start again from one
        ladder.record("ngram", 0, 8192, 0)
        shown.append(ladder.standings(METHODS, rate)["ngram"]["buckets"]["0-63"]["drafted"])
    assert shown[-1] == pytest.approx(2 * 8192, rel=1e-3)
    assert ladder.probability("eagle", 0) == pytest.approx(0.5, abs=1e-6)


def test_the_bonus_falls_with_evidence_and_grows_while_others_are_tried() -> None:
    ladder = DraftLadder()
    observe(ladder, "ngram", 0.5, 0)
    untried = ladder.bonus("eagle", 0)
    observe(ladder, "eagle", 0.5, 0, times=10)
    tried = ladder.bonus("eagle", 0)
    assert tried < 0.5 * untried
    observe(ladder, "ngram", 0.5, 0, times=10000)
    assert ladder.bonus("eagle", 0) > 2 * tried
    assert ladder.bonus("eagle", 0, {"eagle": 1}) < 0.5 * ladder.bonus("eagle", 0), "one request explores, not all"


def test_a_cost_of_long_ago_does_not_rule_a_method_out() -> None:
    ladder = DraftLadder()
    observe(ladder, "ngram", 0.6, 0)
    observe(ladder, "eagle", 0.9, 0)
    ladder.record_cost("ngram", 0.001)
    ladder.record_cost("eagle", 0.5)  # it was overrun once
    assert order(ladder)[:1] != ["eagle"]
    observe(ladder, "ngram", 0.6, 0, times=24000)
    assert "eagle" in order(ladder)[:2] and ladder.token_s("eagle") == 0.5


@given(st.lists(st.tuples(st.sampled_from(METHODS), st.integers(0, 2000), st.integers(-1, 9), st.integers(-2, 12))))
def test_whatever_is_recorded_the_figures_stay_in_range(records: list[tuple[str, int, int, int]]) -> None:
    ladder = DraftLadder()
    for method, position, drafted, accepted in records:
        ladder.record(method, bucket_of(position), drafted, accepted)
    table = ladder.standings(METHODS, rate)
    assert list(table) == list(METHODS)
    for row in table.values():
        assert list(row["buckets"]) == list(BUCKET_NAMES)
        for cell in row["buckets"].values():
            assert 0.0 <= cell["probability"] <= 1.0 and cell["tgs"] > 0.0
            assert cell["acceptance"] is None or 0.0 <= cell["acceptance"] <= 1.0
    assert sorted(order(ladder)) == sorted(METHODS)


class TestTrackRecord:
    def test_a_new_request_starts_at_the_average_of_the_method_at_its_place(self) -> None:
        track = TrackRecord()
        assert track.probability("r", "d") == pytest.approx(0.5)
        for _ in range(50):
            track.reach("late", 2000)
            track.record("good", "d", 4, 4)
            track.record("late", "d", 4, 0)
        assert track.probability("new", "d") > 0.9
        track.reach("moved here", 1500)
        assert track.probability("moved here", "d") < 0.15
        assert track.expected_accepted("good", "d", 3) == pytest.approx(
            expected_accepted(track.probability("good", "d"), 3)
        )

    def test_drafters_of_a_method_share_what_was_learnt(self) -> None:
        track = TrackRecord()
        track.set_drafters({"eagle-0": "eagle", "eagle-1": "eagle", "ngram-0": "ngram"})
        for _ in range(30):
            track.record("r", "eagle-0", 4, 4)
            track.record("r", "ngram-0", 4, 0)
        assert track.probability("r", "eagle-1") == track.probability("r", "eagle") > 0.9
        assert track.probability("r", "ngram") < 0.1
        assert track.verified("r") == 240
        track.set_drafters({"eagle-2": "eagle"})
        assert track.probability("r", "eagle-2") > 0.9, "a replaced drafter begins where the old one was"

    def test_a_request_knows_better_than_the_average(self) -> None:
        track = TrackRecord()
        for _ in range(20):
            track.record("easy", "d", 4, 4)
            track.record("hard", "d", 4, 0)
        assert track.probability("hard", "d") < 0.25 < 0.75 < track.probability("easy", "d")
        average = track.ladder.probability("d", 0)
        track.forget_request("hard")
        assert track.probability("hard", "d") == pytest.approx(average)

    def test_evidence_from_an_earlier_range_counts_less(self) -> None:
        track = TrackRecord()
        for _ in range(20):
            track.record("r", "d", 4, 4)
        track.reach("others", 70)
        for _ in range(200):
            track.record("others", "d", 4, 0)
        before = track.probability("r", "d")
        track.reach("r", 64)
        assert track.probability("r", "d") < before
        for _ in range(4):
            track.record("r", "d", 4, 0)
        assert track.probability("r", "d") < 0.6

    def test_guesses_are_counted_per_request(self) -> None:
        track = TrackRecord()
        for _ in range(40):
            track.record_answer("copying", "d", guessed=True)
            track.record_answer("chat", "d", guessed=False)
        assert track.guessing("copying", "d") > 0.9 and track.guessing("chat", "d") < 0.05
        assert 0.4 < track.guessing("new", "d") < 0.7
