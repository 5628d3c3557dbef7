"""Who gets which weights: the policy's and those a method is taught, whoever comes, dies or is offered what when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from specactor_ray.cluster.supervised import SupervisedActor
from specactor_ray.controller.weights import WeightNews

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member
from specactor_ray.core.errors import ActorLostError, InputError, SpecActorError
from specactor_ray.transport.messages import WeightSet
from tests.fakes.clocks import HandClock
from tests.fakes.hand_transport import HandTransport


class Actor(SupervisedActor):
    """A supervised actor whose calls are answered when the test says so."""

    def __init__(self, name: str) -> None:
        self.transport = HandTransport()
        super().__init__(name, name, Calls(self.transport, HandClock()), start_timeout_s=10.0)

    @property
    def versions(self) -> list[int]:
        """Of all weights it was told to load."""
        return [one.arguments[0].version for one in self.transport.sent if one.method == "load_weights"]

    @property
    def taught(self) -> list[tuple[str, int]]:
        """Method and version of all weights that its own drafters were to take."""
        told = [one.arguments for one in self.transport.sent if one.method == "teach"]
        return [(method, weights.version) for method, weights in told]

    def awaits(self, method: str) -> bool:
        return bool(self.transport.open(self.actor_id, method))

    def answer(self, method: str, error: str = "") -> None:
        """Answer the call of this method that is open, if one is."""
        waiting = self.transport.open(self.actor_id, method)
        assert len(waiting) <= 1, "one call at a time"
        for one in waiting:
            one.answer(None, SpecActorError(error) if error else None)


def member(name: str, key: str = "eagle") -> Any:
    made = Member(name, key, None, 0.0, 0.0, Phase.READY)  # type: ignore[arg-type]
    made.actor = Actor(name)
    return made


def config(where: str = "trainer", mode: str = "decoupled") -> Config:
    head = {"method": "eagle", "model": "m", "online": {"where": where}}
    return from_mapping({"mode": mode, "drafters": [{"method": "ngram"}, head]})


_NOW = itertools.count(0.0, 10.0)


def tell(news: WeightNews, members: list[Any]) -> None:
    """The next round of the controller, later than any pause."""
    news.tell(members, next(_NOW))


def settle(news: WeightNews, members: list[Any], rounds: int = 6) -> None:
    for _ in range(rounds):
        tell(news, members)
        for one in members:
            one.actor.answer("load_weights")


def test_all_draft_actors_of_a_method_get_the_versions_it_was_taught() -> None:
    news, members = WeightNews(config()), [member("e0"), member("e1"), member("n0", "ngram")]
    members.append(member("v0", VERIFIER))
    settle(news, members)
    assert all(one.serves for one in members)
    news.offer("eagle", WeightSet(1, ()))
    news.offer("ngram", WeightSet(3, ()))  # nobody teaches it
    settle(news, members)
    news.offer("eagle", WeightSet(3, ()))
    news.offer("eagle", WeightSet(2, ()))
    settle(news, members)
    news.offer("eagle", WeightSet(3, ()))
    settle(news, members)
    assert [one.actor.versions for one in members] == [[1, 3], [1, 3], [], []], "only the newest travels"
    assert [one.weight_version for one in members] == [3, 3, 0, 0]


def test_one_that_joins_late_serves_when_it_has_the_newest() -> None:
    news, members = WeightNews(config()), [member("e0")]
    news.offer("eagle", WeightSet(4, ()))
    settle(news, members)
    late = member("e1")
    tell(news, [late, *members])
    assert not late.serves and late.actor.versions == [4]
    settle(news, [late, *members])
    assert late.serves and late.weight_version == 4


def test_without_a_pupil_nobody_is_taught() -> None:
    news, members = WeightNews(config("off")), [member("e0"), member("v0", VERIFIER)]
    news.offer("eagle", WeightSet(1, ()))
    settle(news, members)
    assert [one.weight_version for one in members] == [0, 0] and members[1].actor.taught == []


def test_verifiers_that_draft_themselves_are_taught_and_the_policy_does_not_wait_for_it() -> None:
    news, verifiers = WeightNews(config("trainer", "coupled")), [member("v0", VERIFIER), member("v1", VERIFIER)]
    news.offer("eagle", WeightSet(2, ()))
    tell(news, verifiers)
    news.offer("eagle", WeightSet(3, ()))
    news.offer("eagle", WeightSet(4, ()))
    tell(news, verifiers)
    assert all(one.serves and one.weight_version == 0 for one in verifiers) and news.in_place(verifiers)
    verifiers[0].actor.answer("teach")
    verifiers[1].actor.answer("teach", "the object is lost")  # the next version makes up for it
    tell(news, verifiers)
    assert [one.actor.taught for one in verifiers] == [[("eagle", 2), ("eagle", 4)]] * 2
    late = member("v2", VERIFIER)
    tell(news, [late])
    assert late.serves and late.actor.taught == [("eagle", 4)] and late.actor.versions == []


def test_the_policy_does_not_wait_for_heads() -> None:
    news, head, verifier = WeightNews(config()), member("e0"), member("v0", VERIFIER)
    settle(news, [head, verifier])
    news.offer("eagle", WeightSet(1, ()))
    tell(news, [head, verifier])
    assert head.actor.awaits("load_weights")
    news.set_current(WeightSet(7, ()))
    assert not news.in_place([head, verifier])
    tell(news, [verifier])
    verifier.actor.answer("load_weights")
    tell(news, [verifier])
    assert news.in_place([head, verifier]) and head.weight_version == 0 and head.serves


def test_one_that_cannot_take_a_head_is_marked_dead() -> None:
    news, first, second = WeightNews(config()), member("e0"), member("e1")
    settle(news, [first, second])
    news.offer("eagle", WeightSet(1, ()))
    tell(news, [first, second])
    first.actor.answer("load_weights")
    for _ in range(3):  # once may have been bad luck
        assert second.actor.error is None and second.actor.awaits("load_weights")
        second.actor.answer("load_weights", "shapes differ")
        tell(news, [first, second])
        tell(news, [first, second])
    assert "shapes differ" in str(second.actor.error) and first.weight_version == 1 and first.actor.error is None


def test_weights_that_could_not_be_had_are_sent_again_after_a_pause() -> None:
    news, one = WeightNews(config()), member("v0", VERIFIER)
    news.set_current(WeightSet(1, ()))
    news.tell([one], 0.0)
    one.actor.answer("load_weights", "the object is lost")
    news.tell([one], 1.0)
    news.tell([one], 2.9)
    assert not one.actor.awaits("load_weights")
    news.tell([one], 3.0)
    assert one.actor.awaits("load_weights")


def test_one_that_is_gone_is_replaced_at_once() -> None:
    news, one = WeightNews(config()), member("v0", VERIFIER)
    news.set_current(WeightSet(1, ()))
    tell(news, [one])
    one.actor.transport.open("v0", "load_weights")[0].answer(error=ActorLostError("killed", node_lost=True))
    tell(news, [one])
    assert isinstance(one.actor.error, ActorLostError) and one.actor.error.node_lost


def test_a_success_forgets_earlier_failures() -> None:
    news, one = WeightNews(config()), member("v0", VERIFIER)
    for version in range(1, 5):
        news.set_current(WeightSet(version, ()))
        for _ in range(2):
            tell(news, [one])
            one.actor.answer("load_weights", "the object is lost")
            tell(news, [one])
        tell(news, [one])
        one.actor.answer("load_weights")
    tell(news, [one])
    assert one.actor.error is None and one.weight_version == 4 and one.serves


def test_a_verifier_serves_only_with_the_current_weights() -> None:
    news, one = WeightNews(config()), member("v0", VERIFIER)
    tell(news, [one])
    assert one.serves and news.in_place([one])
    news.set_current(WeightSet(1, ("a",)))
    assert not news.in_place([one])
    tell(news, [one])
    assert not one.serves
    news.set_current(WeightSet(2, ("b",)))  # while the first is on its way
    one.actor.answer("load_weights")
    tell(news, [one])
    assert not one.serves and one.actor.versions == [1, 2] and not news.in_place([one])
    one.actor.answer("load_weights")
    tell(news, [one])
    assert one.serves and news.in_place([one])


def test_a_version_is_one_set_of_weights_for_ever() -> None:
    news = WeightNews(config())
    news.set_current(WeightSet(3, ("a",)))
    news.set_current(WeightSet(3, ("a",)))  # asked again, because an answer was lost
    for wrong in (WeightSet(2, ("a",)), WeightSet(3, ("b",))):
        with pytest.raises(InputError, match="come after version 3"):
            news.set_current(wrong)
    assert news.current == WeightSet(3, ("a",))
