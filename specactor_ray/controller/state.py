"""Desired state, observed state and actions of the controller; plain data, no Ray.

A spec defines an actor, and the view lists the actors for the rollout. `decide.py` works on the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.config.schema import ClusterConfig, SpeculationConfig, TargetConfig
from specactor_ray.messages import Mode

VERIFIER = "verifier"
"""Key of the verifiers wherever drafters are keyed by their method."""


class Departure(StrEnum):
    """Reason why a verifier left the view."""

    FAILED = "failed"
    """Its process died, stalled or fell silent; its requests may have been the cause."""
    NODE_LOST = "node lost"
    """Its node was lost; its requests are not the cause."""
    RELEASED = "released"
    """It was ended in order."""


class Phase(StrEnum):
    """Phase of an actor's life."""

    PENDING = "pending"
    """Its placement group waits for room, or its cores are not free yet."""
    STARTING = "starting"
    """Its process exists or is being made; the model loads."""
    READY = "ready"
    DRAINING = "draining"
    """It is being removed: verifiers already use other draft actors."""
    DEAD = "dead"
    """It is gone, or not used any more."""


# ---- specifications of actors ----


@dataclass(frozen=True)
class VerifierSpec:
    """Specification of a verifier actor."""

    actor_id: str
    """Unique for each incarnation, such as `verifier-0#3f2a`."""
    target: TargetConfig
    speculation: SpeculationConfig
    mode: Mode
    cores: tuple[int, ...] = ()
    """CPU core ids it may use; empty: do not bind."""
    log_level: str = "WARNING"
    priors: Mapping[str, float] = field(default_factory=dict)
    """Draft method → chance that a draft token is right, from a profile."""
    max_drafts: int = 0
    """Most draft tokens of a request in one step."""
    max_branches: int = 0
    """Most branches per tail."""
    inline: tuple[DrafterSpec, ...] = ()
    """Draft methods that run in its process."""


@dataclass(frozen=True)
class DraftActorSpec:
    """Specification of a draft actor."""

    actor_id: str
    """Unique for each incarnation, such as `ngram-1#9c0d`."""
    drafter: DrafterSpec
    target: TargetConfig
    """The target that it drafts for."""
    cores: tuple[int, ...] = ()
    """CPU core ids it may use; empty: do not bind."""
    log_level: str = "WARNING"


# ---- views of actors for other processes ----


@dataclass(frozen=True)
class DraftEndpoint:
    """A draft actor as verifiers and the rollout see it."""

    actor_id: str
    drafter: DrafterSpec
    handle: Any
    """Ray actor handle; None while the actor is pending."""
    phase: Phase = Phase.READY
    note: str = ""
    """Readable reason why it is not ready."""


@dataclass(frozen=True)
class ClusterView:
    """The current actors. `version` grows with every change of another field."""

    version: int = 0
    verifiers: Mapping[str, Any] = field(default_factory=dict)
    """Id → handle of every verifier that is ready."""
    drafters: tuple[DraftEndpoint, ...] = ()
    """Every draft actor, whatever its phase."""
    errors: tuple[str, ...] = ()
    """Lasting errors, such as a method that was given up."""
    departed: Mapping[str, Departure] = field(default_factory=dict)
    """Verifier id → reason of its recent removal."""


# ---- arguments of decide() ----


@dataclass(frozen=True)
class DesiredState:
    """Desired number of actors of each kind."""

    verifiers: int
    drafters: Mapping[str, int] = field(default_factory=dict)
    """Method → number of draft actors."""

    def wanted(self, key: str) -> int:
        """Desired number for `VERIFIER` or a method; 0 for methods without an entry."""
        return self.verifiers if key == VERIFIER else self.drafters.get(key, 0)

    def all_keys(self) -> tuple[str, ...]:
        return (VERIFIER, *self.drafters)

    def at_most(self, limit: DesiredState) -> DesiredState:
        """The smaller number of each kind."""
        drafters = {method: min(number, limit.wanted(method)) for method, number in self.drafters.items()}
        return DesiredState(min(self.verifiers, limit.verifiers), drafters)


@dataclass(frozen=True)
class ObservedActor:
    """One incarnation of an actor, as last observed."""

    actor_id: str
    key: str
    """`VERIFIER` or the draft method."""
    phase: Phase
    phase_age_s: float = 0.0
    """Seconds in this phase."""
    created_at: float = 0.0
    was_ready: bool = False
    """Whether it has been ready at any time."""
    silent_s: float = 0.0
    """Seconds that its oldest unanswered health check has waited; 0 when there is none."""
    stalled_s: float = 0.0
    """Seconds for which its loop had been in one step at its last answer."""
    drained: bool = False
    """While draining: whether it has reported that it holds no requests any more."""
    error: str = ""
    """Why it is dead."""


@dataclass(frozen=True)
class FailureRecord:
    """The recent failures of one key (the verifiers, or a draft method)."""

    quick: int = 0
    """Failures in a row without an actor that lasted; sets the back-off."""
    never_started: int = 0
    """Starts that failed in a row; sets when to give up."""
    last_at: float = 0.0
    error: str = ""
    given_up: bool = False


@dataclass(frozen=True)
class ObservedState:
    """All actors, and the recorded failures."""

    actors: tuple[ObservedActor, ...] = ()
    failures: Mapping[str, FailureRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """Limits of `decide`; times in seconds."""

    health_timeout_s: float = 15.0
    """Longest silence of a ready or draining actor before it is replaced."""
    stall_timeout_s: float = 300.0
    """Longest step of an actor that answers before it is replaced."""
    start_timeout_s: float = 300.0
    """Longest start of an actor before it counts as failed."""
    drain_timeout_s: float = 10.0
    """Longest draining of an actor before it is removed."""
    stable_s: float = 30.0
    """Time for which an actor must be ready to clear the failures of its key."""
    backoff_s: float = 1.0
    """Wait before the second replacement in a row; doubles with every further one. The first has no wait."""
    backoff_max_s: float = 60.0
    max_start_failures: int = 4
    """Failed starts in a row after which a draft method is given up; verifiers are never given up."""
    surge: int = 1
    """Draining actors of a key that may exist beyond its desired number while new ones are created."""

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> Policy:
        return cls(
            health_timeout_s=cluster.health_timeout_s,
            stall_timeout_s=cluster.stall_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
        )


# ---- actions ----


@dataclass(frozen=True)
class Create:
    """Make one more actor of this key (a new incarnation, in a vacant seat if there is one)."""

    key: str


@dataclass(frozen=True)
class Drain:
    """Remove this draft actor from all lists, and stop its taking of requests."""

    actor_id: str


@dataclass(frozen=True)
class Remove:
    """End this actor's process."""

    actor_id: str
    reason: str
    failed: bool = False
    """Whether it failed, which is recorded, rather than being surplus."""


@dataclass(frozen=True)
class GiveUp:
    """Start no more actors of this method until a user scales it again."""

    key: str
    error: str


Action = Create | Drain | Remove | GiveUp
