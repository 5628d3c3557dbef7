"""Bringing everyone who follows the policy to the current version of its weights."""

from __future__ import annotations

from collections.abc import Iterable

from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member
from specactor_ray.controller.state import VERIFIER, Phase
from specactor_ray.errors import SpecActorError
from specactor_ray.messages import WeightSet


class WeightNews:
    """Sends the current weights to members that lack them; one call per member in flight.

    A member that joins late is not shown to others (`Member.serves`) before it has them. One that fails to take them is
    marked dead, and so replaced.

    Args:
        config: Says which draft methods follow the policy; verifiers always do.
    """

    def __init__(self, config: Config) -> None:
        self._followers = {VERIFIER, *(drafter.method for drafter in config.drafters if drafter.follow_policy)}
        self.current: WeightSet | None = None
        """None until the first update: everyone has what the configuration names."""

    def tell(self, members: Iterable[Member]) -> None:
        """Send what is missing and take the answers that came. Never blocks."""
        for member in members:
            if member.phase is not Phase.READY or member.actor is None:
                continue
            if member.actor.weights.state() == "done":
                member.weight_version = member.sent_version
            elif member.actor.weights.error is not None:
                member.actor.error = SpecActorError(f"weights: {member.actor.weights.error}")
                continue
            if self._is_current(member):
                member.serves = True
            elif member.sent_version == member.weight_version:
                self._send(member)

    def all_current(self, members: Iterable[Member]) -> bool:
        """Whether nobody who is ready still lacks the current version."""
        return all(self._is_current(member) for member in members if member.phase is Phase.READY)

    def _is_current(self, member: Member) -> bool:
        if self.current is None or member.key not in self._followers:
            return True
        return member.weight_version == self.current.version

    def _send(self, member: Member) -> None:
        assert self.current is not None and member.actor is not None  # callers have looked
        member.sent_version = self.current.version
        member.actor.weights.send(member.actor.handle.load_weights.remote(self.current))
