"""Which verifiers get a version by broadcast: each event of a member, of the sender, and of the next version."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.config.load import from_mapping
from specactor_ray.controller.broadcasts import Broadcasts
from specactor_ray.controller.members import UPDATE_TIMEOUT_S
from specactor_ray.controller.sync import WeightSync
from specactor_ray.core.errors import ActorLostError, FetchError, SpecActorError, WeightsError
from specactor_ray.transport.messages import JOIN_S, Broadcast, WeightSet
from tests.fakes.clocks import HandClock
from tests.unit.controller.test_sync import HandMember


def version_of(number: int, num_bytes: int = 0) -> WeightSet:
    return WeightSet(number, (number,), num_bytes, broadcast=Broadcast("trainer", "127.0.0.1", 1))


class Run:
    """Verifiers and the sender, which answer when a test says so."""

    def __init__(self, verifiers: int) -> None:
        self.sync = WeightSync(from_mapping({"target": {"replicas": 3}}), HandClock())
        self.members, self._now = (
            [HandMember(VERIFIER, index) for index in range(verifiers)],
            itertools.count(0.0, 10.0),
        )
        self.everyone = list(self.members)

    def round(self) -> None:
        self.everyone += [one for one in self.members if one not in self.everyone]
        self.sync.update([one for one in self.members if one.error is None], next(self._now))

    def set(self, number: int) -> dict[str, int]:
        """Set a version. Returns the rank of each verifier that got it; 0: without a plan."""
        self.sync.set_current(version_of(number))
        self.round()
        return self.ranks(number)

    def ranks(self, number: int) -> dict[str, int]:
        """Verifier → its rank in the last load of this version."""
        loads = ((one.actor_id, sent) for one in self.members for (sent,) in one.sent("load_weights"))
        return {name: sent.broadcast.rank if sent.broadcast else 0 for name, sent in loads if sent.version == number}

    def load(self, *but: HandMember) -> None:
        """Every open load ends well, except those of some."""
        for one in self.members:
            if one not in but:
                one.answer("load_weights")
        self.round()

    def sizes(self) -> dict[int, int]:
        """Version → members of its broadcast, for all that the sender got."""
        calls = [sent for one in self.everyone for (sent,) in one.sent_to("trainer", "send_weights")]
        return {sent.version: sent.broadcast.size for sent in calls}

    def sender(self, error: SpecActorError | None = None) -> None:
        """The sender answers."""
        for one in self.everyone:
            for call in one.transport.open("trainer", "send_weights"):
                call.answer(None, error)
        self.round()


def names(*ranks: int) -> dict[str, int]:
    return {f"{VERIFIER}-{index}#a": rank for index, rank in enumerate(ranks)}


FAILED = FetchError("Connection reset by peer")


def test_all_ready_verifiers_are_members_of_a_group_of_their_own_for_each_version() -> None:
    run = Run(2)
    for number in (1, 2):
        assert run.set(number) == names(1, 2)
        run.sender()
        run.load()
        assert run.sync.wait_for(number, 0.0)
    assert run.sizes() == {1: 3, 2: 3}


@pytest.mark.parametrize("error", [None, FAILED, ActorLostError("the trainer's rank 0 was killed")])
def test_the_version_is_in_place_whatever_the_sender_answers(error: SpecActorError | None) -> None:
    run = Run(2)
    run.set(1)
    run.load()
    assert run.sync.wait_for(1, 0.0), "verifiers do not wait for the sender"
    run.sender(error)
    assert run.set(2) == names(1, 2)


def test_one_that_joins_after_the_plan_fetches_and_is_a_member_of_the_next_group() -> None:
    run = Run(1)
    run.set(1)
    run.members.append(HandMember(VERIFIER, 1))
    run.round()
    assert run.ranks(1) == names(1, 0)
    run.sender()
    run.load()
    assert run.set(2) == names(1, 2)


def test_one_that_is_lost_is_no_member_of_the_next_group_and_its_replacement_is() -> None:
    run = Run(3)
    run.set(1)
    lost = run.members[1]
    lost.answer("load_weights", ActorLostError("killed"))
    run.sender(FAILED)
    run.load()
    assert lost.error is not None
    run.members[1] = HandMember(VERIFIER, 1, "b")
    run.round()
    assert run.ranks(1)[f"{VERIFIER}-1#b"] == 0
    run.load()
    assert run.set(2) == {f"{VERIFIER}-0#a": 1, f"{VERIFIER}-1#b": 2, f"{VERIFIER}-2#a": 3}


def test_a_load_that_is_repeated_fetches() -> None:
    run = Run(2)
    run.set(1)
    run.members[0].answer("load_weights", "its answer was lost")
    run.sender(FAILED)
    run.round()
    assert run.ranks(1) == names(0, 2) and run.members[0].versions == [1, 1]
    run.load()
    assert run.sync.wait_for(1, 0.0) and list(run.sizes()) == [1]


def test_a_version_that_comes_before_the_end_of_a_plan_waits_for_nothing() -> None:
    run = Run(2)
    run.set(1)
    hangs = run.members[1]
    run.load(hangs)
    assert run.set(2) == {f"{VERIFIER}-0#a": 0}, "the sender still waits for the other one"
    run.sender(FAILED)
    assert run.set(3) == {}, "a load of an older version is in flight everywhere"
    run.load(hangs)
    assert run.ranks(3) == {f"{VERIFIER}-0#a": 1}, "one that hangs is no member"
    run.sender()
    run.load()
    assert run.ranks(3) == names(1, 0)
    run.load()
    assert run.sync.wait_for(3, 0.0) and run.sizes() == {1: 3, 3: 2}


def test_after_three_failures_in_a_row_there_are_no_more_broadcasts() -> None:
    run, numbers = Run(1), itertools.count(1)

    def step(error: SpecActorError | None) -> int:
        number = next(numbers)
        (rank,) = run.set(number).values()
        run.sender(error)
        run.load()
        assert run.sync.wait_for(number, 0.0)
        return rank

    assert [step(error) for error in (FAILED, FAILED, None, FAILED, FAILED, FAILED)] == [1] * 6
    assert [step(None) for _ in range(3)] == [0] * 3


def test_a_version_that_is_given_up_is_sent_to_nobody() -> None:
    run = Run(1)
    run.set(1)
    run.members[0].answer("load_weights", WeightsError("it did not arrive"))
    run.round()
    run.members.append(HandMember(VERIFIER, 1))
    run.sender()
    assert run.members[1].versions == []


def test_two_runs_with_the_same_version_of_a_trainer_have_groups_of_their_own() -> None:
    """`bench train` sends each version to a plain rollout and to one with drafts."""
    plans = [Broadcasts().plan(version_of(1), [f"{VERIFIER}-0#{suffix}"]) for suffix in "ab"]
    assert len({plan.broadcast.group for plan in plans if plan and plan.broadcast}) == 2


def test_limits_cover_a_broadcast_that_fails_and_the_fetch_after_it() -> None:
    plain = WeightSet(1, (), 10**9)
    assert plain.load_s == 20.0 and version_of(1, 10**9).load_s == 20.0 + JOIN_S + 20.0 + 10.0
    one, now = HandMember(VERIFIER), HandClock()
    assert one.calls.start("trainer", "send_weights", deadline_s=UPDATE_TIMEOUT_S).next_at() == now.now() + 300.0


_EVENTS = st.lists(st.tuples(st.sampled_from(["plan", "take", "end", "fail"]), st.integers(0, 3)), max_size=40)


@given(_EVENTS)
def test_every_rank_is_given_once_and_one_broadcast_runs_at_a_time(events: list[tuple[str, int]]) -> None:
    broadcasts, version, given_out, is_open = Broadcasts(), 0, set[Any](), False
    for event, number in events:
        if event == "plan":
            version += 1
            planned = broadcasts.plan(version_of(version), [f"v{index}" for index in range(number)])
            assert planned is None or (not is_open and planned.broadcast and planned.broadcast.size == 1 + number)
            is_open |= planned is not None
        elif event == "take" and version:
            got = broadcasts.of(version_of(version), f"v{number}").broadcast
            assert got is None or (0 < got.rank < got.size and is_open)
            assert got is None or (version, got.rank) not in given_out
            given_out |= {(version, got.rank)} if got else set()
        elif event in ("end", "fail") and is_open:
            broadcasts.end("" if event == "end" else "reset")
            is_open = False
