"""Who gets which weights: the policy's and those a method learns, whoever comes, dies or offers when."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member
from specactor_ray.controller.state import VERIFIER, Phase
from specactor_ray.controller.weights import TRAINER, WeightNews
from specactor_ray.errors import SpecActorError
from specactor_ray.messages import WeightSet


class Errand:
    """A call that is answered when the test says so."""

    def __init__(self) -> None:
        self.error: SpecActorError | None = None
        self.waiting, self._answered = False, False

    def send(self, ref: Any) -> None:
        assert not self.waiting and not self._answered, "one call at a time"
        self.waiting = True

    def answer(self, error: str = "") -> None:
        self.error = SpecActorError(error) if error else None
        self._answered, self.waiting = self.waiting, False

    def state(self) -> str:
        if self.waiting:
            return "in flight"
        if not self._answered:
            return "idle"
        self._answered = False
        return "failed" if self.error else "done"


class Method:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def remote(self, weights: WeightSet | None) -> None:
        self._told.append(None if weights is None else weights.version)


class Actor:
    """What `WeightNews` uses of a supervised actor."""

    def __init__(self) -> None:
        self.weights, self.learning = Errand(), Errand()
        self.error: SpecActorError | None = None
        self.versions: list[int] = []
        self.lessons: list[int | None] = []
        self.handle = self
        self.load_weights, self.learn = Method(self.versions), Method(self.lessons)


def member(name: str, key: str = "eagle", host: str = "") -> Member:
    made: Any = Member(name, key, None, 0.0, 0.0, Phase.READY, host_id=host)  # type: ignore[arg-type]
    made.actor = Actor()
    return made  # type: ignore[no-any-return]


def config(where: str) -> Config:
    head = {"method": "eagle", "model": "m", "online": {"where": where}}
    return from_mapping({"drafters": [{"method": "ngram"}, head]})


def settle(news: WeightNews, members: list[Any], rounds: int = 6) -> None:
    for _ in range(rounds):
        news.tell(members)
        for one in members:
            one.actor.weights.answer()
            one.actor.learning.answer()


def test_one_draft_actor_learns_and_all_of_its_method_get_its_versions() -> None:
    news, members = WeightNews(config("drafter")), [member("e0"), member("e1"), member("n0", "ngram")]
    members.append(member("v0", VERIFIER))
    settle(news, members)
    assert all(one.serves for one in members)
    assert [one.actor.lessons for one in members] == [[None], [], [], []]
    news.offer("eagle", "e0", WeightSet(1, ()))
    news.offer("eagle", "e1", WeightSet(2, ()))  # nobody told it to learn
    news.offer("ngram", "n0", WeightSet(3, ()))
    settle(news, members)
    news.offer("eagle", "e0", WeightSet(2, ()))
    news.offer("eagle", "e0", WeightSet(3, ()))
    settle(news, members)
    news.offer("eagle", "e0", WeightSet(3, ()))
    settle(news, members)
    assert [one.actor.versions for one in members] == [[1, 3], [1, 3], [], []], "only the newest travels"
    assert [one.weight_version for one in members] == [3, 3, 0, 0]


def test_one_that_joins_late_serves_when_it_has_the_newest_and_takes_over_from_there() -> None:
    news, members = WeightNews(config("drafter")), [member("lent", host="v1"), member("e0")]
    settle(news, members)
    assert members[0].actor.lessons == [] and members[1].actor.lessons == [None], "those on lent seats do not learn"
    news.offer("eagle", "e0", WeightSet(4, ()))
    settle(news, members)
    late = member("e1")
    members = [late, members[1]]
    news.tell(members)
    assert not late.serves and late.actor.versions == [4]
    settle(news, members)
    assert late.serves and late.actor.lessons == []
    members[1].phase = Phase.DEAD
    news.offer("eagle", "e0", WeightSet(5, ()))  # its last words: nobody else teaches yet
    settle(news, [late, members[1]])
    assert late.actor.lessons == [5] and late.weight_version == 5
    news.offer("eagle", "e0", WeightSet(9, ()))  # now somebody does
    news.offer("eagle", "e1", WeightSet(6, ()))
    settle(news, [late])
    assert late.weight_version == 6


def test_the_trainers_weights_are_taken_from_nobody_else() -> None:
    news, members = WeightNews(config("trainer")), [member("e0")]
    news.offer("eagle", "e0", WeightSet(1, ()))
    settle(news, members)
    assert members[0].weight_version == 0 and members[0].actor.lessons == []
    news.offer("eagle", TRAINER, WeightSet(1, ()))
    settle(news, members)
    assert members[0].weight_version == 1


def test_the_policy_does_not_wait_for_heads() -> None:
    news, head, verifier = WeightNews(config("drafter")), member("e0"), member("v0", VERIFIER)
    settle(news, [head, verifier])
    news.offer("eagle", "e0", WeightSet(1, ()))
    news.tell([head, verifier])
    assert head.actor.weights.waiting
    news.current = WeightSet(7, ())
    assert not news.all_current([head, verifier])
    news.tell([verifier])
    verifier.actor.weights.answer()
    news.tell([verifier])
    assert news.all_current([head, verifier]) and head.weight_version == 0 and head.serves


def test_one_that_cannot_take_a_head_is_marked_dead_and_one_that_cannot_learn_drafts_on() -> None:
    news, first, second = WeightNews(config("drafter")), member("e0"), member("e1")
    news.tell([first, second])
    first.actor.learning.answer("no memory")
    settle(news, [first, second])
    assert first.actor.error is None and first.serves
    news.offer("eagle", "e0", WeightSet(1, ()))
    news.tell([first, second])
    second.actor.weights.answer("shapes differ")
    first.actor.weights.answer()
    news.tell([first, second])
    assert "shapes differ" in str(second.actor.error) and first.weight_version == 1


@pytest.mark.parametrize("seed", range(30))
def test_versions_only_grow_whoever_dies(seed: int) -> None:
    """Each version is one learner's work: nobody ever goes back, and there is never a second set of the same number."""
    rng, news, names = random.Random(seed), WeightNews(config("drafter")), iter(range(1000))
    members: list[Any] = [member(f"e{next(names)}") for _ in range(2)]
    learner_of: dict[int, str] = {}
    said: dict[str, int] = {}
    for _ in range(300):
        event = rng.random()
        if event < 0.1 and members:
            rng.choice(members).phase = Phase.DEAD
        elif event < 0.25 and len(members) < 4:
            members.append(member(f"e{next(names)}", host="v9" if rng.random() < 0.3 else ""))
        elif event < 0.4:
            members = [one for one in members if one.phase is Phase.READY]
        for one in members:
            if one.actor.lessons and rng.random() < 0.4:
                said[one.actor_id] = said.get(one.actor_id, one.actor.lessons[0] or 0) + 1
                news.offer("eagle", one.actor_id, WeightSet(said[one.actor_id], (one.actor_id,)))
            if rng.random() < 0.5:
                one.actor.weights.answer()
            if rng.random() < 0.5:
                one.actor.learning.answer()
        news.tell(members)
        newest = news._learnt.get("eagle")
        if newest is not None:
            assert learner_of.setdefault(newest.version, newest.buckets[0]) == newest.buckets[0]
            assert newest.version == max(learner_of)
    for one in members:
        assert one.actor.versions == sorted(set(one.actor.versions)) and len(one.actor.lessons) <= 1
    assert len(set(learner_of.values())) > 1, "nobody took over, so nothing was tested"
