"""The controller: it alone creates, places, watches and removes actors. It is never on the token path.

It holds a desired state and brings the actors there: `observe → decide → apply`, then it sends the lists of members.
Only one thread at a time works on the members: that of `start`, then the reconcile thread, then the caller
of `shutdown`. Queries of other processes are answered from the last published snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from specactor_ray.actors.specs import VERIFIER, ClusterView, Departure, Phase
from specactor_ray.cluster import placement as placing
from specactor_ray.cluster.backend import Backend, RayBackend
from specactor_ray.cluster.names import actor_name, new_actor_id
from specactor_ray.cluster.placement import NodeSupply
from specactor_ray.cluster.supervised import SupervisedActor, stop_in_order
from specactor_ray.config.methods import draft_actors, drafter_specs
from specactor_ray.config.schema import Config
from specactor_ray.controller.elastic import Elastic
from specactor_ray.controller.first_start import FirstStart
from specactor_ray.controller.members import ActorClasses, Member, PeerNews, build_spec, next_view
from specactor_ray.controller.reconcile import (
    Action,
    Create,
    DesiredState,
    Drain,
    FailureRecord,
    ObservedState,
    Remove,
    ReplacementLimits,
    decide,
    has_lasted,
    record_failure,
)
from specactor_ray.controller.seats import Seating, scale_refusal
from specactor_ray.controller.weights import WeightNews
from specactor_ray.core.clock import Thread
from specactor_ray.core.errors import ActorLostError, ClusterError, SpecActorError
from specactor_ray.core.metrics import Row, controller_rows
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

_REMEMBERED_DEPARTURES = 256
_TICK_S = 0.2
_START_TICK_S = 0.05
_SYNC_TICK_S = 0.005
"""Seconds between two rounds while weights are in flight."""
STOP_TIMEOUT_S = 12.0
GONE_TIMEOUT_S = 15.0
_SLOW_STEP_S = 1.0


class Controller:
    """Runs the actors of one run. A plain class; `start_controller` makes it a named Ray actor.

    Args:
        config, run: The whole configuration, and the name of the run.
        classes: Classes of verifiers and draft actors.
        policy: Limits; default: from `config.cluster`.
        priors: Draft method → chance that a draft token is right, from a profile; for the verifiers' ladders.
        backend: The cluster; default: the Ray cluster this process is connected to.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        classes: ActorClasses | None = None,
        policy: ReplacementLimits | None = None,
        priors: Mapping[str, float] | None = None,
        backend: Backend | None = None,
    ) -> None:
        logging.basicConfig(level=config.run.log_level, format=f"%(asctime)s %(levelname)s {run} %(name)s: %(message)s")
        self._config, self._run = config, run
        self._classes = classes or ActorClasses()
        self._priors = dict(priors or {})
        self._policy = policy or ReplacementLimits.from_config(config.cluster)
        self._drafters = drafter_specs(config)
        self._desired = DesiredState(config.target.replicas, draft_actors(config))
        self._first = FirstStart(self._desired, config.cluster.placement_timeout_s, self._policy.max_start_failures)
        self._members: dict[str, Member] = {}
        self._used_ids: set[str] = set()
        self._failures: dict[str, FailureRecord] = {}
        self._departed: dict[str, Departure] = {}
        """Verifiers that were removed, the newest last."""
        self._backend: Backend = backend if backend is not None else RayBackend()
        self._calls, self._clock = self._backend.calls, self._backend.calls.clock
        self._seating = Seating(run, config, self._backend)
        self._reaper = self._backend.reaper
        self._news = PeerNews(config)
        self._weights = WeightNews(config)
        self._in_place = self._clock.condition()
        """Guards the weights; notified when every verifier has the policy's current ones."""
        self._version_in_place = 0
        self._lock = threading.Lock()
        """Guards the requests of other threads: the desired state, methods forgiven, suspects; start and end."""
        self._forgiven: list[str] = []
        """Methods scaled by a user since the last step, whose earlier failures are dropped."""
        self._view = ClusterView()
        self._status: list[dict[str, Any]] = []
        self._suspects: list[str] = []
        """Actors reported as out of reach since the last step."""
        self._wake, self._stopping = self._clock.event(), self._clock.event()
        self._elastic = Elastic(config, self._priors)
        self._is_shutting, self._was_asked_to_start = False, False
        self._all_gone: Future[bool] = Future()
        """Result of the shutdown."""
        self._first_view: Future[ClusterView] = Future()
        """Result of the start."""
        self._thread: Thread | None = None
        self._last_step = self._clock.now()

    # ---- called from other processes ----

    def start(self) -> ClusterView:
        """Bring up the desired actors and keep them running. Returns the first view in which the run has started
        (`FirstStart`). Idempotent, also during the start: all callers get the same result.

        Raises:
            ClusterError: There is no room; demand and supply are shown. Nothing is left running.
            UserError: As an actor raised it, such as a `ModelLoadError`. Nothing is left running.
            SpecActorError: An actor did not start, or not in time, or actors of a kind were lost again and again.
                Nothing is left running.
        """
        with self._lock:
            begins, self._was_asked_to_start = not self._was_asked_to_start, True
        if begins:
            try:
                self._first_view.set_result(self._start())
            except BaseException as error:  # noqa: BLE001 - all callers get it
                self._first_view.set_exception(error)
        return self._clock.result(self._first_view, float("inf"))

    def _start(self) -> ClusterView:
        try:
            self._converge_first()
        except BaseException:
            self._teardown()
            raise
        self._thread = self._clock.spawn(self._reconcile, "reconcile")
        return self._view

    def view(self, known: int | None = None) -> ClusterView | None:
        """The current members, at most as old as the last step. None if their version is `known`."""
        view = self._view
        return None if view.version == known else view

    def status(self) -> list[dict[str, Any]]:
        """One row per actor: id, kind, method, phase, node, pid, cores, gpus, silent_s, note, counters."""
        return self._status

    def scale(self, drafters: Mapping[str, int | None]) -> None:
        """Set the number of draft actors of each method; returns before it is reached. A number ends the scaling of a
        method by its load, None begins it again.

        Raises:
            ConfigError: A method is not configured, a number is negative, or a method has no `max_replicas` for None;
                nothing was changed.
        """
        for method, number in drafters.items():
            refusal = scale_refusal(self._config, method, number)
            if refusal is not None:
                raise refusal
        with self._lock:
            for method, number in drafters.items():
                self._elastic.hold(method, number is not None)
            self._want({method: number for method, number in drafters.items() if number is not None})
            self._forgiven += drafters
        self._wake.set()

    def _want(self, drafters: Mapping[str, int]) -> None:
        """Change the desired state; the lock is held."""
        self._desired = replace(self._desired, drafters={**self._desired.drafters, **drafters})

    def set_weights(self, weights: WeightSet, timeout_s: float) -> None:
        """Send these weights to all present and later actors that follow the policy. Returns when all ready verifiers
        have them; an actor that fails to load them is replaced. Idempotent.

        Raises:
            InputError: The version is not above all earlier ones.
            SpecActorError: Not all verifiers had them within `timeout_s` seconds; they still get them later.
        """
        with self._in_place:
            self._weights.set_current(weights)
        self._wake.set()
        with self._in_place:
            if not self._in_place.wait_for(lambda: self._version_in_place >= weights.version, timeout_s):
                raise SpecActorError(f"weights of version {weights.version} were not taken within {timeout_s:g} s")

    def suspect(self, actor_id: str, reason: str) -> None:
        """Check the health of an unreachable actor at once. Only the controller decides that it is gone."""
        logger.info("%s is suspected: %s", actor_id, reason)
        with self._lock:
            self._suspects.append(actor_id)
        self._wake.set()

    def offer_weights(self, method: str, weights: WeightSet) -> None:
        """Take new weights that a draft method was taught, of a version above all earlier ones. Present and later
        actors of the method get them."""
        with self._in_place:
            self._weights.offer(method, weights)
        self._wake.set()

    def shutdown(self) -> bool:
        """Stop the loops in order, end all processes, release all placement groups. Bounded in time. Idempotent.

        Returns:
            Whether every process is verified to be gone.
        """
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        elif self._was_asked_to_start:
            with contextlib.suppress(Exception):  # only the end of the start counts
                self._clock.result(self._first_view, STOP_TIMEOUT_S)
        return self._teardown()

    # ---- the start ----

    def _converge_first(self) -> None:
        """Run rounds until the run has started. Any error of a step ends the start."""
        supply = self._backend.supply()
        while True:
            self._round(lambda _name, step: step())
            if self._first.error is not None:
                raise self._first.error
            if self._stopping.is_set():
                raise SpecActorError("the run was shut down while it started")
            self._require_room(supply)
            if self._first.is_over(self._view, self._wanted()):
                return
            self._wake.wait(_START_TICK_S)
            self._wake.clear()

    def _require_room(self, supply: Sequence[NodeSupply]) -> None:
        demands, problem = self._seating.demands(), ""
        if self._config.cluster.address == "local" and not placing.can_ever_fit(demands, supply):
            problem = "the run asks for more than its private cluster has"
        problem = problem or self._first.check_room(self._members.values(), self._wanted(), self._clock.now())
        if problem:
            raise ClusterError(f"{problem}.\n{placing.demand_against_supply(demands, supply)}")

    def _wanted(self) -> DesiredState:
        """The desired state of this round."""
        with self._lock:
            return self._first.limited(self._desired)

    # ---- observe, decide, apply ----

    def _reconcile(self) -> None:
        while not self._stopping.is_set():
            self._guarded("scale by load", self._scale_by_load)
            self._round(self._guarded)
            self._wake.wait(_TICK_S if self._weights_in_place() else _SYNC_TICK_S)
            self._wake.clear()

    def _round(self, run: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Bring the actors one step nearer to the desired state."""
        run("forget failures", self._forget_failures)
        run("settle", self._settle_pending)
        run("decide and apply", self._decide_and_apply)
        run("weights", self._tell_weights)
        run("publish", self._publish)
        run("tell peers", lambda: self._news.tell(self._members.values(), self._view, self._clock.now()))
        run("reap", self._reaper.poll)

    def _scale_by_load(self) -> None:
        given_up = [key for key, record in self._failures.items() if record.given_up]
        numbers = self._elastic.revise(self._members.values(), self._desired.drafters, given_up, self._clock.now())
        with self._lock:
            self._want({method: number for method, number in numbers.items() if not self._elastic.holds(method)})

    def _guarded(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step whose failure must not end the loop: the next round finds the same difference again."""
        begin, result = self._clock.now(), None
        try:
            result = step()
        except Exception:
            logger.exception("step %r of the controller failed", name)
            self._stopping.wait(1.0)  # no hot loop of a repeated failure
        took = self._clock.now() - begin
        if took > _SLOW_STEP_S:
            logger.warning("step %r of the controller took %.1f s", name, took)
        return result

    def _decide_and_apply(self) -> None:
        desired = self._wanted()
        self._apply(decide(desired, self._observe(), self._clock.now(), self._policy))
        self._seating.trim({key: desired.wanted(key) for key in desired.all_keys()})

    def _forget_failures(self) -> None:
        with self._lock:
            forgiven, self._forgiven = self._forgiven, []
        for method in forgiven:
            self._failures.pop(method, None)

    def _observe(self) -> ObservedState:
        now = self._clock.now()
        with self._lock:
            suspects, self._suspects = self._suspects, []
        for actor_id in suspects:
            suspect = self._members.get(actor_id)
            if suspect is not None and suspect.actor is not None:
                suspect.actor.hurry()
        if now - self._last_step > self._policy.health_timeout_s / 2:  # the controller was delayed, not the actors
            for member in self._members.values():
                if member.actor is not None:
                    member.actor.forgive(now)
        self._last_step = now
        actors = []
        for member in self._members.values():
            if member.look(now, self._config.cluster.health_interval_s):
                self._refuse_shared_gpus(member)
                logger.info("%s is ready", member.actor_id)
            seen = member.observed(now)
            actors.append(seen)
            if has_lasted(seen, self._policy):
                self._failures.pop(member.key, None)
        return ObservedState(tuple(actors), dict(self._failures))

    def _refuse_shared_gpus(self, member: Member) -> None:
        facts = {m.actor_id: m.actor.facts for m in self._members.values() if m.actor and m.actor.facts}
        mine = facts.pop(member.actor_id)
        try:
            for other, theirs in facts.items():
                both = {other: theirs, member.actor_id: mine}
                placing.refuse_shared_gpus({name: (fact.node_id, fact.gpus) for name, fact in both.items()})
        except ClusterError as error:
            assert member.actor is not None
            member.actor.error, member.was_ready = error, False

    def _apply(self, actions: list[Action]) -> None:
        now = self._clock.now()
        for action in actions:
            if isinstance(action, Create):
                self._create(action.key, now)
            elif isinstance(action, Remove):
                self._remove(action, now)
            elif isinstance(action, Drain):
                self._drain(self._members[action.actor_id], now)
            else:
                self._failures[action.key] = replace(self._failures[action.key], given_up=True)
                logger.error("no more draft actors of %s are started: %s", action.key, action.error)

    def _create(self, key: str, now: float) -> None:
        seat = self._seating.claim(key)
        actor_id = new_actor_id(seat.stem, self._used_ids, self._backend.suffix)
        self._used_ids.add(actor_id)
        seat.occupant = actor_id
        self._members[actor_id] = Member(actor_id, key, seat, created_at=now, since=now)

    def _settle_pending(self) -> None:
        now, waiting = self._clock.now(), list[str]()
        for member in self._members.values():
            if member.phase is not Phase.PENDING:
                continue
            try:
                if self._seating.settle(member.seat):
                    self._launch(member, now)
                elif not member.note and now - member.since > 2.0:
                    member.note = "waits for room on the cluster."
                    waiting.append(member.actor_id)
            except ClusterError as error:
                if not self._first.is_placed:
                    raise
                if str(error) != member.note:
                    member.note = str(error)
                    logger.warning("%s waits: %s", member.actor_id, error)
        if waiting:
            table = placing.demand_against_supply(self._seating.demands(), self._backend.supply())
            more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            logger.warning("%s%s: no room on the cluster yet.\n%s", waiting[0], more, table)

    def _launch(self, member: Member, now: float) -> None:
        seat = member.seat
        assert seat.placement is not None  # callers have settled the seat
        self._classes = self._classes.resolved()  # may take seconds, so it is after the first status
        cls = self._classes.verifier if member.key == VERIFIER else self._classes.draft
        spec = build_spec(self._config, self._drafters, member, self._priors)
        name = actor_name(self._run, member.actor_id)
        handle = self._backend.launch(cls, spec, name, seat.placement, seat.demand)
        member.actor = SupervisedActor(member.actor_id, handle, self._calls, self._policy.start_timeout_s)
        member.note = ""
        member.enter(Phase.STARTING, now)

    def _drain(self, member: Member, now: float) -> None:
        member.enter(Phase.DRAINING, now)
        assert member.actor is not None  # only ready ones are drained
        member.actor.drain()

    def _remove(self, action: Remove, now: float) -> None:
        member = self._members.pop(action.actor_id)
        log = logger.warning if action.failed else logger.info
        log("%s is removed: %s", action.actor_id, action.reason)
        if action.failed:
            known = self._failures.get(member.key)
            record = record_failure(known, now, action.reason, member.was_ready, member.created_at)
            self._failures[member.key] = record
            self._first.lost(member, self._wanted(), action.reason, record)
        if member.key == VERIFIER:
            self._departed[member.actor_id] = _departure(action, member)
            for oldest in list(self._departed)[:-_REMEMBERED_DEPARTURES]:
                del self._departed[oldest]
        if member.actor is not None:
            self._reaper.reap(member.actor.handle, member.actor.facts)
        member.seat.occupant = None

    # ---- send updates ----

    def _tell_weights(self) -> None:
        with self._in_place:
            self._weights.tell(self._members.values(), self._clock.now())
            current = self._weights.current
            if current is not None and self._weights.in_place(self._members.values()):
                self._version_in_place = current.version
                self._in_place.notify_all()

    def _weights_in_place(self) -> bool:
        current = self._weights.current
        return current is None or self._version_in_place >= current.version

    def _publish(self) -> None:
        """Replace the snapshots that `view` and `status` return; the version grows if anything changed."""
        members = list(self._members.values())
        self._view = next_view(self._view, members, self._drafters, self._failures, self._departed)
        now = self._clock.now()
        self._status = [member.row(now) for member in members]
        self._calls.transport.export(self._metric_rows)

    def _metric_rows(self) -> Iterable[Row]:
        """Metrics of the members in the last status."""
        groups = [(VERIFIER, ""), *(("drafter", method) for method in self._desired.drafters)]
        known = [(*group, phase.value) for group in groups for phase in Phase]
        seen = [(row["kind"], row["method"], row["phase"]) for row in self._status]
        return controller_rows(seen, known, self._desired.drafters)

    # ---- the end ----

    def _teardown(self) -> bool:
        with self._lock:
            begins, self._is_shutting = not self._is_shutting, True
        if not begins:
            with contextlib.suppress(TimeoutError):
                return self._clock.result(self._all_gone, STOP_TIMEOUT_S + GONE_TIMEOUT_S)
            return False
        gone = False
        try:
            gone = self._end_all([member.actor for member in self._members.values() if member.actor is not None])
        finally:
            self._seating.close()
            self._members.clear()
            self._publish()
            self._all_gone.set_result(gone)
        return gone

    def _end_all(self, actors: Sequence[SupervisedActor]) -> bool:
        stop_in_order(actors, self._calls, STOP_TIMEOUT_S, self._config.cluster.health_interval_s)
        for actor in actors:
            actor.poll(self._clock.now(), float("inf"))  # the facts may have arrived meanwhile
            self._reaper.reap(actor.handle, actor.facts)
        deadline = self._clock.now() + GONE_TIMEOUT_S
        while self._reaper.poll():
            if self._clock.now() >= deadline:
                logger.error("some actor processes of run %s did not end in time", self._run)
                return False
            self._clock.sleep(0.05)
        return True


def _departure(action: Remove, member: Member) -> Departure:
    """Reason for the end of this verifier, for the rollout."""
    if not action.failed:
        return Departure.RELEASED
    lost = isinstance(member.error, ActorLostError) and member.error.node_lost
    return Departure.NODE_LOST if lost else Departure.FAILED
