"""Specifications of the actors, and the view of them that the controller publishes; plain data, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import Config

VERIFIER = "verifier"
"""Key of the verifiers wherever drafters are keyed by their method."""


class Departure(StrEnum):
    """Reason why a verifier left the view."""

    FAILED = "failed"
    """Its process died, stalled or fell silent; its requests may have been the cause."""
    NODE_LOST = "node lost"
    """Its node was lost; its requests are not the cause."""


class Phase(StrEnum):
    """Phase of an actor's life."""

    PENDING = "pending"
    """Waits for room, or for free cores."""
    STARTING = "starting"
    """Its process is made, and loads the model."""
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True)
class ActorSpec:
    """What a verifier or a draft actor is made from."""

    actor_id: str
    """Unique for each incarnation, such as `ngram-1#9c0d`."""
    key: str
    """`VERIFIER`, or the draft method."""
    config: Config
    drafters: Mapping[str, DrafterSpec] = field(default_factory=dict)
    """The records of all draft methods."""
    cores: tuple[int, ...] = ()
    """CPU core ids it may use; empty: do not bind."""
    hosted: tuple[str, ...] = ()
    """Draft methods that run in the verifiers' processes."""

    @property
    def window(self) -> int:
        """Largest draft window: width of a verifier's table of tails."""
        return max((drafter.window for drafter in self.drafters.values()), default=0)

    @property
    def branches(self) -> int:
        """Most branches per tail."""
        return max((drafter.branches for drafter in self.drafters.values()), default=0)


@dataclass(frozen=True)
class DraftEndpoint:
    """A draft actor that serves, as verifiers and the rollout see it."""

    actor_id: str
    drafter: DrafterSpec
    handle: Any
    """Ray actor handle."""


@dataclass(frozen=True)
class ClusterView:
    """The actors that serve now. `version` grows with every change of another field."""

    version: int = 0
    verifiers: Mapping[str, Any] = field(default_factory=dict)
    """Id → handle."""
    drafters: tuple[DraftEndpoint, ...] = ()
    departed: Mapping[str, Departure] = field(default_factory=dict)
    """Verifier id → reason of its recent removal."""
