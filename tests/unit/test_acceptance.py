"""Moving acceptance and the circuit breaker."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.schema import BreakerConfig
from specactor_ray.speculation.acceptance import (
    Acceptance,
    BreakerState,
    CircuitBreaker,
    expected_accepted,
)


@given(st.floats(0, 1), st.integers(0, 20))
def test_expected_accepted_is_the_sum_of_powers(p: float, length: int) -> None:
    assert expected_accepted(p, length) == pytest.approx(sum(p**i for i in range(1, length + 1)), abs=1e-9)


def test_the_prior_speaks_until_there_is_evidence() -> None:
    acceptance = Acceptance(prior=0.7)
    assert acceptance.rate == pytest.approx(0.7)
    assert acceptance.probability == pytest.approx(0.7)
    acceptance.record(0, 0)
    assert acceptance.rate == pytest.approx(0.7)
    for _ in range(100):
        acceptance.record(8, 8)
    assert acceptance.rate > 0.97


def test_rate_counts_all_drafts_and_probability_only_those_put_to_the_test() -> None:
    acceptance = Acceptance(prior_tokens=0.0, half_life_tokens=1e12)
    acceptance.record(8, 2)
    acceptance.record(4, 4)
    assert acceptance.rate == pytest.approx(6 / 12)
    assert acceptance.probability == pytest.approx(6 / 7)
    assert acceptance.expected_accepted(2) == pytest.approx(6 / 7 + (6 / 7) ** 2)


def test_probability_recovers_the_model_whatever_the_window() -> None:
    generator, acceptance = random.Random(0), Acceptance(half_life_tokens=1e9)
    for _ in range(4000):
        window = generator.randint(1, 8)
        accepted = 0
        while accepted < window and generator.random() < 0.6:
            accepted += 1
        acceptance.record(window, accepted)
    assert acceptance.probability == pytest.approx(0.6, abs=0.02)
    assert acceptance.rate < 0.5


def test_old_evidence_fades() -> None:
    acceptance = Acceptance(half_life_tokens=64)
    for _ in range(100):
        acceptance.record(8, 8)
    for _ in range(40):
        acceptance.record(8, 0)
    assert acceptance.rate < 0.1
    assert acceptance.drafted < 200


def test_discounted_evidence_counts_less_and_says_the_same() -> None:
    acceptance = Acceptance(prior_tokens=0.0)
    acceptance.record(8, 4)
    before = acceptance.probability
    acceptance.discount(0.25)
    assert acceptance.probability == pytest.approx(before) and acceptance.drafted == pytest.approx(2.0)
    acceptance.record(8, 0)
    assert acceptance.probability < 0.6 * before


CONFIG = BreakerConfig(min_drafted=32, min_acceptance=0.1, max_silent_waits=8, cooldown_s=5.0)


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(4):
        breaker.record(8, 0)
    return breaker


def test_opens_on_low_acceptance_only_with_enough_evidence() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(3):
        breaker.record(8, 0)
        assert breaker.allows(0.0)
    breaker.record(8, 0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0.0)
    assert breaker.openings == 1
    assert "acceptance" in breaker.reason


def test_stays_closed_while_acceptance_is_enough() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(100):
        breaker.record(8, 1)
    assert breaker.state is BreakerState.CLOSED


def test_a_good_start_does_not_shield_a_drafter_that_turned_useless() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(1000):
        breaker.record(8, 8)
    steps = 0
    while breaker.state is BreakerState.CLOSED:
        breaker.record(8, 0)
        steps += 1
    assert steps < 100


def test_opens_on_silence_in_a_row() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(7):
        breaker.record_silence()
    breaker.record_answer()
    for _ in range(7):
        breaker.record_silence()
    assert breaker.allows(0.0)
    breaker.record_silence()
    assert not breaker.allows(0.0)
    assert "8 waits" in breaker.reason


def test_probes_after_the_cooldown_and_closes_on_success() -> None:
    breaker = opened()
    assert not breaker.allows(100.0)
    assert not breaker.allows(104.9)
    assert breaker.allows(105.0)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.record(8, 4)
    assert breaker.state is BreakerState.CLOSED
    breaker.record(8, 0)
    assert breaker.state is BreakerState.CLOSED, "judged afresh"


def test_failed_probes_double_the_cooldown_up_to_sixteenfold() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(6):
        assert not breaker.allows(now)
        start = now
        while not breaker.allows(now):
            now += 1.0
        waits.append(now - start)
        breaker.record(8, 0)
        assert breaker.state is BreakerState.OPEN
    assert waits == [5, 10, 20, 40, 80, 80]
    assert breaker.openings == 7
    breaker.allows(now)
    now += 80.0
    assert breaker.allows(now)
    breaker.record(8, 8)
    assert breaker.cooldown_s == 5.0


def test_a_probe_ends_on_a_quarter_of_the_silence() -> None:
    breaker = opened()
    breaker.allows(0.0)
    assert breaker.allows(5.0)
    breaker.record_silence()
    assert breaker.allows(5.0)
    breaker.record_silence()
    assert not breaker.allows(5.0)
    assert breaker.cooldown_s == 10.0


def test_late_records_do_not_touch_an_open_breaker() -> None:
    breaker = opened()
    breaker.record(8, 8)
    breaker.record_silence()
    assert breaker.state is BreakerState.OPEN
    assert breaker.openings == 1
