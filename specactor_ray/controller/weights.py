"""Distribution of the current weights to all actors: the policy's, or those of a drafter that is taught."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.config.methods import inline_drafters, taught_by_trainer
from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member
from specactor_ray.core.errors import ActorLostError, InputError, SpecActorError
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

_MAX_FAILURES, _RETRY_S = 3, 2.0
"""Attempts to send a member its weights, and seconds between two attempts."""


class WeightNews:
    """Sends the current weights to members that lack them; one call per member is in flight.

    A verifier is in the view only with the current weights (`Member.serves`), and a draft actor only once it has had
    current ones. A member that repeatedly fails to load them is marked dead, and so replaced.

    A method that the trainer teaches has its own weights and versions; no call waits for them.
    """

    def __init__(self, config: Config) -> None:
        self._followers = {VERIFIER, *(drafter.method for drafter in config.drafters if drafter.follow_policy)}
        self.current: WeightSet | None = None
        """Current weights of the policy; None until the first update: all actors have those of the configuration."""
        pupil = taught_by_trainer(config)
        self._pupil = pupil.method if pupil is not None else ""
        """The method that is taught; empty without one."""
        self._is_hosted = pupil in inline_drafters(config)
        """Whether verifiers host this method."""
        self._learnt: WeightSet | None = None
        """Newest weights of this method; None: it has those of the configuration."""

    def offer(self, method: str, weights: WeightSet) -> None:
        """Take new weights of a method. They count if it is taught and the version is newer."""
        if method == self._pupil and (self._learnt is None or weights.version > self._learnt.version):
            self._learnt = weights
        else:
            logger.info("weights %d of %s are not wanted", weights.version, method)

    def tell(self, members: Iterable[Member], now: float) -> None:
        """Send missing weights and take the answers that have arrived; `now` in monotonic seconds. Never blocks."""
        members = list(members)
        for member in members:
            if member.phase is not Phase.READY or member.actor is None:
                continue
            errand = member.actor.weights
            if errand.state() == "failed":
                errand.retry_at = now + _RETRY_S
                if isinstance(errand.error, ActorLostError):
                    member.actor.error = errand.error
                elif errand.failures >= _MAX_FAILURES:
                    member.actor.error = SpecActorError(f"weights: {errand.error}")
                if member.actor.error is not None:
                    continue
            wanted = self._wanted(member)
            member.serves = self._is_current(member) or (member.serves and member.key != VERIFIER)
            if wanted is not None and errand.is_due(wanted.version, now):
                errand.send(member.actor.call("load_weights", wanted), wanted.version)
        if self._is_hosted:
            self._teach([member for member in members if member.key == VERIFIER])

    def set_current(self, weights: WeightSet) -> None:
        """Set new weights of the policy.

        Raises:
            InputError: They are not newer than the current ones: a version is never used for two sets of weights.
        """
        if self.current is None or weights.version > self.current.version:
            self.current = weights
        elif weights.version < self.current.version or weights.buckets != self.current.buckets:
            raise InputError(f"weights of version {weights.version} come after version {self.current.version}")

    def in_place(self, members: Iterable[Member]) -> bool:
        """Whether all ready verifiers have the current version. Draft actors may lag, which costs speed only."""
        verifiers = (member for member in members if member.key == VERIFIER and member.phase is Phase.READY)
        return all(self._is_current(member) for member in verifiers)

    def _wanted(self, member: Member) -> WeightSet | None:
        if member.key in self._followers:
            return self.current
        return self._learnt if member.key == self._pupil else None

    def _is_current(self, member: Member) -> bool:
        wanted = self._wanted(member)
        return wanted is None or member.weight_version == wanted.version

    def _teach(self, verifiers: Iterable[Member]) -> None:
        """Send the taught method's newest weights to verifiers that host it. A failed call is not repeated: the next
        version replaces it."""
        newest = self._learnt
        for member in verifiers:
            if newest is None or member.phase is not Phase.READY or member.actor is None:
                continue
            errand = member.actor.learning
            if errand.state() != "in flight" and errand.sent != newest.version:
                errand.send(member.actor.call("teach", self._pupil, newest), newest.version)
