"""Draft actors in groups, evenly and with few changes; and weights for members that lack them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.actors.specs import VERIFIER, ClusterView, Phase
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.supply import Demand
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import drafter_specs
from specactor_ray.controller.members import Member, next_view
from specactor_ray.controller.seating import Gang, Seat, group_of
from specactor_ray.controller.sync import PeerSync, WeightSync, assign_drafters
from specactor_ray.core.errors import ActorLostError, FetchError, InputError, SpecActorError, WeightsError
from specactor_ray.transport.messages import WeightSet
from tests.fakes.clocks import HandClock
from tests.fakes.hand_transport import HandTransport


@pytest.mark.parametrize(("replicas", "sizes"), [(1, [1]), (8, [8]), (9, [5, 4]), (256, [8] * 32)])
def test_groups_are_of_neighbours_and_of_about_equal_size(replicas: int, sizes: list[int]) -> None:
    of_seat = [group_of(seat, replicas) for seat in range(replicas)]
    assert of_seat == sorted(of_seat) and list(Counter(of_seat).values()) == sizes


@given(st.integers(1, 6), st.sets(st.integers(0, 12), min_size=1), st.integers(0, 12))
def test_all_are_served_and_one_that_is_replaced_moves_no_other_from_its_home(
    groups: int, seats: set[int], lost: int
) -> None:
    homes = {f"ngram-{seat}#a": seat % groups for seat in seats}
    service = assign_drafters(homes, groups)
    assert {drafter for drafter, _ in service} == set(homes) and {group for _, group in service} == set(range(groups))
    assert set(homes.items()) <= service, "they are near the verifiers that they serve"
    left = {name: home for name, home in homes.items() if name != f"ngram-{lost}#a"}
    after = assign_drafters(left, groups)
    assert set(left.items()) <= after and ({group for _, group in after} == set(range(groups))) == bool(left)
    back = assign_drafters({**left, **{f"ngram-{seat}#b": seat % groups for seat in seats & {lost}}}, groups)
    assert {(name.partition("#")[0], group) for name, group in back} == {
        (name.partition("#")[0], group) for name, group in service
    }


@pytest.mark.parametrize(("number", "groups"), [(1, 1), (4, 4), (8, 4), (2, 4), (3, 8)])
def test_all_of_a_start_serve_evenly(number: int, groups: int) -> None:
    service = assign_drafters({f"ngram-{index}": index % groups for index in range(number)}, groups)
    for side in (0, 1):
        counts = Counter(pair[side] for pair in service).values()
        assert max(counts) - min(counts) <= 1
    assert len(service) == max(number, groups)


class HandMember(Member):
    """A ready member whose calls are answered when the test says so."""

    def __init__(self, key: str, index: int = 0, suffix: str = "a") -> None:
        self.transport, name = HandTransport(), f"{key}-{index}#{suffix}"
        seat = Seat(f"{key}-{index}", key, index, Demand(key, 1), Gang(key))
        super().__init__(name, key, Phase.READY, seat=seat, calls=Calls(self.transport, HandClock()), handle=name)

    def sent(self, method: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of this method."""
        return self.sent_to(self.actor_id, method)

    def sent_to(self, actor: str, method: str) -> list[tuple[Any, ...]]:
        """The same of an actor that it stands for."""
        return [one.arguments for one in self.transport.sent if (one.actor, one.method) == (actor, method)]

    @property
    def versions(self) -> list[int]:
        """Versions of the weights that it was to load."""
        return [weights.version for (weights,) in self.sent("load_weights")]

    @property
    def acked(self) -> int:
        """Version that it has of its own weights."""
        return self.weights[self.key].acked

    def answer(self, method: str, error: str | SpecActorError = "") -> None:
        """Answer the open call of this method, if there is one."""
        waiting = self.transport.open(self.actor_id, method)
        assert len(waiting) <= 1, "one call at a time"
        for one in waiting:
            one.answer(None, SpecActorError(error) if error and isinstance(error, str) else error or None)


def test_draft_actors_serve_groups_and_a_replaced_verifier_is_in_the_group_of_its_seat() -> None:
    drafters = [{"method": "ngram", "replicas": 4}, {"method": "suffix"}]
    config = from_mapping({"target": {"replicas": 16}, "drafters": drafters})
    numbers = ((VERIFIER, 16), ("ngram", 4), ("suffix", 1))
    members = [HandMember(key, index) for key, number in numbers for index in range(number)]
    view, sync = ClusterView(), PeerSync(config)

    def send() -> dict[str, set[str]]:
        """Member → its peers."""
        nonlocal view
        for member in members:
            member.serves = True
        view = next_view(view, members, drafter_specs(config), {})
        sync.update(members, view, 0.0)
        found = {}
        for member in members:
            method = "set_drafters" if member.key == VERIFIER else "set_verifiers"
            member.answer(method)
            found[member.actor_id] = {getattr(one, "actor_id", one) for one in member.sent(method)[-1][1]}
        return found

    before, lost = send(), members[3]
    for name in (name for name in before if name.startswith(VERIFIER)):
        assert sorted(peer.partition("-")[0] for peer in before[name]) == ["ngram", "ngram", "suffix"]
    assert all(before[f"{VERIFIER}-{seat}#a"] == before[lost.actor_id] for seat in range(8))
    members.remove(lost)
    send()
    members.append(HandMember(VERIFIER, 3, "b"))
    after = send()
    assert after[f"{VERIFIER}-3#b"] == before[lost.actor_id]
    assert all(name in after[peer] for name, peers in after.items() for peer in peers), "both sides agree"


def make_sync(mode: str = "decoupled") -> WeightSync:
    head = {"method": "eagle", "model": "m", "online": {"where": "trainer"}}
    return WeightSync(from_mapping({"mode": mode, "drafters": [{"method": "ngram"}, head]}), HandClock())


_NOW = itertools.count(0.0, 10.0)


def send(sync: WeightSync, *members: HandMember, answer: str | SpecActorError | None = None, rounds: int = 1) -> None:
    """Rounds of the controller, each later than any pause; `answer` is that of all members that still live, empty for a
    success."""
    for _ in range(rounds):
        living = [one for one in members if one.error is None]
        sync.update(living, next(_NOW))
        for one in living if answer is not None else ():
            one.answer("load_weights", answer)


def settle(sync: WeightSync, *members: HandMember) -> None:
    send(sync, *members, answer="", rounds=6)


def current(sync: WeightSync, version: int) -> None:
    sync.set_current(WeightSet(version, ("a",)))


def lesson(version: int, method: str = "eagle") -> WeightSet:
    return WeightSet(version, (), method=method)


def in_place(sync: WeightSync, version: int) -> bool:
    return sync.wait_for(version, 0.0)


class TestWeights:
    def test_all_draft_actors_of_a_method_get_the_versions_it_was_taught(self) -> None:
        sync, members = make_sync(), [HandMember("eagle", 0), HandMember("eagle", 1), HandMember("ngram")]
        members.append(HandMember(VERIFIER))
        settle(sync, *members)
        assert all(one.serves for one in members)
        for version, method in ((1, "eagle"), (3, "ngram")):  # ngram is not taught
            sync.offer(lesson(version, method))
        settle(sync, *members)
        for version in (3, 2):
            sync.offer(lesson(version))
        settle(sync, *members)
        assert [one.versions for one in members] == [[1, 3], [1, 3], [], []], "only the newest is sent"
        late = HandMember("eagle", 2)
        send(sync, late, *members)
        assert not late.serves and late.versions == [3]
        settle(sync, late, *members)
        assert late.serves and [one.acked for one in (late, *members)] == [3, 3, 3, 0, 0]

    def test_verifiers_that_draft_themselves_are_taught_and_the_policy_does_not_wait_for_it(self) -> None:
        sync, (first, second) = make_sync(mode="coupled"), [HandMember(VERIFIER, index) for index in (0, 1)]
        sync.offer(lesson(2))
        send(sync, first, second)
        sync.offer(lesson(4))
        send(sync, first, second)
        assert first.serves and first.acked == 0 and sync.is_settled()
        first.answer("load_weights")
        send(sync, first)
        send(sync, second, answer="shapes differ", rounds=8)
        assert first.versions == [2, 4] and second.versions == [2, 4, 4, 4] and second.error is None

    def test_one_that_cannot_take_weights_is_marked_dead(self) -> None:
        sync, first, second, lost = make_sync(), *(HandMember("eagle", index) for index in range(3))
        settle(sync, first, second, lost)
        sync.offer(lesson(1))
        send(sync, first, second, lost)
        first.answer("load_weights")
        lost.answer("load_weights", ActorLostError("killed", node_lost=True))
        send(sync, first, second, lost, answer="shapes differ", rounds=3)
        assert second.error is None, "once may have been bad luck"
        send(sync, first, second, lost, answer="shapes differ", rounds=4)
        assert "shapes differ" in str(second.error) and first.acked == 1 and first.error is None
        assert isinstance(lost.error, ActorLostError) and lost.error.node_lost

    def test_a_verifier_serves_only_with_the_current_weights(self) -> None:
        sync, one = make_sync(), HandMember(VERIFIER)
        send(sync, one)
        assert one.serves and sync.is_settled()
        current(sync, 1)
        send(sync, HandMember("eagle"))
        assert not in_place(sync, 1) and not sync.is_settled(), "no verifier is no success"
        send(sync, one)
        assert not one.serves and not in_place(sync, 1)
        current(sync, 2)  # while the first is on its way
        one.answer("load_weights")
        send(sync, one)
        assert not one.serves and one.versions == [1, 2] and not in_place(sync, 2)
        one.answer("load_weights")
        send(sync, one)
        assert one.serves and in_place(sync, 2)

    def test_a_version_is_one_set_of_weights_for_ever(self) -> None:
        sync, one = make_sync(), HandMember(VERIFIER)
        for _ in range(2):  # the second time because an answer was lost
            current(sync, 3)
        for wrong in (WeightSet(2, ("a",)), WeightSet(3, ("b",))):
            with pytest.raises(InputError, match="come after version 3"):
                sync.set_current(wrong)
        send(sync, one)
        assert one.sent("load_weights") == [(WeightSet(3, ("a",)),)]

    @pytest.mark.parametrize("error", [WeightsError("version 1 did not arrive"), InputError("no lm_head.weight")])
    def test_an_error_that_is_final_gives_the_version_up_and_replaces_nobody(self, error: SpecActorError) -> None:
        sync, first, second, lost = make_sync(), *(HandMember(VERIFIER, index) for index in range(3))
        current(sync, 1)
        send(sync, first, second, lost)
        first.answer("load_weights")
        second.answer("load_weights", error)
        send(sync, first, second, lost)
        lost.answer("load_weights", ActorLostError("gone"))  # after the version is given up
        settle(sync, first, second, lost)
        assert second.versions == [1] and second.error is None and not second.serves and str(error) in second.note
        assert isinstance(lost.error, ActorLostError) and sync.is_settled()
        with pytest.raises(WeightsError, match=f"version 1 cannot be loaded: .*{error}"):
            in_place(sync, 1)
        late = HandMember(VERIFIER, 2)
        send(sync, first, second, late)
        assert late.versions == [] and not late.serves
        current(sync, 2)  # which is right
        settle(sync, first, second, late)
        assert in_place(sync, 2) and second.serves and late.serves

    def test_two_verifiers_that_fail_give_the_version_up_with_their_own_error(self) -> None:
        sync, gone = make_sync(), [HandMember(VERIFIER, 0, str(number)) for number in range(3)]
        current(sync, 1)
        for member in gone:
            send(sync, member, answer="ValueError: model.layers.0.experts", rounds=8)
        assert [len(one.versions) for one in gone] == [3, 3, 0], "the third one is not even tried"
        assert gone[0].error is not None and gone[1].error is None
        with pytest.raises(WeightsError, match=r"version 1 cannot be loaded: .*ValueError: model\.layers\.0\.experts"):
            in_place(sync, 1)

    def test_objects_that_do_not_arrive_are_not_the_fault_of_a_version(self) -> None:
        sync = make_sync()
        current(sync, 1)
        for number in range(9):  # each is replaced after its attempts
            member = HandMember(VERIFIER, 0, str(number))
            send(sync, member, answer=FetchError("weights of version 1: the object is lost"), rounds=8)
            assert member.error is not None and member.versions == [1, 1, 1]
        assert not in_place(sync, 1) and "the object is lost" in sync.problem
        settle(sync, HandMember(VERIFIER))
        assert in_place(sync, 1)

    def test_verifiers_that_die_of_a_version_are_not_replaced_for_ever(self) -> None:
        sync, serving = make_sync(), HandMember(VERIFIER)
        current(sync, 1)
        for number in range(4):
            assert not in_place(sync, 1)
            send(sync, HandMember(VERIFIER, 0, str(number)))  # and is gone in the next round
        send(sync)
        with pytest.raises(WeightsError, match="4 verifiers in a row were lost"):
            in_place(sync, 1)
        current(sync, 2)
        settle(sync, serving)
        for number in range(9):  # it is in place, and another verifier serves
            lost = HandMember(VERIFIER, 1, f"lost-{number}")
            send(sync, serving, lost, answer=WeightsError("memory"), rounds=2)
            assert lost.error is not None and in_place(sync, 2)
        for number in range(9):  # nodes and processes are lost, whatever the weights
            send(sync, HandMember(VERIFIER, 0, f"killed-{number}"))
        send(sync)
        last = HandMember(VERIFIER, 0, "last")  # none serves: a rollout must not wait for ever
        send(sync, last, answer=WeightsError("memory"), rounds=8)
        assert in_place(sync, 2) and last.error is None and not last.serves
        assert last.versions == [2] and "memory" in last.note
