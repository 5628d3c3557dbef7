"""Draft actors in groups: everyone is served, evenly, and little changes when members come and go."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.actors.specs import VERIFIER, ClusterView, Phase
from specactor_ray.cluster.supervised import Errand
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import drafter_specs
from specactor_ray.controller.groups import Service, assign_drafters, group_of
from specactor_ray.controller.members import Member, PeerNews, next_view

drafters = st.sets(st.sampled_from([f"ngram-{n}#a" for n in range(9)]))
groups = st.sets(st.integers(0, 7))


@pytest.mark.parametrize(
    ("replicas", "most", "sizes"),
    [
        (1, 0, [1]),
        (8, 0, [8]),
        (9, 0, [5, 4]),
        (256, 0, [8] * 32),
        (4, 2, [2, 2]),
        (5, 2, [2, 2, 1]),
        (3, 1, [1, 1, 1]),
        (20, 64, [20]),
    ],
)
def test_groups_are_of_neighbours_and_of_about_equal_size(replicas: int, most: int, sizes: list[int]) -> None:
    of_seat = [group_of(seat, replicas, most) for seat in range(replicas)]
    assert of_seat == sorted(of_seat) and list(Counter(of_seat).values()) == sizes


def loads(service: Service, side: int, everyone: set[Any]) -> list[int]:
    count = Counter(pair[side] for pair in service)
    return [count[one] for one in everyone]


@given(st.lists(st.tuples(drafters, groups), min_size=1, max_size=6))
def test_whatever_comes_and_goes_all_are_served_and_evenly(history: list[tuple[set[str], set[int]]]) -> None:
    service: Service = frozenset()
    for ready, serving in history:
        service = assign_drafters(ready, serving, service)
        assert {drafter for drafter, _ in service} <= ready and {group for _, group in service} <= serving
        if not ready or not serving:
            assert not service
            continue
        for side, everyone in ((0, ready), (1, serving)):
            counts = loads(service, side, everyone)
            assert min(counts) >= 1 and max(counts) - min(counts) <= 1
        assert len(service) == max(len(ready), len(serving))
        assert assign_drafters(ready, serving, service) == service


@given(st.sets(st.sampled_from([f"ngram-{n}#a" for n in range(9)]), min_size=2), st.integers(1, 8), st.data())
def test_when_one_draft_actor_is_replaced_nobody_else_leaves_a_group(
    ready: set[str], number: int, data: st.DataObject
) -> None:
    before = assign_drafters(ready, range(number))
    lost = data.draw(st.sampled_from(sorted(ready)))
    after = assign_drafters(ready - {lost} | {"ngram-9#b"}, range(number), before)
    assert {pair for pair in before if pair[0] != lost} <= after


class Actor:
    """Keeps what it is told about its peers."""

    def __init__(self, name: str) -> None:
        self.handle, self.peers = name, set[str]()
        self.news = Errand(name)

    def call(self, method: str, version: int, peers: Any, deadline_s: float) -> Any:
        self.peers = {getattr(one, "actor_id", one) for one in peers}
        return SimpleNamespace(poll=lambda: True, error=None)


class Cast:
    """Members that are all ready."""

    def __init__(self, verifiers: int, ngram: int, suffix: int, most: int = 0) -> None:
        self.config = from_mapping(
            {
                "target": {"replicas": verifiers},
                "speculation": {"verifiers_per_group": most},
                "drafters": [{"method": "ngram", "replicas": ngram}, {"method": "suffix", "replicas": suffix}],
            }
        )
        self.members: dict[str, Member] = {}
        for key, number in ((VERIFIER, verifiers), ("ngram", ngram), ("suffix", suffix)):
            for index in range(number):
                self.add(key, index)
        self.view = ClusterView()
        self.news = PeerNews(self.config)

    def add(self, key: str, index: int, suffix: str = "a") -> str:
        name = f"{key}-{index}#{suffix}"
        seat: Any = SimpleNamespace(index=index)
        member = Member(name, key, seat, 0.0, 0.0, Phase.READY, serves=True)
        member.actor = Actor(name)  # type: ignore[assignment]
        self.members[name] = member
        return name

    def tell(self) -> dict[str, set[str]]:
        """Member → its peers."""
        self.view = next_view(self.view, list(self.members.values()), drafter_specs(self.config), {}, {})
        self.news.tell(self.members.values(), self.view, 0.0)
        return {name: member.actor.peers for name, member in self.members.items()}  # type: ignore[union-attr]


def methods(peers: set[str]) -> list[str]:
    return sorted(name.partition("-")[0] for name in peers)


class TestPeers:
    def test_up_to_eight_verifiers_have_all_draft_actors(self) -> None:
        cast = Cast(verifiers=8, ngram=2, suffix=1)
        told = cast.tell()
        verifiers = {name for name in told if name.startswith(VERIFIER)}
        for name, peers in told.items():
            assert peers == (told.keys() - verifiers if name in verifiers else verifiers)

    def test_more_are_served_in_groups_and_both_sides_agree(self) -> None:
        cast = Cast(verifiers=16, ngram=4, suffix=1)
        told = cast.tell()
        verifiers = [name for name in told if name.startswith(VERIFIER)]
        for name in verifiers:
            assert methods(told[name]) == ["ngram", "ngram", "suffix"]
        assert all(told[name] == told[f"{VERIFIER}-0#a"] for name in verifiers[:8])
        for name, peers in told.items():
            assert all(name in told[peer] for peer in peers)

    def test_the_last_draft_actor_of_a_method_serves_everyone(self) -> None:
        cast = Cast(verifiers=16, ngram=2, suffix=1)
        cast.tell()
        del cast.members["ngram-1#a"]
        told = cast.tell()
        assert len(told["ngram-0#a"]) == 16
        cast.add("ngram", 1, "b")
        told = cast.tell()
        assert len(told["ngram-0#a"]) == len(told["ngram-1#b"]) == 8

    def test_draft_actors_follow_the_verifiers_that_are_left(self) -> None:
        cast = Cast(verifiers=6, ngram=3, suffix=1, most=2)
        for index in (0, 1, 2, 3):
            del cast.members[f"{VERIFIER}-{index}#a"]
        told = cast.tell()
        left = {f"{VERIFIER}-4#a", f"{VERIFIER}-5#a"}
        assert all(told[f"ngram-{n}#a"] == left for n in range(3))
        assert all(methods(told[name]) == ["ngram", "ngram", "ngram", "suffix"] for name in left)

    def test_a_verifier_that_is_replaced_is_in_the_same_group(self) -> None:
        cast = Cast(verifiers=16, ngram=2, suffix=2)
        before = cast.tell()[f"{VERIFIER}-3#a"]
        del cast.members[f"{VERIFIER}-3#a"]
        cast.tell()
        cast.add(VERIFIER, 3, "b")
        assert cast.tell()[f"{VERIFIER}-3#b"] == before
