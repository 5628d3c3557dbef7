"""The controller's decisions: they lead to the desired state from anywhere, never overshoot, and then rest."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.controller.reconcile import (
    Create,
    DesiredState,
    Drain,
    FailureRecord,
    GiveUp,
    ObservedActor,
    ObservedState,
    Remove,
    ReplacementLimits,
    backoff_s,
    decide,
    record_failure,
)

POLICY = ReplacementLimits(
    health_timeout_s=10.0, start_timeout_s=50.0, drain_timeout_s=5.0, stable_s=30.0, backoff_s=1.0
)
KEYS = (VERIFIER, "ngram", "draft_model")
TICK_S = 1.0


class World:
    """A cluster in which every action takes effect and time passes: starting takes 3 s, draining 2 s."""

    def __init__(self, actors: list[ObservedActor], failing: frozenset[str] = frozenset()) -> None:
        self.now = 1000.0
        self.actors = {actor.actor_id: actor for actor in actors}
        self.failures: dict[str, FailureRecord] = {}
        self.failing = failing
        self._numbers = itertools.count()

    def observed(self) -> ObservedState:
        return ObservedState(tuple(self.actors.values()), dict(self.failures))

    def step(self, desired: DesiredState) -> int:
        actions = decide(desired, self.observed(), self.now, POLICY)
        for action in actions:
            self.apply(action)
        self.now += TICK_S
        self.actors = {name: self.age(actor) for name, actor in self.actors.items()}
        return len(actions)

    def apply(self, action: object) -> None:
        if isinstance(action, Remove):
            actor = self.actors.pop(action.actor_id)
            if action.failed:
                earlier = self.failures.get(actor.key)
                self.failures[actor.key] = record_failure(
                    earlier, self.now, action.reason, actor.was_ready, actor.created_at
                )
        elif isinstance(action, Drain):
            old = self.actors[action.actor_id]
            self.actors[action.actor_id] = replace(old, phase=Phase.DRAINING, phase_age_s=0.0)
        elif isinstance(action, GiveUp):
            self.failures[action.key] = replace(self.failures[action.key], given_up=True)
        else:
            assert isinstance(action, Create)
            name = f"{action.key}-new{next(self._numbers)}"
            self.actors[name] = ObservedActor(name, action.key, Phase.PENDING, created_at=self.now)

    def age(self, actor: ObservedActor) -> ObservedActor:
        actor = replace(actor, phase_age_s=actor.phase_age_s + TICK_S)
        if actor.phase is Phase.PENDING:
            return replace(actor, phase=Phase.STARTING, phase_age_s=0.0)
        if actor.phase is Phase.STARTING and actor.key in self.failing:
            return replace(actor, phase=Phase.DEAD, error="will not start")
        if actor.phase is Phase.STARTING and actor.phase_age_s >= 3.0:
            return replace(actor, phase=Phase.READY, phase_age_s=0.0, was_ready=True)
        if actor.phase is Phase.DRAINING and actor.phase_age_s >= 2.0:
            return replace(actor, drained=True)
        if actor.silent_s > 0.0:  # the silent stay silent
            return replace(actor, silent_s=actor.silent_s + TICK_S)
        return actor

    def count(self, key: str, *phases: Phase) -> int:
        return sum(actor.key == key and (not phases or actor.phase in phases) for actor in self.actors.values())


def ready(name: str, key: str = "ngram", created_at: float = 0.0, **changes: object) -> ObservedActor:
    return replace(ObservedActor(name, key, Phase.READY, created_at=created_at, was_ready=True), **changes)


@st.composite
def any_actors(draw: st.DrawFn) -> list[ObservedActor]:
    actors = []
    for number in range(draw(st.integers(0, 10))):
        key = draw(st.sampled_from((*KEYS, "forgotten")))
        phases = [phase for phase in Phase if key != VERIFIER or phase is not Phase.DRAINING]
        phase = draw(st.sampled_from(phases))
        actors.append(
            ObservedActor(
                f"{key}-{number}",
                key,
                phase,
                was_ready=phase in (Phase.READY, Phase.DRAINING),
                phase_age_s=draw(st.floats(0.0, 100.0)),
                created_at=draw(st.floats(0.0, 900.0)),
                silent_s=draw(st.sampled_from((0.0, 0.0, 3.0, 100.0))),
            )
        )
    return actors


desired_states = st.builds(
    DesiredState,
    st.integers(1, 4),
    st.fixed_dictionaries({"ngram": st.integers(0, 4), "draft_model": st.integers(0, 4)}),
)


@given(any_actors(), desired_states)
def test_converges_from_anywhere_and_then_rests(actors: list[ObservedActor], desired: DesiredState) -> None:
    world = World(actors)
    for _ in range(120):
        world.step(desired)
    for key in (*desired.drafters, "forgotten"):
        assert world.count(key) == world.count(key, Phase.READY) == desired.wanted(key)
    assert world.count(VERIFIER, Phase.READY) >= desired.verifiers
    assert all(world.step(desired) == 0 for _ in range(100))


@given(any_actors(), st.lists(desired_states, min_size=1, max_size=4))
def test_never_more_than_wanted_and_surge(actors: list[ObservedActor], wishes: list[DesiredState]) -> None:
    world = World(actors)
    for desired in wishes:
        for _ in range(7):
            before = {key: world.count(key) for key in KEYS}
            world.step(desired)
            for key in KEYS:
                assert world.count(key) <= max(before[key], desired.wanted(key) + POLICY.surge)
                staying = world.count(key) - world.count(key, Phase.DRAINING)
                assert staying <= max(before[key], desired.wanted(key))


@pytest.mark.parametrize(("quick", "never_started", "created"), [(9, 0, 1), (9, 1, 1), (9, 4, 0)])
def test_only_failed_starts_hold_up_the_next_verifier(quick: int, never_started: int, created: int) -> None:
    """One that served and died is replaced at once, however often: a request that kills verifiers is found that way."""
    record = FailureRecord(quick=quick, never_started=never_started, last_at=100.0, error="x")
    actions = decide(DesiredState(1), ObservedState((), {VERIFIER: record}), 100.5, POLICY)
    assert actions == [Create(VERIFIER)] * created
    drafters = decide(DesiredState(0, {"ngram": 1}), ObservedState((), {"ngram": record}), 100.5, POLICY)
    assert Create("ngram") not in drafters


def test_an_actor_that_answers_and_is_stuck_in_one_step_is_replaced() -> None:
    def decided(stalled_s: float) -> list[object]:
        actors = (ready("v", VERIFIER, stalled_s=stalled_s),)
        return [*decide(DesiredState(1), ObservedState(actors), 10.0, POLICY)]

    assert decided(POLICY.stall_timeout_s - 0.1) == []
    removal, create = decided(POLICY.stall_timeout_s)
    assert isinstance(removal, Remove) and removal.failed and "in one step" in removal.reason
    assert create == Create(VERIFIER)


@given(any_actors(), desired_states)
def test_healthy_verifiers_are_never_removed(actors: list[ObservedActor], desired: DesiredState) -> None:
    healthy = {a.actor_id for a in actors if a.key == VERIFIER and a.phase is Phase.READY and a.silent_s < 10.0}
    actions = decide(desired, ObservedState(tuple(actors)), 1000.0, POLICY)
    touched = {action.actor_id for action in actions if isinstance(action, Remove | Drain)}
    assert not healthy & touched


def test_the_newest_go_first_and_those_that_never_served_before_them() -> None:
    actors = (
        ready("old", created_at=1.0),
        ready("young", created_at=5.0),
        ObservedActor("waiting", "ngram", Phase.PENDING, created_at=3.0),
    )
    actions = decide(DesiredState(0, {"ngram": 1}), ObservedState(actors), 10.0, POLICY)
    assert actions == [Remove("waiting", "wanted no more"), Drain("young")]


def test_silent_and_dead_are_replaced_in_the_same_step() -> None:
    actors = (
        ready("v", VERIFIER, silent_s=11.0),
        ready("fine", silent_s=9.0),
        ObservedActor("d", "ngram", Phase.DEAD, error="killed"),
    )
    actions = decide(DesiredState(1, {"ngram": 2}), ObservedState(actors), 10.0, POLICY)
    assert [type(action) for action in actions[:2]] == [Remove, Remove]
    assert actions[2:] == [Create(VERIFIER), Create("ngram")]
    assert actions[1] == Remove("d", "killed", failed=True)


def test_a_drafter_that_never_starts_is_given_up_and_verifiers_never_are() -> None:
    world = World([], failing=frozenset({"ngram", VERIFIER}))
    desired = DesiredState(1, {"ngram": 1, "draft_model": 1})
    starts = {"ngram": 0, VERIFIER: 0}
    for _ in range(500):
        for action in decide(desired, world.observed(), world.now, POLICY):
            starts["ngram"] += action == Create("ngram")
            starts[VERIFIER] += action == Create(VERIFIER)
        world.step(desired)
    assert starts["ngram"] == POLICY.max_start_failures
    assert world.failures["ngram"].given_up
    assert world.failures["ngram"].error == "will not start"
    assert POLICY.max_start_failures < starts[VERIFIER] < 20  # never given up, but backed off
    assert world.count("draft_model", Phase.READY) == 1


def test_backoff_doubles_up_to_its_limit_and_spares_the_first_failure() -> None:
    waits = [backoff_s(FailureRecord(quick=number), POLICY) for number in (0, 1, 2, 3, 4, 1000)]
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, POLICY.backoff_max_s]
    assert backoff_s(None, POLICY) == 0.0


@pytest.mark.parametrize(("waited", "created"), [(3.9, 0), (4.0, 1)])
def test_nothing_is_started_while_backing_off(waited: float, created: int) -> None:
    record = FailureRecord(quick=4, never_started=0, last_at=100.0, error="x")
    observed = ObservedState((), {"ngram": record})
    actions = decide(DesiredState(0, {"ngram": 1}), observed, 100.0 + waited, POLICY)
    assert actions == [Create("ngram")] * created


def test_deaths_of_working_actors_never_give_a_method_up() -> None:
    record: FailureRecord | None = None
    for number in range(50):
        record = record_failure(record, float(number), "killed", was_ready=True, created_at=float(number))
    assert record is not None
    assert record.never_started == 0
    assert record.quick == 50


def test_actors_that_fail_side_by_side_count_once() -> None:
    """One event that ends the start of four verifiers, twice: their back-off is that of two failures, not of eight."""
    record: FailureRecord | None = None
    for round_begins in (0.0, 10.0):
        for number in range(4):
            failed_at = round_begins + 5.0 + 0.1 * number
            record = record_failure(record, failed_at, "no", was_ready=False, created_at=round_begins)
    assert record is not None
    assert (record.quick, record.never_started, record.last_at) == (2, 2, 15.3)
    assert backoff_s(record, POLICY) == POLICY.backoff_s
    record = record_failure(record, 20.0, "no", was_ready=True, created_at=0.0)
    assert (record.quick, record.never_started) == (2, 0)
    record = record_failure(record, 20.1, "no", was_ready=False, created_at=16.0)
    assert (record.quick, record.never_started) == (2, 1)
