"""Lending: nobody wakes beside a draft actor, only what was offered sleeps, all come back, and then it rests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.lending import lendable_methods
from specactor_ray.config.load import from_mapping
from specactor_ray.controller.lending import decide_lending, expected_start_s, ladder_order, next_method, pays
from specactor_ray.controller.state import (
    VERIFIER,
    Action,
    CreateVerifier,
    DesiredState,
    Drain,
    FailureRecord,
    Lend,
    ObservedActor,
    ObservedState,
    Offer,
    Phase,
    Remove,
    Sleep,
    Wake,
)
from tests.unit.test_decide import POLICY, TICK_S, World, ready

METHODS = ("ngram", "draft_model")
NAMES = ("v0", "v1", "v2", "v3")
AWAKE = (Phase.STARTING, Phase.READY, Phase.WAKING)


class Fleet(World):
    """The world of `decide`, with seats: falling asleep and waking take a step, a removed process lingers for three."""

    def __init__(self, verifiers: int, drafters: dict[str, int]) -> None:
        super().__init__([ready(name, VERIFIER) for name in NAMES[:verifiers]])
        self.desired = DesiredState(verifiers, drafters)
        self.seat_of = {name: name for name in NAMES[:verifiers]}
        self.lingering: dict[str, float] = {}
        """Seat → when the process of its last draft actor is gone."""
        self.offer = Offer()

    def run(self, steps: int) -> int:
        acted = 0
        for _ in range(steps):
            acted = self.step(self.desired)
            actions = self.lending()
            for action in actions:
                self.apply(action)
            acted += len(actions)
            self.check()
        return acted

    def lending(self) -> list[Action]:
        actors = [replace(actor, seat_free=self.is_free(actor)) for actor in self.actors.values()]
        observed = ObservedState(tuple(actors), self.failures)
        return decide_lending(self.offer, observed, self.desired, METHODS, {}, self.now, POLICY)

    def is_free(self, actor: ObservedActor) -> bool:
        seat = self.seat_of.get(actor.actor_id, "")
        return actor.phase is Phase.ASLEEP and actor.phase_age_s > 0 and not self.taken(seat)

    def taken(self, seat: str) -> bool:
        guests = [actor for actor in self.actors.values() if actor.host and self.seat_of[actor.host] == seat]
        return bool(guests) or self.lingering.get(seat, 0.0) > self.now

    def apply(self, action: object) -> None:
        match action:
            case Sleep():
                assert action.actor_id in self.offer.verifiers
                assert self.actors[action.actor_id].phase is Phase.READY
                self.enter(action.actor_id, Phase.ASLEEP)
            case Wake():
                assert self.actors[action.actor_id].phase is Phase.ASLEEP
                self.enter(action.actor_id, Phase.WAKING)
            case Lend():
                assert self.is_free(self.actors[action.actor_id])
                name = f"{action.method}-lent{next(self._numbers)}"
                self.actors[name] = ObservedActor(
                    name, action.method, Phase.PENDING, created_at=self.now, host=action.actor_id
                )
            case Remove():
                gone = self.actors[action.actor_id]
                if gone.host:
                    self.lingering[self.seat_of[gone.host]] = self.now + 3 * TICK_S
                super().apply(action)
            case CreateVerifier():
                super().apply(action)
                newest = list(self.actors)[-1]
                alive = {self.seat_of[name] for name in self.actors if name in self.seat_of}
                self.seat_of[newest] = next(seat for seat in NAMES if seat not in alive)
            case _:
                super().apply(action)

    def enter(self, name: str, phase: Phase) -> None:
        self.actors[name] = replace(self.actors[name], phase=phase, phase_age_s=0.0)

    def age(self, actor: ObservedActor) -> ObservedActor:
        if actor.key == VERIFIER and actor.phase is Phase.PENDING and self.taken(self.seat_of[actor.actor_id]):
            return actor  # the controller starts it when nobody is left on its seat
        actor = super().age(actor)
        if actor.phase is Phase.WAKING and actor.phase_age_s > 1.0:
            return replace(actor, phase=Phase.READY, phase_age_s=0.0)
        return actor

    def check(self) -> None:
        for actor in self.actors.values():
            if actor.key == VERIFIER and actor.phase in AWAKE:
                assert not self.taken(self.seat_of[actor.actor_id]), f"{actor.actor_id} is awake beside a draft actor"
        hosts = [actor.host for actor in self.actors.values() if actor.host]
        assert len(hosts) == len(set(hosts))

    def kill(self, name: str) -> None:
        self.actors[name] = replace(self.actors[name], phase=Phase.DEAD, error="killed")


offers = st.builds(
    Offer, st.lists(st.sampled_from(NAMES), unique=True).map(tuple), st.integers(0, 5), st.sampled_from((0.0, 9.0, 1e6))
)


@given(
    st.integers(2, 4),
    st.fixed_dictionaries({method: st.integers(0, 2) for method in METHODS}),
    st.lists(st.tuples(offers, st.integers(1, 9), st.integers(0, 99)), max_size=6),
)
def test_seats_are_never_shared_and_everyone_comes_back(
    verifiers: int, drafters: dict[str, int], story: list[tuple[Offer, int, int]]
) -> None:
    fleet = Fleet(verifiers, drafters)
    for offer, steps, victim in story:
        fleet.offer = offer
        fleet.run(steps)
        names = sorted(fleet.actors)
        if victim < len(names):
            fleet.kill(names[victim])
    fleet.run(30)
    assert fleet.run(30) == 0 or fleet.failures, "it does not come to rest"
    fleet.offer = Offer()
    fleet.run(120)
    assert fleet.count(VERIFIER) == fleet.count(VERIFIER, Phase.READY) == verifiers
    assert not [actor for actor in fleet.actors.values() if actor.host]
    assert all(fleet.count(method) == number for method, number in drafters.items())
    assert fleet.run(30) == 0


def lent(fleet: Fleet) -> list[str]:
    return sorted(actor.key for actor in fleet.actors.values() if actor.host and actor.phase is Phase.READY)


def test_missing_methods_first_then_more_of_the_best_up_to_the_requests() -> None:
    fleet = Fleet(4, {"ngram": 1, "draft_model": 0})
    fleet.offer = Offer(NAMES[1:], requests=1, remaining_s=1e6)
    fleet.run(20)
    assert lent(fleet) == ["draft_model"]  # one ngram has its own seat; one request needs no second of any method
    assert fleet.count(VERIFIER, Phase.READY) == 3
    fleet.offer = replace(fleet.offer, requests=2)
    fleet.run(20)
    assert lent(fleet) == ["draft_model", "draft_model", "ngram"]


def test_a_host_that_dies_gets_its_seat_back_before_it_is_replaced() -> None:
    fleet = Fleet(2, {"ngram": 0, "draft_model": 0})
    fleet.offer = Offer(("v1",), 1, 1e6)
    fleet.run(20)
    assert lent(fleet) == ["ngram"]
    fleet.kill("v1")
    fleet.run(20)  # checks in every step that nobody starts beside the draft actor
    assert fleet.count(VERIFIER, Phase.READY) == 2 and lent(fleet) == []


def test_a_draft_actor_that_dies_is_replaced_and_one_that_never_starts_is_given_up() -> None:
    fleet = Fleet(2, {"ngram": 0, "draft_model": 1})
    fleet.offer = Offer(("v1",), 1, 1e6)
    fleet.run(20)
    fleet.kill(next(actor.actor_id for actor in fleet.actors.values() if actor.host))
    fleet.run(20)
    assert lent(fleet) == ["ngram"]
    fleet.failing = frozenset({"ngram"})
    fleet.kill(next(actor.actor_id for actor in fleet.actors.values() if actor.host))
    fleet.run(300)
    assert fleet.failures["ngram"].never_started == POLICY.max_start_failures
    assert lent(fleet) == [] and fleet.run(50) == 0


@pytest.mark.parametrize(("remaining", "actions"), [(9.9, 0), (10.0, 1)])
def test_not_when_the_rollout_ends_before_it_pays(remaining: float, actions: int) -> None:
    assert pays(remaining, 5.0, POLICY) == bool(actions)
    fleet = Fleet(2, {"ngram": 0, "draft_model": 0})
    fleet.offer = Offer(("v1",), 1, remaining)
    assert len(fleet.lending()) == actions


def test_start_times() -> None:
    assert expected_start_s("ngram", {}, POLICY) == POLICY.assumed_start_s
    assert expected_start_s("ngram", {"ngram": 2.0, "eagle": 30.0}, POLICY) == 2.0
    assert expected_start_s("suffix", {"ngram": 2.0, "eagle": 30.0}, POLICY) == 30.0


def test_next_method() -> None:
    assert next_method(("x", "y"), {"x": 1, "y": 0}, 3) == "y"
    assert next_method(("x", "y"), {"x": 1, "y": 1}, 3) == "x"
    assert next_method(("x", "y"), {"x": 1, "y": 1}, 1) is None
    assert next_method(("x",), {"x": 0}, 0) is None
    assert next_method((), {}, 3) is None


def test_the_ladder_of_the_verifiers_comes_before_the_order_of_the_configuration() -> None:
    methods = ("a", "b", "c")
    assert ladder_order(methods, []) == methods
    assert ladder_order(methods, [{"ladder": []}, {"ladder": None}, {"running": 1}]) == methods
    standings = [{"method": method, "tgs": tgs} for method, tgs in (("c", 1.0), ("b", 2.0), ("b", 0.5))]
    assert ladder_order(methods, [{"ladder": standings}, {"ladder": []}]) == ("b", "c", "a")


def test_drafts_end_in_order_when_a_verifier_is_wanted_back() -> None:
    asleep = replace(ready("v1", VERIFIER), phase=Phase.ASLEEP, seat_free=True)
    guest = replace(ready("g"), host="v1")
    for phase, expected in (
        (Phase.READY, [Drain("g")]),
        (Phase.STARTING, [Remove("g", "wanted no more")]),
        (Phase.DRAINING, []),
    ):
        observed = ObservedState((asleep, replace(guest, phase=phase)))
        desired = DesiredState(2, {})
        assert decide_lending(Offer(), observed, desired, METHODS, {}, 0.0, POLICY) == expected
    assert decide_lending(Offer(), ObservedState((asleep,)), desired, METHODS, {}, 0.0, POLICY) == [Wake("v1")]


def test_backing_off_applies_to_lending() -> None:
    fleet = Fleet(2, {"ngram": 0, "draft_model": 1})
    fleet.offer = Offer(("v1",), 1, 1e6)
    fleet.failures["ngram"] = FailureRecord(quick=3, last_at=fleet.now - 1.0)
    assert fleet.lending() == []
    fleet.failures["ngram"] = FailureRecord(quick=3, last_at=fleet.now - 2.0)
    assert fleet.lending() == [Sleep("v1")]


def config(lend: bool | None = None, mode: str = "decoupled", replicas: int = 2, **target: object) -> object:
    drafters = [
        {"method": "ngram", "replicas": 0, "cores": 0.5},
        {"method": "draft_model", "model": "m", "cores": 2, "replicas": 1},
        {"method": "x:Y", "gpus": 1},
    ]
    settings = {"mode": mode, "target": {"replicas": replicas, **target}, "drafters": drafters}
    return from_mapping({**settings, "speculation": {"lend": lend}})


def test_which_methods_fit_the_seat_of_a_verifier() -> None:
    assert lendable_methods(config()) == ("ngram",)
    assert lendable_methods(config(cores=2)) == ("ngram", "draft_model")
    assert lendable_methods(config(True, cores=1, gpus=1)) == ("ngram", "x:Y")
    for without in (config(False), config(mode="coupled"), config(mode="plain"), config(replicas=1)):
        assert lendable_methods(without) == ()
