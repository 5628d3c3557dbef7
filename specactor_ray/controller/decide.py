"""Next actions of the controller, from the desired and the observed state. Pure: no Ray, no clock, no own state.

Applied repeatedly, with time in between, the actions lead from any observed state to the desired one, and then there
are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specactor_ray.controller.state import (
    VERIFIER,
    Action,
    Create,
    DesiredState,
    Drain,
    FailureRecord,
    GiveUp,
    ObservedActor,
    ObservedState,
    Phase,
    Policy,
    Remove,
)

_EASIEST_TO_SPARE = (Phase.PENDING, Phase.STARTING, Phase.READY)


def decide(desired: DesiredState, observed: ObservedState, now: float, policy: Policy) -> list[Action]:
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


def backoff_s(record: FailureRecord | None, policy: Policy) -> float:
    """Seconds to wait after the last failure before the next start; 0 for the first failure."""
    if record is None or record.quick <= 1:
        return 0.0
    doublings = min(record.quick - 2, 30)  # more doublings exceed the limit anyway, and floats would overflow
    return min(policy.backoff_s * float(2**doublings), policy.backoff_max_s)


def has_lasted(actor: ObservedActor, policy: Policy) -> bool:
    """Whether this actor proves that its key works, so that earlier failures are dropped."""
    return actor.phase is Phase.READY and actor.phase_age_s >= policy.stable_s


def _removal(actor: ObservedActor, policy: Policy) -> Remove | None:
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
    policy: Policy,
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
