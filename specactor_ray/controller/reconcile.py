"""Next actions of the controller, from the desired and the observed state. Pure: no Ray, no clock, no own state.

Applied repeatedly, with time in between, the actions lead from any observed state to the desired one, and then there
are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.config.schema import ClusterConfig

_EASIEST_TO_SPARE = (Phase.PENDING, Phase.STARTING, Phase.READY)


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
class ReplacementLimits:
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
    def from_config(cls, cluster: ClusterConfig) -> ReplacementLimits:
        return cls(
            health_timeout_s=cluster.health_timeout_s,
            stall_timeout_s=cluster.stall_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
        )


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


def decide(desired: DesiredState, observed: ObservedState, now: float, policy: ReplacementLimits) -> list[Action]:
    """The actions that bring the observed state one step nearer to the desired one. `now` is on the clock of
    `FailureRecord.last_at` and `ObservedActor.created_at`.

    Returns:
        Removals of dead actors first, then per key the surplus or missing actors. Healthy verifiers are never removed,
        even if fewer are wanted.
    """
    actions: list[Action] = []
    kept: list[ObservedActor] = []
    failures = dict(observed.failures)
    for actor in observed.actors:
        removal = _removal(actor, policy)
        if removal is None:
            kept.append(actor)
            continue
        actions.append(removal)
        if removal.failed:  # counts for actors created in this very step
            failures[actor.key] = record_failure(
                failures.get(actor.key), now, removal.reason, actor.was_ready, actor.created_at
            )
    for key in dict.fromkeys((*desired.all_keys(), *(actor.key for actor in observed.actors))):
        mine = [actor for actor in kept if actor.key == key]
        actions += _balance(key, desired.wanted(key), mine, failures.get(key), now, policy)
    return actions


def record_failure(
    record: FailureRecord | None, now: float, error: str, was_ready: bool, created_at: float
) -> FailureRecord:
    """The record of a key after one more failure. An actor created before the failure on record is counted with that
    failure."""
    record = record or FailureRecord(last_at=float("-inf"))
    more = created_at >= record.last_at
    never_started = 0 if was_ready else max(record.never_started + more, 1)
    return replace(record, quick=record.quick + more, never_started=never_started, last_at=now, error=error)


def backoff_s(record: FailureRecord | None, policy: ReplacementLimits) -> float:
    """Seconds to wait after the last failure before the next start; 0 for the first failure."""
    if record is None or record.quick <= 1:
        return 0.0
    doublings = min(record.quick - 2, 30)  # more doublings exceed the limit anyway, and floats would overflow
    return min(policy.backoff_s * float(2**doublings), policy.backoff_max_s)


def has_lasted(actor: ObservedActor, policy: ReplacementLimits) -> bool:
    """Whether this actor proves that its key works, so that earlier failures are dropped."""
    return actor.phase is Phase.READY and actor.phase_age_s >= policy.stable_s


def _removal(actor: ObservedActor, policy: ReplacementLimits) -> Remove | None:
    if actor.phase is Phase.DRAINING:
        if actor.drained or actor.phase_age_s >= policy.drain_timeout_s or actor.silent_s >= policy.health_timeout_s:
            return Remove(actor.actor_id, "drained")
        return None
    if actor.phase is Phase.DEAD:
        return Remove(actor.actor_id, actor.error or "it died", failed=True)
    if actor.phase is Phase.STARTING and actor.phase_age_s >= policy.start_timeout_s:
        return Remove(actor.actor_id, f"it did not start within {policy.start_timeout_s:g} s", failed=True)
    if actor.phase is Phase.READY and actor.silent_s >= policy.health_timeout_s:
        return Remove(actor.actor_id, f"it gave no answer for {actor.silent_s:.1f} s", failed=True)
    if actor.phase is Phase.READY and actor.stalled_s >= policy.stall_timeout_s:
        return Remove(actor.actor_id, f"it was in one step for {actor.stalled_s:.1f} s", failed=True)
    return None


def _balance(
    key: str,
    wanted: int,
    actors: Sequence[ObservedActor],
    record: FailureRecord | None,
    now: float,
    policy: ReplacementLimits,
) -> list[Action]:
    staying = [actor for actor in actors if actor.phase is not Phase.DRAINING]
    surplus = len(staying) - wanted
    if surplus > 0 and key != VERIFIER:
        return [_spare(actor) for actor in _newest_first(staying)[:surplus]]
    if surplus >= 0:
        return []
    if record is not None and key != VERIFIER and record.never_started >= policy.max_start_failures:
        return [] if record.given_up else [GiveUp(key, record.error)]
    if record is not None and key == VERIFIER:
        # A verifier that served and died is replaced at once: the rollout stops without it, and finds the cause.
        record = replace(record, quick=record.never_started)
    if record is not None and now - record.last_at < backoff_s(record, policy):
        return []
    room = wanted + policy.surge - len(actors)
    return [Create(key)] * min(-surplus, max(room, 0))


def _newest_first(actors: Sequence[ObservedActor]) -> list[ObservedActor]:
    """Order of removal: actors that never served first, then the newest; the oldest have learned the most."""
    rank = _EASIEST_TO_SPARE.index
    return sorted(actors, key=lambda actor: (rank(actor.phase), -actor.created_at, actor.actor_id))


def _spare(actor: ObservedActor) -> Action:
    """The end of a surplus draft actor: in order if it serves, at once if it does not serve yet."""
    return Drain(actor.actor_id) if actor.phase is Phase.READY else Remove(actor.actor_id, "wanted no more")
