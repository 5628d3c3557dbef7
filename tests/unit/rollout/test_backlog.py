"""Who gets the next request: the least loaded verifier, and suspects one of their own until one is convicted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.backlog import ACQUITTED_AFTER, MAX_DEATHS, MOST_DEATHS, Backlog, Quarantine
from specactor_ray.rollout.journal import Journal, JournalEntry

OUTSTANDING = 5


def waiting(number: int, loads: dict[str, int] | None = None) -> tuple[Journal, Backlog]:
    """So many requests `r0`, `r1`, ... that wait, and verifiers that have some already."""
    journal = Journal()
    backlog = Backlog(journal, OUTSTANDING)
    for verifier, load in (loads or {}).items():
        for index in range(load):
            journal.add(JournalEntry(f"{verifier}/{index}", (1,), SamplingParams()))
            journal.hand_to(f"{verifier}/{index}", verifier)
    fill(journal, backlog, [(None, 0, 0)] * number)
    return journal, backlog


def fill(journal: Journal, backlog: Backlog, requests: Sequence[tuple[str | None, int, int]]) -> None:
    """Add requests `r0`, `r1`, ... of these sessions, priorities and streams."""
    for number, (session, priority, stream) in enumerate(requests):
        journal.add(JournalEntry(f"r{number}", (1,), SamplingParams(), session, priority, stream))
    backlog.add(f"r{number}" for number in range(len(requests)))


@given(st.integers(0, 30), st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 7)))
def test_each_goes_to_the_least_loaded_as_long_as_there_is_room(number: int, loads: dict[str, int]) -> None:
    journal, backlog = waiting(number, loads)
    batches = backlog.hand_out(list(loads))
    expected, handed = dict(loads), 0
    while handed < number and expected and min(expected.values()) < OUTSTANDING:
        expected[min(expected, key=lambda name: (expected[name], name))] += 1
        handed += 1
    assert {name: journal.load(name) for name in loads} == expected
    given_out = [request.request_id for batch in batches.values() for request in batch]
    assert sorted(given_out) == sorted(f"r{index}" for index in range(handed))
    assert bool(backlog) == (handed < number)


def test_suspects_get_a_verifier_of_their_own_and_the_emptiest_is_kept_for_them() -> None:
    journal, backlog = waiting(4, {"a": 1, "b": 2})
    suspects = ["r0", "r1"]
    for name in suspects:
        journal.hand_to(name, "gone")
    backlog = Backlog(journal, OUTSTANDING)
    backlog.quarantine.accuse("gone", dict.fromkeys(suspects, 0))
    for name in suspects:
        journal.release(name)
    backlog.put_back(suspects)
    backlog.add(["r2", "r3"])
    first = backlog.hand_out(["a", "b", "c"])
    assert [request.request_id for request in first["c"]] == ["r0"]
    assert "a" not in first, "it is the next to be free for the other suspect"
    assert [request.request_id for request in first["b"]] == ["r2", "r3"] and backlog


flows = st.tuples(st.sampled_from([None, "s", "t"]), st.integers(-1, 1), st.integers(0, 2))


@given(st.lists(flows, max_size=30), st.randoms(use_true_random=False))
def test_priorities_go_first_and_the_flows_of_one_take_turns(
    requests: list[tuple[str | None, int, int]], rng: random.Random
) -> None:
    journal = Journal()
    backlog = Backlog(journal, 10**6)
    fill(journal, backlog, requests)
    gone = set(rng.sample(range(len(requests)), rng.randrange(len(requests) + 1)))
    for number in gone:
        backlog.discard(journal.entries.pop(f"r{number}"))
    assert backlog.single == sum(not flow[2] for number, flow in enumerate(requests) if number not in gone)
    order = [int(one.request_id[1:]) for one in backlog.hand_out(["a"]).get("a", [])]
    assert backlog.single == 0 and not backlog and journal.begun == len(order)
    kept = [number for number in range(len(requests)) if number not in gone]
    flow_of = requests.__getitem__
    # priority, how many of its flow come before it, when its flow began
    turns = {
        n: (flow_of(n)[1], [*map(flow_of, kept[:at])].count(flow_of(n)), requests.index(flow_of(n)))
        for at, n in enumerate(kept)
    }
    assert order == sorted(kept, key=turns.__getitem__)


def test_a_turn_waits_for_the_verifier_of_its_session_and_others_pass() -> None:
    journal = Journal()
    backlog = Backlog(journal, 2)
    for name, session in (("r0", "s"), ("r1", None), ("r2", "s"), ("r3", "t"), ("r4", None)):
        journal.add(JournalEntry(name, (1,), SamplingParams(), session))
    backlog.add(["r0"])
    assert list(backlog.hand_out(["a", "b"])) == ["a"]
    backlog.set_home("t", "b")
    backlog.add(["r1", "r2", "r3", "r4"])
    journal.add(JournalEntry("x", (1,), SamplingParams()))
    journal.hand_to("x", "a")
    batches = backlog.hand_out(["a", "b"])
    assert {name: [one.request_id for one in batch] for name, batch in batches.items()} == {"b": ["r1", "r3"]}
    batches = backlog.hand_out(["c"])  # the verifier of the session does not serve any more
    assert [one.request_id for one in batches["c"]] == ["r2", "r4"]


def test_while_held_only_those_that_have_begun_are_handed_out_and_frozen_none() -> None:
    journal, backlog = waiting(8)
    backlog.hand_out(["a"])
    for name in ("r1", "r3"):
        journal.release(name)
    backlog.put_back(["r1", "r3"])
    journal.add(JournalEntry("new", (1,), SamplingParams()))
    backlog.add(["new"])
    backlog.is_frozen = True
    assert not backlog
    backlog.is_frozen, backlog.holds = False, 1
    assert backlog and [one.request_id for one in backlog.hand_out(["b"])["b"]] == ["r1", "r3"]
    assert not backlog and not backlog.hand_out(["b"])
    backlog.holds = 0
    assert [one.request_id for one in backlog.hand_out(["b"])["b"]] == ["r5", "r6", "r7"]


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


def names_of(number: int) -> list[str]:
    return [f"r{index}" for index in range(number)]


@given(st.integers(1, 80), st.integers(1, 4), st.randoms(use_true_random=False))
def test_all_poisons_are_found_in_few_deaths_and_nobody_else(number: int, guilty: int, rng: random.Random) -> None:
    names = names_of(number)
    poison = rng.sample(names, min(guilty, number))
    ward = Ward(names, poison, rng.randrange(10**6))
    ward.run()
    assert sorted(ward.convicted) == sorted(poison)
    each = ceil(log2(number)) + (MOST_DEATHS if len(poison) > 1 else MAX_DEATHS)
    assert ward.failures - 1 <= len(poison) * each


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_no_request_that_makes_progress_is_convicted_however_often_verifiers_die(number: int, seed: int) -> None:
    ward, rng = Ward(names_of(number), [], seed), random.Random(seed)
    running = {"v0": names_of(number)}
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


def test_those_that_end_while_they_wait_are_not_handed_out() -> None:
    quarantine = Quarantine()
    quarantine.accuse("first", {"a": 0, "b": 0})
    quarantine.forget("a")
    assert quarantine.waiting == 1 and quarantine.take("v") == ["b"]
    quarantine.clear()
    assert not quarantine.is_suspect("b") and not quarantine.occupies("v") and not quarantine.waiting
