"""The controller's decisions: they lead to the desired state from anywhere, never overshoot, and then rest."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.controller.reconcile import (
    ActorState,
    FailureRecord,
    Remove,
    ReplacementLimits,
    balance,
    failed_actors,
    has_lasted,
    is_given_up,
    record_failure,
)
from specactor_ray.core.errors import SpecActorError

POLICY = ReplacementLimits(health_timeout_s=10.0, start_timeout_s=50.0, stable_s=30.0, backoff_s=1.0)
Desired = dict[str, int]
KEYS = (VERIFIER, "ngram", "draft_model")
TICK_S = 1.0


class World:
    """A cluster in which every action takes effect and time passes: starting takes 3 s."""

    def __init__(self, actors: list[ActorState], failing: frozenset[str] = frozenset()) -> None:
        self.now = 1000.0
        self.actors = {actor.actor_id: actor for actor in actors}
        self.failures: dict[str, FailureRecord] = {}
        self.failing = failing
        self._numbers = itertools.count()

    def step(self, desired: Desired) -> tuple[list[Remove], list[str]]:
        for actor in self.actors.values():
            record = self.failures.get(actor.key)
            if record is not None and has_lasted(actor, record, self.now, POLICY):
                del self.failures[actor.key]
        failed = failed_actors(self.actors.values(), self.now, POLICY)
        for removal in failed:
            actor = self.actors.pop(removal.actor_id)
            self.failures[actor.key] = record_failure(self.failures.get(actor.key), self.now, actor)
        surplus, missing = balance(desired, list(self.actors.values()), self.failures, self.now, POLICY)
        for removal in surplus:
            del self.actors[removal.actor_id]
        for key in missing:
            name = f"{key}-new{next(self._numbers)}"
            self.actors[name] = ActorState(name, key, since=self.now, created_at=self.now)
        self.now += TICK_S
        for actor in self.actors.values():
            self.age(actor)
        return [*failed, *surplus], missing

    def enter(self, actor: ActorState, phase: Phase) -> None:
        actor.phase, actor.since = phase, self.now

    def age(self, actor: ActorState) -> None:
        age_s = self.now - actor.since
        if actor.phase is Phase.PENDING:
            self.enter(actor, Phase.STARTING)
        elif actor.phase is Phase.STARTING and actor.key in self.failing:
            actor.phase, actor.error = Phase.DEAD, SpecActorError("will not start")
        elif actor.phase is Phase.STARTING and age_s >= 3.0:
            self.enter(actor, Phase.READY)
            actor.was_ready = True

    def count(self, key: str, *phases: Phase) -> int:
        return sum(actor.key == key and (not phases or actor.phase in phases) for actor in self.actors.values())


def ready(name: str, key: str = "ngram", created_at: float = 0.0, **changes: object) -> ActorState:
    return replace(ActorState(name, key, Phase.READY, created_at=created_at, was_ready=True), **changes)


@st.composite
def any_actors(draw: st.DrawFn) -> list[ActorState]:
    actors = []
    for number in range(draw(st.integers(0, 10))):
        key = draw(st.sampled_from((*KEYS, "forgotten")))
        phase = draw(st.sampled_from(list(Phase)))
        actors.append(
            ActorState(
                f"{key}-{number}",
                key,
                phase,
                was_ready=phase is Phase.READY,
                since=draw(st.floats(900.0, 1000.0)),
                created_at=draw(st.floats(0.0, 900.0)),
                unanswered_since=draw(st.sampled_from((None, None, 997.0, 900.0))),
            )
        )
    return actors


desired_states = st.fixed_dictionaries(
    {VERIFIER: st.integers(1, 4), "ngram": st.integers(0, 4), "draft_model": st.integers(0, 4)}
)


@given(any_actors(), desired_states)
def test_converges_from_anywhere_and_then_rests(actors: list[ActorState], desired: Desired) -> None:
    world = World(actors)
    verifiers = [actor for actor in actors if actor.key == VERIFIER and actor.phase is Phase.READY]
    healthy = {actor.actor_id for actor in verifiers if actor.silent_s(world.now) < POLICY.health_timeout_s}
    for _ in range(80):
        before = {key: world.count(key) for key in KEYS}
        removals, _ = world.step(desired)
        assert not healthy & {removal.actor_id for removal in removals}, "healthy verifiers are never removed"
        healthy = set()  # those of the beginning: they fall silent later
        assert all(world.count(key) <= max(before[key], desired[key]) for key in KEYS), "never more than wanted"
    for key in ("ngram", "draft_model", "forgotten"):
        assert world.count(key) == world.count(key, Phase.READY) == desired.get(key, 0)
    assert world.count(VERIFIER, Phase.READY) >= desired[VERIFIER]
    assert all(world.step(desired) == ([], []) for _ in range(20))


@pytest.mark.parametrize(("quick", "never_started", "created"), [(9, 0, 1), (9, 1, 1), (9, 4, 0)])
def test_only_failed_starts_hold_up_the_next_verifier(quick: int, never_started: int, created: int) -> None:
    """One that served and died is replaced at once, however often: a request that kills verifiers is found that way."""
    record = FailureRecord(quick=quick, never_started=never_started, last_at=100.0)
    failures = {VERIFIER: record, "ngram": record}
    assert balance({VERIFIER: 1, "ngram": 1}, (), failures, 100.5, POLICY) == ([], [VERIFIER] * created)


def test_a_seat_that_fails_beside_a_healthy_one_is_given_up_and_one_that_recovers_is_not() -> None:
    for recovers in (False, True):
        world = World([ready("healthy", since=900.0)], failing=frozenset({"ngram"}))
        starts = 0
        for second in range(200):
            if recovers and second == 6:
                world.failing = frozenset()
            starts += len(world.step({VERIFIER: 0, "ngram": 2})[1])
        assert starts == (3 if recovers else POLICY.max_start_failures)
        assert is_given_up("ngram", world.failures.get("ngram"), POLICY) != recovers
        assert bool(world.failures) != recovers, "an actor that lasts clears them"


def test_the_newest_go_first_and_those_that_never_served_before_them() -> None:
    actors = (
        ready("old", created_at=1.0),
        ready("young", created_at=5.0),
        ActorState("waiting", "ngram", Phase.PENDING, created_at=3.0),
    )
    actions = balance({VERIFIER: 0, "ngram": 1}, actors, {}, 10.0, POLICY)
    assert actions == ([Remove("waiting", "surplus"), Remove("young", "surplus")], [])


def test_silent_stuck_and_dead_actors_have_failed() -> None:
    actors = (
        ready("silent", VERIFIER, unanswered_since=9.0),
        ready("stuck", VERIFIER, stalled_s=POLICY.stall_timeout_s),
        ready("busy", VERIFIER, stalled_s=POLICY.stall_timeout_s - 0.1),
        ready("slow", unanswered_since=11.0),
        ActorState("dead", "ngram", Phase.DEAD, error=SpecActorError("killed")),
    )
    assert failed_actors(actors, 20.0, POLICY) == [
        Remove("silent", "it gave no answer for 11.0 s", failed=True),
        Remove("stuck", "it was in one step for 300.0 s", failed=True),
        Remove("dead", "killed", failed=True),
    ]


def test_a_drafter_that_never_starts_is_given_up_and_verifiers_never_are() -> None:
    world = World([], failing=frozenset({"ngram", VERIFIER}))
    desired, starts = {VERIFIER: 1, "ngram": 1, "draft_model": 1}, Counter[str]()
    for _ in range(500):
        starts.update(world.step(desired)[1])
    assert starts["ngram"] == POLICY.max_start_failures
    assert is_given_up("ngram", world.failures["ngram"], POLICY)
    assert not is_given_up(VERIFIER, world.failures[VERIFIER], POLICY)
    assert POLICY.max_start_failures < starts[VERIFIER] < 20  # never given up, but backed off
    assert world.count("draft_model", Phase.READY) == 1


@pytest.mark.parametrize(
    ("quick", "wait_s"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (4, 4.0), (1000, POLICY.backoff_max_s)]
)
def test_waits_before_starts_double_up_to_a_limit(quick: int, wait_s: float) -> None:
    failures = {"ngram": FailureRecord(quick=quick, never_started=0, last_at=100.0)}
    assert balance({"ngram": 1}, (), failures, 100.0 + wait_s, POLICY)[1] == ["ngram"]
    assert not wait_s or balance({"ngram": 1}, (), failures, 99.9 + wait_s, POLICY)[1] == []


def test_actors_that_fail_side_by_side_count_once() -> None:
    """One event that ends the start of four verifiers, twice: their back-off is that of two failures, not of eight."""
    record: FailureRecord | None = None
    for round_begins in (0.0, 10.0):
        for number in range(4):
            failed_at = round_begins + 5.0 + 0.1 * number
            record = record_failure(record, failed_at, ActorState("x", "ngram", created_at=round_begins))
    assert record == FailureRecord(quick=2, never_started=2, last_at=15.3)
    record = record_failure(record, 20.0, ready("x"))
    assert (record.quick, record.never_started) == (2, 0)
    record = record_failure(record, 20.1, ActorState("x", "ngram", created_at=16.0))
    assert (record.quick, record.never_started) == (2, 1)
