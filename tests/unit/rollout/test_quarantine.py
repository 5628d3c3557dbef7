"""Who kills verifiers is found quickly, alone, and nobody else is convicted for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.rollout.backlog import ACQUITTED_AFTER, MAX_DEATHS, MOST_DEATHS, Quarantine


class Ward:
    """Requests on verifiers that some of them kill, each time at the same output position.

    Args:
        names: All requests; they begin on one verifier.
        poison: Those that kill.
        seed: How far innocents get until a verifier dies.
    """

    def __init__(self, names: Collection[str], poison: Collection[str], seed: int) -> None:
        self.quarantine = Quarantine()
        self.tokens = dict.fromkeys(names, 0)
        self.poison, self.rng = set(poison), random.Random(seed)
        self.convicted: list[str] = []
        self.failures = 0
        self._verifiers = (f"v{number}" for number in itertools.count())

    def fail(self, verifier: str, names: Collection[str]) -> None:
        self.failures += 1
        guilty = self.quarantine.accuse(verifier, {name: self.tokens[name] for name in names})
        self.convicted += guilty
        self.poison -= set(guilty)

    def advance(self, name: str, tokens: int) -> None:
        self.tokens[name] += tokens
        self.quarantine.progress(name, self.tokens[name])

    def run(self) -> None:
        """The first death, then one verifier after the other until nobody is suspected."""
        self.fail(next(self._verifiers), list(self.tokens))
        while self.quarantine.waiting:
            verifier = next(self._verifiers)
            names = self.quarantine.take(verifier)
            assert names and self.quarantine.occupies(verifier)
            dies = bool(self.poison & set(names))
            for name in names:
                if name not in self.poison:
                    self.advance(name, self.rng.randrange(40) if dies else ACQUITTED_AFTER)
            if dies:
                self.fail(verifier, names)
            else:
                assert not self.quarantine.occupies(verifier), "all are acquitted"


def requests(number: int) -> list[str]:
    return [f"r{index}" for index in range(number)]


@given(st.integers(1, 80), st.integers(1, 4), st.randoms(use_true_random=False))
def test_all_poisons_are_found_in_few_deaths_and_nobody_else(number: int, guilty: int, rng: random.Random) -> None:
    names = requests(number)
    poison = rng.sample(names, min(guilty, number))
    ward = Ward(names, poison, rng.randrange(10**6))
    ward.run()
    assert sorted(ward.convicted) == sorted(poison)
    each = ceil(log2(number)) + (MOST_DEATHS if len(poison) > 1 else MAX_DEATHS)
    assert ward.failures - 1 <= len(poison) * each


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_no_request_that_makes_progress_is_convicted_however_often_verifiers_die(number: int, seed: int) -> None:
    ward, rng = Ward(requests(number), [], seed), random.Random(seed)
    running = {"v0": requests(number)}
    for turn in range(1, 60):
        verifier, names = running.popitem()
        for name in names:
            ward.advance(name, rng.choice([1, 1, 3, 40]))
        ward.fail(verifier, names)
        while ward.quarantine.waiting:
            fresh = f"v{turn}-{ward.quarantine.waiting}"
            running[fresh] = ward.quarantine.take(fresh)
        free = [name for name in names if not ward.quarantine.is_suspect(name)]
        if free or not running:
            running[f"v{turn}"] = free
    assert ward.convicted == []


def alone(position: int = 5) -> Quarantine:
    """One suspect whose verifier failed once; it runs alone at `v`."""
    quarantine = Quarantine()
    assert quarantine.accuse("first", {"r": position}) == []
    assert quarantine.take("v") == ["r"]
    return quarantine


def test_failures_elsewhere_speak_for_a_suspect_up_to_a_limit() -> None:
    quarantine, deaths = alone(), 1
    while not quarantine.is_suspect("gone"):
        quarantine.accuse("other", {})  # it had no requests: something else is the matter
        deaths += 1
        if quarantine.accuse("v", {"r": 5}):
            break
        assert quarantine.take("v") == ["r"]
    assert deaths == MOST_DEATHS


@pytest.mark.parametrize(("progress", "acquitted"), [(ACQUITTED_AFTER - 1, False), (ACQUITTED_AFTER, True)])
def test_progress_past_the_deadly_position_acquits(progress: int, acquitted: bool) -> None:
    quarantine = alone(position=5)
    quarantine.progress("r", 5 + progress)
    assert quarantine.is_suspect("r") != acquitted and quarantine.occupies("v") != acquitted


def test_an_excused_verifier_leaves_its_suspects_as_they_were() -> None:
    quarantine = alone()
    quarantine.excuse("v")
    assert quarantine.waiting == 1 and not quarantine.occupies("v")
    assert quarantine.take("w") == ["r"]
    assert quarantine.accuse("w", {"r": 5}) == [], "the excused one counted as a death"


def test_those_that_end_while_they_wait_are_not_handed_out() -> None:
    quarantine = Quarantine()
    quarantine.accuse("first", {"a": 0, "b": 0})
    quarantine.forget("a")
    assert quarantine.waiting == 1 and quarantine.take("v") == ["b"]
    quarantine.clear()
    assert not quarantine.is_suspect("b") and not quarantine.occupies("v") and not quarantine.waiting
