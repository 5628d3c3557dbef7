"""Conditions for the success and the failure of a run's start.

A run has started when as many verifiers and draft actors are ready as are configured and still desired. Actors that
`scale` adds are requested once those have their room, and may still be pending when the run has started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specactor_ray.actors.specs import VERIFIER, ClusterView, Phase
from specactor_ray.controller.members import Member
from specactor_ray.controller.reconcile import DesiredState, FailureRecord
from specactor_ray.core.errors import ActorLostError, SpecActorError, UserError


@dataclass
class FirstStart:
    """The start of one run.

    Attributes:
        is_placed: All configured actors have had room at the same time.
        error: Why the start cannot succeed; None while it can.

    Args:
        configured: The configured actors.
        placement_timeout_s: Longest wait of a configured actor for room, in seconds.
        max_failures: Losses in a row, of verifiers or of one draft method, that end the start.
    """

    configured: DesiredState
    placement_timeout_s: float
    max_failures: int
    is_placed: bool = False
    error: SpecActorError | None = None

    def limited(self, desired: DesiredState) -> DesiredState:
        """The desired state for now: actors that `scale` added must not take the room of configured ones."""
        return desired if self.is_placed else desired.at_most(self.configured)

    def is_over(self, view: ClusterView, desired: DesiredState) -> bool:
        """Whether the run has started."""
        required = desired.at_most(self.configured)
        ready = Counter(one.drafter.method for one in view.drafters if one.phase is Phase.READY)
        ready[VERIFIER] = len(view.verifiers)
        return all(ready[key] >= required.wanted(key) for key in required.all_keys())

    def check_room(self, members: Iterable[Member], desired: DesiredState, now: float) -> str:
        """Record whether all required actors have room. Returns a message on actors that waited too long, else ''."""
        members = list(members)
        required = desired.at_most(self.configured)
        waiting: list[Member] = []
        for key in required.all_keys():
            mine = [member for member in members if member.key == key]
            pending = [member for member in mine if member.phase is Phase.PENDING]
            waiting += pending[: max(0, required.wanted(key) - len(mine) + len(pending))]
        self.is_placed = self.is_placed or not waiting
        if all(now - member.since <= self.placement_timeout_s for member in waiting):
            return ""
        total = sum(required.wanted(key) for key in required.all_keys())
        names = ", ".join(sorted(member.seat.stem for member in waiting))
        return f"{len(waiting)} of {total} actors found no room within {self.placement_timeout_s:g} s: {names}"

    def lost(self, member: Member, desired: DesiredState, reason: str, record: FailureRecord) -> None:
        """Record a failed member. Lost members are replaced, up to `max_failures`. An error or a timeout in a member's
        start ends the start of the run."""
        is_replaced = member.was_ready or isinstance(member.error, ActorLostError)
        is_required = desired.at_most(self.configured).wanted(member.key) > 0
        if not is_required or (is_replaced and record.quick < self.max_failures):
            return
        if isinstance(member.error, UserError):
            self.error = member.error
        else:
            again = f" (failure {record.quick} in a row)" if record.quick > 1 else ""
            self.error = SpecActorError((reason if member.error else f"{member.actor_id}: {reason}") + again)
