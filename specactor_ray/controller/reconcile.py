"""Next actions of the controller, from the desired and the observed state. Pure: no Ray, no clock, no own state.

Applied repeatedly, with time in between, the actions lead from any observed state to the desired one, and then there
is nothing to do. A key is `VERIFIER` or a draft method; the desired state maps keys to numbers of actors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.core.errors import SpecActorError

_EASIEST_TO_SPARE = (Phase.PENDING, Phase.STARTING, Phase.READY)


@dataclass(eq=False)
class ActorState:
    """One incarnation of an actor, as last observed. All times are of the controller's clock, in seconds."""

    actor_id: str
    key: str
    phase: Phase = Phase.PENDING
    since: float = 0.0
    """Time at which the phase began."""
    created_at: float = 0.0
    was_ready: bool = False
    """Whether it has been ready at any time."""
    unanswered_since: float | None = None
    """Time of the oldest health check without an answer."""
    stalled_s: float = 0.0
    """Seconds for which its loop had been in one step at its last answer."""
    error: SpecActorError | None = None
    """Why it is dead."""

    def silent_s(self, now: float) -> float:
        """Seconds that the oldest unanswered health check has waited."""
        return 0.0 if self.unanswered_since is None else max(0.0, now - self.unanswered_since)


@dataclass(frozen=True)
class FailureRecord:
    """The recent failures of one key."""

    quick: int = 0
    """Failures in a row without an actor that lasted; sets the back-off."""
    never_started: int = 0
    """Starts that failed in a row; sets when to give up."""
    last_at: float = 0.0


@dataclass(frozen=True)
class ReplacementLimits:
    """Limits of replacements; times in seconds."""

    health_timeout_s: float = 15.0
    """Longest silence of a ready actor before it is replaced."""
    stall_timeout_s: float = 300.0
    """Longest step of an actor that answers before it is replaced."""
    start_timeout_s: float = 300.0
    """Longest start of an actor before it counts as failed."""
    stable_s: float = 30.0
    """Time for which an actor must be ready, after the last failure of its key, to clear the failures."""
    backoff_s: float = 1.0
    """Wait before the second replacement in a row; doubles with every further one. The first has no wait."""
    backoff_max_s: float = 60.0
    max_start_failures: int = 4
    """Failed starts in a row after which a draft method is given up; verifiers are never given up."""


@dataclass(frozen=True)
class Remove:
    """End this actor's process."""

    actor_id: str
    reason: str
    failed: bool = False
    """Whether it failed, which is recorded, rather than being surplus."""


def failed_actors(actors: Iterable[ActorState], now: float, limits: ReplacementLimits) -> list[Remove]:
    """Removals of the actors that are dead, silent, stuck or late."""
    removals = (_removal(actor, now, limits) for actor in actors)
    return [removal for removal in removals if removal is not None]


def balance(
    desired: Mapping[str, int],
    actors: Sequence[ActorState],
    failures: Mapping[str, FailureRecord],
    now: float,
    limits: ReplacementLimits,
) -> tuple[list[Remove], list[str]]:
    """Removals of surplus actors, and the keys of the actors to make, each in a vacant seat if there is one. Healthy
    verifiers are never removed, even if fewer are desired."""
    removals, missing = list[Remove](), list[str]()
    for key in dict.fromkeys((*desired, *(actor.key for actor in actors))):
        mine = [actor for actor in actors if actor.key == key]
        surplus = len(mine) - desired.get(key, 0)
        if surplus > 0 and key != VERIFIER:  # verifiers use the drafters that are left, as after a failure
            removals += [Remove(actor.actor_id, "surplus") for actor in sorted(mine, key=_removal_rank)[:surplus]]
        elif surplus < 0 and _may_start(key, failures.get(key), now, limits):
            missing += [key] * -surplus
    return removals, missing


def record_failure(record: FailureRecord | None, now: float, actor: ActorState) -> FailureRecord:
    """The record of a key after the failure of one more actor. An actor created before the failure on record is counted
    with that failure."""
    record = record or FailureRecord(last_at=float("-inf"))
    more = actor.created_at >= record.last_at
    never_started = 0 if actor.was_ready else max(record.never_started + more, 1)
    return replace(record, quick=record.quick + more, never_started=never_started, last_at=now)


def is_given_up(key: str, record: FailureRecord | None, limits: ReplacementLimits) -> bool:
    """Whether no more actors of this key are started, until a user scales it."""
    return key != VERIFIER and record is not None and record.never_started >= limits.max_start_failures


def backoff_s(record: FailureRecord, limits: ReplacementLimits) -> float:
    """Seconds to wait after the last failure before the next start; 0 for the first failure."""
    if record.quick <= 1:
        return 0.0
    doublings = min(record.quick - 2, 30)  # more doublings exceed the limit anyway, and floats would overflow
    return min(limits.backoff_s * float(2**doublings), limits.backoff_max_s)


def has_lasted(actor: ActorState, record: FailureRecord, now: float, limits: ReplacementLimits) -> bool:
    """Whether this actor, ready since the last failure, proves that its key works, so that the record is dropped. One
    that was ready before proves nothing about the seat that fails beside it."""
    return actor.phase is Phase.READY and actor.since >= record.last_at and now - actor.since >= limits.stable_s


def _removal(actor: ActorState, now: float, limits: ReplacementLimits) -> Remove | None:
    age_s, silent_s = now - actor.since, actor.silent_s(now)
    reason = ""
    if actor.phase is Phase.DEAD:
        reason = str(actor.error or "it died")
    elif actor.phase is Phase.STARTING and age_s >= limits.start_timeout_s:
        reason = f"it did not start within {limits.start_timeout_s:g} s"
    elif actor.phase is Phase.READY and silent_s >= limits.health_timeout_s:
        reason = f"it gave no answer for {silent_s:.1f} s"
    elif actor.phase is Phase.READY and actor.stalled_s >= limits.stall_timeout_s:
        reason = f"it was in one step for {actor.stalled_s:.1f} s"
    return Remove(actor.actor_id, reason, failed=True) if reason else None


def _may_start(key: str, record: FailureRecord | None, now: float, limits: ReplacementLimits) -> bool:
    if record is None or is_given_up(key, record, limits):
        return record is None
    if key == VERIFIER:
        # A verifier that served and died is replaced at once: the rollout stops without it, and finds the cause.
        record = replace(record, quick=record.never_started)
    return now - record.last_at >= backoff_s(record, limits)


def _removal_rank(actor: ActorState) -> tuple[int, float, str]:
    """Order of removal: actors that never served first, then the newest; the oldest have learned the most."""
    return _EASIEST_TO_SPARE.index(actor.phase), -actor.created_at, actor.actor_id
