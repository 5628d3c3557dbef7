"""When a collapse of acceptance is an alarm, and when it is chance."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from specactor_ray.trainer.drafter_watchdog import DrafterWatchdog


def step(rng: random.Random, rate: float, drafted: int = 1000) -> dict[str, tuple[int, int]]:
    return {"eagle": (drafted, sum(rng.random() < rate for _ in range(drafted)))}


@given(seed=st.integers(0, 10**6), rate=st.floats(0.05, 0.9), drafted=st.integers(0, 3000))
def test_chance_and_slow_decay_are_no_alarm(seed: int, rate: float, drafted: int) -> None:
    rng, watchdog = random.Random(seed), DrafterWatchdog()
    for number in range(12):
        assert not watchdog.observe(step(rng, rate * 0.95**number, drafted))


@given(seed=st.integers(0, 10**6), rate=st.floats(0.2, 0.9))
def test_a_collapse_is_reported_once_and_again_after_it_was_mended(seed: int, rate: float) -> None:
    rng, watchdog = random.Random(seed), DrafterWatchdog()
    for _ in range(4):
        assert not watchdog.observe(step(rng, rate))
    ((method, (now, usual)),) = watchdog.observe(step(rng, rate / 10)).items()
    assert method == "eagle" and now < 0.5 * usual
    for _ in range(3):
        assert not watchdog.observe(step(rng, rate / 10)), "the same collapse twice"
    for _ in range(6):
        assert not watchdog.observe(step(rng, min(1.0, rate * 1.1)))
    assert watchdog.observe(step(rng, rate / 10))


def test_methods_are_judged_on_their_own_and_not_by_a_few_tokens() -> None:
    watchdog = DrafterWatchdog()
    for _ in range(3):
        assert not watchdog.observe({"ngram": (1000, 300), "eagle": (1000, 600)})
    assert not watchdog.observe({"ngram": (30, 0), "eagle": (1000, 600)})
    assert watchdog.observe({"ngram": (1000, 10), "eagle": (1000, 600)}).keys() == {"ngram"}


def test_a_method_that_is_soon_asked_for_few_drafts_is_judged_by_several_steps() -> None:
    watchdog = DrafterWatchdog()
    assert not watchdog.observe({"ngram": (1000, 150)})
    alarms = [watchdog.observe({"ngram": (20, 0)}) for _ in range(20)]
    assert [number for number, alarm in enumerate(alarms) if alarm] == [4], "once, when (1 - 0.075)^n is below 0.001"
