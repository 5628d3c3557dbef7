"""The actors of a run: missing ones are placed and started, dead and surplus ones removed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from specactor_ray.actors.specs import VERIFIER, ActorSpec, Departure, Phase
from specactor_ray.cluster.backend import Backend
from specactor_ray.cluster.names import actor_name, new_actor_id
from specactor_ray.cluster.supply import can_ever_fit
from specactor_ray.config.methods import drafter_specs, hosted_drafters
from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member, stop_in_order
from specactor_ray.controller.reconcile import (
    FailureRecord,
    Remove,
    ReplacementLimits,
    balance,
    failed_actors,
    has_lasted,
    is_given_up,
    record_failure,
)
from specactor_ray.controller.seating import Seat, Seating
from specactor_ray.core.errors import ActorLostError, ClusterError, SpecActorError, UserError, first_of

logger = logging.getLogger(__name__)

_REMEMBERED_DEPARTURES = 256
STOP_TIMEOUT_S = 12.0
GONE_TIMEOUT_S = 15.0


class Fleet:
    """All actors of a run, each in its seat. Used by one thread at a time. Nothing blocks, except `end`.

    Attributes:
        members: Actor id → the actor's record.
        failures: Key → its recent failures.
        departed: Verifiers that were removed, the newest last.
        start_error: Why the run's start cannot succeed; None while it can.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        backend: Backend,
        limits: ReplacementLimits,
        classes: tuple[type, type] | None,
    ) -> None:
        self._config, self._run, self._backend, self._limits = config, run, backend, limits
        self._classes = classes
        self._calls, self._clock = backend.calls, backend.calls.clock
        self._drafters = drafter_specs(config)
        self._hosted = tuple(drafter.method for drafter in hosted_drafters(config))
        self._seating = Seating(run, config, backend)
        self.members: dict[str, Member] = {}
        self.failures: dict[str, FailureRecord] = {}
        self.departed: dict[str, Departure] = {}
        self.start_error: SpecActorError | None = None
        self.is_held = False
        """Whether pending members stay pending."""
        self._is_placed = False
        """Whether all configured actors have had room at the same time."""
        self._used_ids: set[str] = set()
        self._observed_at = self._clock.now()

    def has_started(self, desired: Mapping[str, int]) -> bool:
        """Whether as many actors serve as are desired."""
        serving = Counter(one.key for one in self.members.values() if one.phase is Phase.READY and one.serves)
        return all(serving[key] >= number for key, number in desired.items())

    def is_at_rest(self, without_service: bool) -> bool:
        """Whether no member is in its start, and every ready one serves; the latter not `without_service`, as when
        verifiers wait for weights that they can load."""
        members = self.members.values()
        starting = any(one.phase is Phase.STARTING for one in members)
        return not starting and (without_service or all(one.serves for one in members if one.phase is Phase.READY))

    def require_room(self) -> None:
        """Check during the start that there is, or may soon be, room for all configured actors; the ClusterError
        otherwise shows demand and supply."""
        cluster, now, problem = self._config.cluster, self._clock.now(), ""
        pending = [member for member in self.members.values() if member.phase is Phase.PENDING]
        waiting = [] if self._is_placed else pending
        self._is_placed = not waiting
        if cluster.address == "local" and not can_ever_fit(self._seating.waiting_demands(), self._seating.supply):
            problem = "the run asks for more than its private cluster has"
        elif any(now - member.since > cluster.placement_timeout_s for member in waiting):
            names = ", ".join(sorted(member.seat.stem for member in waiting))
            count = f"{len(waiting)} of {len(self.members)} actors"
            problem = f"{count} found no room within {cluster.placement_timeout_s:g} s: {names}"
        if problem:
            raise ClusterError(f"{problem}.\n{self._seating.shortage()}")

    def settle_pending(self) -> None:
        """Start the pending members with seats that have room now."""
        now, waiting = self._clock.now(), list[str]()
        pending = [one for one in self.members.values() if one.phase is Phase.PENDING and not self.is_held]
        if pending:
            self._seating.look(now)
        for member in pending:
            try:
                if self._seating.settle(member.seat):
                    self._launch(member, now)
                elif not member.note and now - member.since > 2.0:
                    member.note = "waits for room on the cluster."
                    waiting.append(member.actor_id)
            except ClusterError as error:
                if not self._is_placed:
                    raise
                if str(error) != member.note:
                    member.note = str(error)
                    logger.warning("%s waits: %s", member.actor_id, error)
        if waiting:
            logger.warning("%s: not placed on the cluster yet.\n%s", first_of(waiting, 1), self._seating.shortage())

    def reconcile(self, desired: Mapping[str, int]) -> None:
        """Observe all members, and bring them one step nearer to the desired state."""
        now = self._clock.now()
        self._observe(now)
        if not self._seating.gangs:
            self._seating.form(desired, now)
        for removal in failed_actors(self.members.values(), now, self._limits):
            self._remove(removal, now)
        surplus, missing = balance(desired, list(self.members.values()), self.failures, now, self._limits)
        for removal in surplus:
            self._remove(removal, now)
        for seat in self._seating.claim(missing):
            self._create(seat, now)
        self._seating.trim(desired)

    def end(self) -> bool:
        """Stop the loops in order, end all processes, and release all seats. Bounded in time. Returns whether every
        process is verified to be gone."""
        launched = [member for member in self.members.values() if member.handle is not None]
        try:
            return self._end_all(launched)
        finally:
            self._seating.close()
            self.members.clear()

    def _end_all(self, members: Sequence[Member]) -> bool:
        stop_in_order(members, self._calls, STOP_TIMEOUT_S, self._config.cluster.health_interval_s)
        for member in members:
            member.poll(self._clock.now(), float("inf"))  # the facts may have arrived meanwhile
            self._backend.end(member.handle, member.facts)
        deadline = self._clock.now() + GONE_TIMEOUT_S
        while self._backend.poll_ends():
            if self._clock.now() >= deadline:
                logger.error("some actor processes of run %s did not end in time", self._run)
                return False
            self._clock.sleep(0.05)
        return True

    def _observe(self, now: float) -> None:
        was_delayed = now - self._observed_at > self._limits.health_timeout_s / 2  # the controller, not the actors
        self._observed_at = now
        for member in self.members.values():
            if was_delayed:
                member.forgive(now)
            if member.poll(now, self._config.cluster.health_interval_s):
                logger.info("%s is ready", member.actor_id)
            record = self.failures.get(member.key)
            if record is not None and has_lasted(member, record, now, self._limits):
                del self.failures[member.key]

    def _create(self, seat: Seat, now: float) -> None:
        actor_id = new_actor_id(seat.stem, self._used_ids, self._backend.suffix)
        self._used_ids.add(actor_id)
        seat.occupant = actor_id
        self.members[actor_id] = Member(actor_id, seat.key, since=now, created_at=now, seat=seat, calls=self._calls)

    def _launch(self, member: Member, now: float) -> None:
        seat = member.seat
        if self._classes is None:
            from specactor_ray.actors.loops import DraftActor, VerifierActor  # torch: seconds, after the first status

            self._classes = VerifierActor, DraftActor
        cls = self._classes[member.key != VERIFIER]
        spec = ActorSpec(member.actor_id, member.key, self._config, self._drafters, seat.cores, self._hosted)
        name = actor_name(self._run, member.actor_id)
        handle = self._backend.launch(cls, spec, name, seat.gang.group, seat.bundle, seat.demand)
        member.launched(handle, self._limits.start_timeout_s, now)

    def _remove(self, action: Remove, now: float) -> None:
        member = self.members.pop(action.actor_id)
        log = logger.warning if action.failed else logger.info
        log("%s is removed: %s", action.actor_id, action.reason)
        if action.failed:
            record = record_failure(self.failures.get(member.key), now, member)
            self.failures[member.key] = record
            self._check_start(member, action.reason, record)
            if is_given_up(member.key, record, self._limits):
                logger.error("no more draft actors of %s are started: %s", member.key, action.reason)
        if member.key == VERIFIER:
            node_lost = isinstance(member.error, ActorLostError) and member.error.node_lost
            self.departed[member.actor_id] = Departure.NODE_LOST if node_lost else Departure.FAILED
            for oldest in list(self.departed)[:-_REMEMBERED_DEPARTURES]:
                del self.departed[oldest]
        if member.handle is not None:
            self._backend.end(member.handle, member.facts)
        member.seat.occupant = None

    def _check_start(self, member: Member, reason: str, record: FailureRecord) -> None:
        """Set the error of the run's start after a failure. Lost members are replaced, up to a number of losses in a
        row; an error or a timeout in a member's own start ends that of the run."""
        is_replaced = member.was_ready or isinstance(member.error, ActorLostError)
        if is_replaced and record.quick < self._limits.max_start_failures:
            return
        if isinstance(member.error, UserError):
            self.start_error = member.error
        else:
            again = f" (failure {record.quick} in a row)" if record.quick > 1 else ""
            self.start_error = SpecActorError((reason if member.error else f"{member.actor_id}: {reason}") + again)
