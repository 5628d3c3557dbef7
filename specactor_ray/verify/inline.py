"""Drafters in the verifier's own process, driven by its loop: coupled speculation without messages between processes.

Where drafting and verifying take turns on the same cores, a drafter in a process of its own only adds to the wait: the
way of a commit there and of a tail back, and two pools of threads that disturb each other. Here the same `DraftLoop`
runs in the verifier's thread, between two steps. It speaks the same protocol, so nothing else knows the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.messages import TailBatch
from specactor_ray.queues.link import Link, direct_sender
from specactor_ray.verify.seat import DrafterLink


@dataclass(frozen=True, slots=True)
class InlineDrafter:
    """A drafter that a verifier drives itself."""

    loop: DraftLoop
    link: DrafterLink
    """What the verifier knows of it; leads to `loop` (`link_to`)."""
    follows_policy: bool = False
    """It takes over every version of the target's weights."""


class InlineDrafters:
    """All drafters in the process of one verifier. Every method but `snapshot` is for the verifier's thread.

    A drafter that fails is logged and loses its requests, as in a process of its own; one that hangs holds the verifier
    up, until the controller replaces that (`cluster.stall_timeout_s`).

    Args:
        verifier_id: Whose requests they draft for.
        drafters: At most one of each method.
        receive: Takes their tails.
        clock: What deliveries are timed by.
    """

    def __init__(
        self,
        verifier_id: str,
        drafters: Iterable[InlineDrafter],
        receive: Callable[[TailBatch], Any],
        clock: Clock = SYSTEM,
    ) -> None:
        self._drafters = list(drafters)
        self.links: Mapping[str, DrafterLink] = {d.loop.drafter_id: d.link for d in self._drafters}
        """Drafter id → how the verifier reaches it."""
        for drafter in self._drafters:
            drafter.loop.set_verifiers({verifier_id: Link(direct_sender(receive), clock=clock)})

    def look_up(self) -> None:
        """Let those that look guesses up answer all they were told."""
        for drafter in self._drafters:
            if drafter.link.looks_up:
                drafter.loop.run_guarded()

    def draft(self) -> bool:
        """One step of every drafter: a model drafts one more token for each of its requests. False when there was
        nothing to do."""
        worked = [drafter.loop.run_guarded() for drafter in self._drafters]
        return any(worked)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """New weights of the policy, for those that follow it."""
        for drafter in self._drafters:
            if drafter.follows_policy:
                drafter.loop.proposer.load_weights(version, state_dict)

    def teach(self, method: str, version: int, state_dict: Mapping[str, Any]) -> None:
        """New weights of a method, learned elsewhere."""
        for drafter in self._drafters:
            if drafter.link.method == method:
                drafter.loop.proposer.load_weights(version, state_dict)

    def forget_history(self) -> None:
        """Forget earlier outputs."""
        for drafter in self._drafters:
            drafter.loop.forget_history()
            drafter.loop.run_guarded()

    def snapshot(self) -> dict[str, Any]:
        """Drafter id → its counters."""
        return {drafter.loop.drafter_id: drafter.loop.snapshot() for drafter in self._drafters}


def link_to(loop: DraftLoop, clock: Clock = SYSTEM) -> Link[Any]:
    """Delivers at once, in the caller's thread."""
    return Link(direct_sender(loop.deliver), clock=clock)
