"""What the controller wants, what it sees and what it does about the difference; plain data, no Ray.

A spec defines an actor, the view lists the actors for the rollout. `decide.py` works on the rest.
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
    """Why a verifier left the view."""

    FAILED = "failed"
    """Its process died, stalled or fell silent; what it ran may have been the cause."""
    NODE_LOST = "node lost"
    """Its node went, whatever it ran."""
    RELEASED = "released"
    """In order."""


class Phase(StrEnum):
    """Where an actor is in its life."""

    PENDING = "pending"
    """Its placement group waits for room, or its cores are not free yet."""
    STARTING = "starting"
    """Its process exists or is being made; the model loads."""
    READY = "ready"
    DRAINING = "draining"
    """On its way out: verifiers were told to use others."""
    DEAD = "dead"
    """Gone, or not to be trusted any more."""


# ---- what actors are told to be ----


@dataclass(frozen=True)
class VerifierSpec:
    """What a verifier actor needs to know."""

    actor_id: str
    """Unique for each incarnation, such as `verifier-0#3f2a`."""
    target: TargetConfig
    speculation: SpeculationConfig
    mode: Mode
    cores: tuple[int, ...] = ()
    """CPU core ids it may use; empty: do not bind."""
    log_level: str = "WARNING"
    priors: Mapping[str, float] = field(default_factory=dict)
    """Draft method → what a profile says about it."""
    max_drafts: int = 0
    """Most draft tokens of a request in one step."""
    max_branches: int = 0
    """Most branches of a tail."""
    inline: tuple[DrafterSpec, ...] = ()
    """Draft methods it hosts itself."""


@dataclass(frozen=True)
class DraftActorSpec:
    """What a draft actor needs to know."""

    actor_id: str
    """Unique for each incarnation, such as `ngram-1#9c0d`."""
    drafter: DrafterSpec
    target: TargetConfig
    """What it drafts for."""
    cores: tuple[int, ...] = ()
    """CPU core ids it may use; empty: do not bind."""
    log_level: str = "WARNING"


# ---- what others are told about them ----


@dataclass(frozen=True)
class DraftEndpoint:
    """One draft actor, as verifiers and the rollout see it."""

    actor_id: str
    drafter: DrafterSpec
    handle: Any
    """Ray actor handle; None while the actor is pending."""
    phase: Phase = Phase.READY
    note: str = ""
    """Why it is not ready, for people."""


@dataclass(frozen=True)
class ClusterView:
    """Who is there now. `version` grows with every change of anything else in it."""

    version: int = 0
    verifiers: Mapping[str, Any] = field(default_factory=dict)
    """Id → handle of every verifier that is ready."""
    drafters: tuple[DraftEndpoint, ...] = ()
    """Every draft actor, whatever its phase."""
    errors: tuple[str, ...] = ()
    """What went wrong and stays wrong, such as a method that was given up."""
    departed: Mapping[str, Departure] = field(default_factory=dict)
    """Verifiers that were removed lately."""


# ---- what decide() works on ----


@dataclass(frozen=True)
class DesiredState:
    """How many actors of each kind there should be."""

    verifiers: int
    drafters: Mapping[str, int] = field(default_factory=dict)
    """Method → number of draft actors."""

    def wanted(self, key: str) -> int:
        """Number wanted for `VERIFIER` or a method; 0 for methods that are not named."""
        return self.verifiers if key == VERIFIER else self.drafters.get(key, 0)

    def all_keys(self) -> tuple[str, ...]:
        return (VERIFIER, *self.drafters)

    def at_most(self, limit: DesiredState) -> DesiredState:
        """The smaller number of each kind."""
        drafters = {method: min(number, limit.wanted(method)) for method, number in self.drafters.items()}
        return DesiredState(min(self.verifiers, limit.verifiers), drafters)


@dataclass(frozen=True)
class ObservedActor:
    """One incarnation of an actor, as last seen."""

    actor_id: str
    key: str
    """`VERIFIER` or the draft method."""
    phase: Phase
    phase_age_s: float = 0.0
    """Seconds in this phase."""
    created_at: float = 0.0
    was_ready: bool = False
    """It has been ready, whatever it is now."""
    silent_s: float = 0.0
    """Seconds that its oldest unanswered health check has waited; 0 when none does."""
    stalled_s: float = 0.0
    """Seconds that its loop had spent in one step when it answered last."""
    drained: bool = False
    """While draining: it has said that it holds nothing any more."""
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
    """All actors there are, and the failures on record."""

    actors: tuple[ObservedActor, ...] = ()
    failures: Mapping[str, FailureRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """The limits that `decide` works with; times in seconds."""

    health_timeout_s: float = 15.0
    """A ready or draining actor that is silent for longer is replaced."""
    stall_timeout_s: float = 300.0
    """An actor that answers but has been in one step for longer is replaced."""
    start_timeout_s: float = 300.0
    """A starting actor that takes longer has failed."""
    drain_timeout_s: float = 10.0
    """A draining actor is removed after this at the latest."""
    stable_s: float = 30.0
    """An actor that was ready for this long clears the failures of its key."""
    backoff_s: float = 1.0
    """Wait before the second replacement in a row; doubles with every further one. The first comes at once."""
    backoff_max_s: float = 60.0
    max_start_failures: int = 4
    """A draft method is given up after this many failed starts in a row; verifiers never are."""
    surge: int = 1
    """How many draining actors of a key may exist beyond its wanted number while new ones are created."""

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> Policy:
        return cls(
            health_timeout_s=cluster.health_timeout_s,
            stall_timeout_s=cluster.stall_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
        )


# ---- what it decides ----


@dataclass(frozen=True)
class Create:
    """Make one more actor of this key (a fresh incarnation, in a vacant seat if there is one)."""

    key: str


@dataclass(frozen=True)
class Drain:
    """Remove this draft actor from all lists, and have it take no more requests."""

    actor_id: str


@dataclass(frozen=True)
class Remove:
    """End this actor's process."""

    actor_id: str
    reason: str
    failed: bool = False
    """It failed, rather than being wanted no more: goes on record."""


@dataclass(frozen=True)
class GiveUp:
    """Start no more actors of this method until someone scales it again."""

    key: str
    error: str


Action = Create | Drain | Remove | GiveUp
