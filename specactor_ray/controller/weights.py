"""Bringing everyone to the current version of the weights they follow: the policy's, or those a drafter learns."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from specactor_ray.config.lending import inline_drafters
from specactor_ray.config.online import OnlineWhere
from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member
from specactor_ray.controller.state import VERIFIER, Phase
from specactor_ray.errors import ActorLostError, InputError, SpecActorError
from specactor_ray.messages import WeightSet

logger = logging.getLogger(__name__)

_MAX_FAILURES, _RETRY_S = 3, 2.0
"""Attempts to give a member its weights, and the pause between two."""
TRAINER = "trainer"
"""Who offers the weights of a method that the trainer teaches."""


class WeightNews:
    """Sends the current weights to members that lack them; one call per member in flight.

    A verifier without the current weights is not shown to others (`Member.serves`), and a draft actor not before it has
    had current ones. One that fails to take them again and again is marked dead, and so replaced.

    A method that learns online has weights of its own. One draft actor of it learns, the oldest; when that is gone, the
    next one goes on from the newest version that was offered here. Nobody uses a version before it was offered, so that
    a version is one set of weights whoever dies.

    Args:
        config: Says which draft methods follow the policy (verifiers always do), and which learn.
    """

    def __init__(self, config: Config) -> None:
        self._followers = {VERIFIER, *(drafter.method for drafter in config.drafters if drafter.follow_policy)}
        self.current: WeightSet | None = None
        """None until the first update: everyone has what the configuration names."""
        self._learnt: dict[str, WeightSet] = {}
        where = {drafter.method: drafter.online.where for drafter in config.drafters}
        self._teachers = {method: TRAINER for method in where if where[method] is OnlineWhere.trainer}
        """Method → who may offer weights for it."""
        self._hosted = [one.method for one in inline_drafters(config) if one.method in self._teachers]
        """Methods that verifiers draft by themselves, and that are taught."""
        self._learning = [method for method in where if where[method] is OnlineWhere.drafter]
        self._offers: deque[tuple[str, str, WeightSet]] = deque()

    def offer(self, method: str, teacher: str, weights: WeightSet) -> None:
        """New weights of a method; from any thread. They count if `teacher` teaches it and the version is newer."""
        self._offers.append((method, teacher, weights))

    def tell(self, members: Iterable[Member], now: float) -> None:
        """Send what is missing and take the answers that came; `now` in monotonic seconds. Never blocks."""
        members = list(members)
        self._take_offers()
        for member in members:
            if member.phase is not Phase.READY or member.actor is None:
                continue
            state = member.actor.weights.state()
            if state == "done":
                member.weight_version, member.weight_failures = member.sent_version, 0
            elif state == "failed":
                member.sent_version = member.weight_version
                member.weight_failures += 1
                member.weights_at = now + _RETRY_S
                error = member.actor.weights.error
                if isinstance(error, ActorLostError):
                    member.actor.error = error
                elif member.weight_failures >= _MAX_FAILURES:
                    member.actor.error = SpecActorError(f"weights: {error}")
                if member.actor.error is not None:
                    continue
            current = self._is_current(member)
            member.serves = current or (member.serves and member.key != VERIFIER)
            if not current and member.sent_version == member.weight_version and now >= member.weights_at:
                self._send(member)
        for method in self._learning:
            self._choose_teacher(method, [member for member in members if member.key == method])
        for method in self._hosted:
            self._teach(method, [member for member in members if member.key == VERIFIER])

    def set_current(self, weights: WeightSet) -> None:
        """New weights of the policy.

        Raises:
            InputError: They are not newer than the current ones: a version is one set of weights, for ever.
        """
        if self.current is None or weights.version > self.current.version:
            self.current = weights
        elif weights.version < self.current.version or weights.buckets != self.current.buckets:
            raise InputError(f"weights of version {weights.version} come after version {self.current.version}")

    def in_place(self, members: Iterable[Member]) -> bool:
        """Whether no verifier that is ready lacks the current version. Draft actors may lag: it costs speed at most."""
        verifiers = (member for member in members if member.key == VERIFIER and member.phase is Phase.READY)
        return all(self._is_current(member) for member in verifiers)

    def _wanted(self, member: Member) -> WeightSet | None:
        return self.current if member.key in self._followers else self._learnt.get(member.key)

    def _is_current(self, member: Member) -> bool:
        wanted = self._wanted(member)
        return wanted is None or member.weight_version == wanted.version

    def _send(self, member: Member) -> None:
        wanted = self._wanted(member)
        assert wanted is not None and member.actor is not None  # callers have looked
        member.sent_version = wanted.version
        member.actor.weights.send(member.actor.call("load_weights", wanted))

    def _take_offers(self) -> None:
        while self._offers:
            method, teacher, weights = self._offers.popleft()
            known = self._learnt.get(method)
            newer = known is None or weights.version > known.version
            if newer and teacher == self._teachers.get(method):
                self._learnt[method] = weights
            else:
                logger.info("weights %d of %s from %s are not wanted", weights.version, method, teacher)

    def _teach(self, method: str, verifiers: Iterable[Member]) -> None:
        """Send verifiers that draft by the method its newest weights; what fails is made up for by the next version."""
        newest = self._learnt.get(method)
        for member in verifiers:
            if newest is None or member.phase is not Phase.READY or member.actor is None:
                continue
            if member.actor.learning.state() != "in flight" and member.taught_version != newest.version:
                member.taught_version = newest.version
                member.actor.learning.send(member.actor.call("teach", method, newest))

    def _choose_teacher(self, method: str, members: Iterable[Member]) -> None:
        """Those on lent seats go when the tail ends; they do not learn."""
        able = [member for member in members if member.serves and member.phase is Phase.READY and not member.host_id]
        for member in able:
            if member.actor is not None:
                member.actor.learning.state()  # a failure is logged; the actor drafts on
        if not able or self._teachers.get(method) in {member.actor_id for member in able}:
            return
        teacher = next((member for member in able if self._is_current(member)), None)
        if teacher is not None and teacher.actor is not None:
            self._teachers[method] = teacher.actor_id
            newest = self._learnt.get(method)
            teacher.actor.learning.send(teacher.actor.call("learn", newest))
            logger.info("%s learns from version %d on", teacher.actor_id, newest.version if newest else 0)
