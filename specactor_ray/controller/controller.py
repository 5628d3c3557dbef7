"""The controller: it alone creates, places, watches and removes actors. It is never on the token path.

It holds a desired state and brings the actors there: `observe → decide → apply`, then it sends the updates of members.
Only one thread at a time works on the members: that of `start`, then the reconcile thread, then the caller of
`shutdown`. Other threads post requests to it, and read the last published snapshot.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import ray

from specactor_ray.actors.specs import VERIFIER, ClusterView, Phase
from specactor_ray.cluster.backend import Backend, RayBackend, end_with_raylet, remove_left, start_here
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.connection import list_runs
from specactor_ray.cluster.names import CONTROLLER, NAMESPACE, actor_name, new_run_name
from specactor_ray.cluster.supply import cluster_supply, require_kinds
from specactor_ray.config.methods import draft_actors, drafter_specs, scale_refusal
from specactor_ray.config.schema import Config
from specactor_ray.controller.fleet import GONE_TIMEOUT_S, STOP_TIMEOUT_S, Fleet
from specactor_ray.controller.members import next_view
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.controller.sync import PeerSync, WeightSync
from specactor_ray.core.clock import Clock, Thread
from specactor_ray.core.errors import CallError, ConfigError, SpecActorError
from specactor_ray.core.metrics import Row, controller_rows
from specactor_ray.core.signals import signals_deferred
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

T = TypeVar("T")
_TICK_S = 0.2
_START_TICK_S = 0.05
_SYNC_TICK_S = 0.005
"""Seconds between two rounds while weights are in flight."""
_END_S = STOP_TIMEOUT_S + GONE_TIMEOUT_S + 30.0
"""Longest wait for the orderly end of a run."""


class _Once(Generic[T]):
    """Work that the first caller does; all callers get its result or its error."""

    def __init__(self, clock: Clock, work: Callable[[], T]) -> None:
        self._clock, self._work = clock, work
        self._result: Future[T] = Future()
        self._lock = threading.Lock()
        self.has_begun = False

    def get(self, timeout_s: float = float("inf")) -> T:
        """The result; raises TimeoutError if another caller is not done in time."""
        with self._lock:
            begins, self.has_begun = not self.has_begun, True
        if begins:
            try:
                self._result.set_result(self._work())
            except BaseException as error:  # noqa: BLE001 - all callers get it
                self._result.set_exception(error)
        return self._clock.result(self._result, timeout_s)


class Controller:
    """Runs the actors of one run. A plain class; `start_controller` makes it a named Ray actor.

    Args:
        config, run: The whole configuration, and the name of the run.
        classes: Classes of verifiers and of draft actors; default: those of `specactor_ray.actors`.
        limits: Limits of replacements; default: from `config.cluster`.
        backend: The cluster; default: the Ray cluster this process is connected to.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        classes: tuple[type, type] | None = None,
        limits: ReplacementLimits | None = None,
        backend: Backend | None = None,
    ) -> None:
        end_with_raylet()
        logging.basicConfig(level=config.run.log_level, format=f"%(asctime)s %(levelname)s {run} %(name)s: %(message)s")
        self._config = config
        self._backend: Backend = backend if backend is not None else RayBackend()
        self._clock = self._backend.calls.clock
        self._drafters = drafter_specs(config)
        self._desired = {VERIFIER: config.target.replicas, **draft_actors(config)}
        cluster = config.cluster
        limits = limits or ReplacementLimits(cluster.health_timeout_s, cluster.stall_timeout_s, cluster.start_timeout_s)
        self._fleet = Fleet(config, run, self._backend, limits, classes)
        self._peers, self._weights = PeerSync(config), WeightSync(config, self._clock)
        self._requests: deque[Callable[[], None]] = deque()
        """Changes that other threads request; carried out at the beginning of a round, once the run has started."""
        self._view = ClusterView()
        self._rests = False
        """Whether starts are held, and the view has all actors that live."""
        self._status: list[dict[str, Any]] = []
        self._wake, self._stopping = self._clock.event(), self._clock.event()
        self._started, self._ended = _Once(self._clock, self._start), _Once(self._clock, self._end)
        self._thread: Thread | None = None

    # ---- called from other processes ----

    def start(self) -> ClusterView:
        """Bring up the configured actors and keep them running. Returns the first view in which all of them serve.
        Idempotent. After an error nothing is left running: a ClusterError without room, a UserError as an actor raised
        it, another SpecActorError if actors do not start in time or are lost repeatedly."""
        return self._started.get()

    def view(self, known: int | None = None) -> ClusterView | None:
        """The actors that serve; None if the version of the view is `known`."""
        view = self._view
        return None if view.version == known else view

    def status(self) -> list[dict[str, Any]]:
        """One row per actor: id, kind, method, phase, node, pid, cores, gpus and their kind (`accelerator`), silent_s,
        note, counters."""
        return self._status

    def scale(self, drafters: Mapping[str, int]) -> None:
        """Set the number of draft actors of each method, once the run has started; returns before it is reached. A
        ConfigError changes nothing."""
        for method, number in drafters.items():
            refusal = scale_refusal(self._config, method, number)
            if refusal is not None:
                raise refusal
        self._post(lambda: self._scale(drafters))

    def set_weights(self, weights: WeightSet, timeout_s: float) -> None:
        """Send these weights of the policy to all present and later verifiers. Returns when all ready ones, at least
        one, have them. Idempotent. InputError for a version that is not above all earlier ones; WeightsError if they
        cannot be loaded, so that verifiers wait for the next version; SpecActorError after `timeout_s` seconds, the
        verifiers get the weights later."""
        self._weights.set_current(weights)
        self._wake.set()
        if not self._weights.wait_for(weights.version, timeout_s):
            late = f"weights of version {weights.version} were not taken within {timeout_s:g} s"
            raise SpecActorError(late + self._weights.problem)

    def offer_weights(self, weights: WeightSet) -> None:
        """Take new weights that a draft method was taught, for its present and later actors."""
        self._post(lambda: self._weights.offer(weights))

    def hold(self, is_held: bool) -> None:
        """Start no actor until the hold ends: others use the memory. Returns when none is in its start or its end,
        which may take as long as a start."""
        self._post(functools.partial(setattr, self._fleet, "is_held", is_held))
        while is_held and not (self._rests or self._stopping.is_set()):
            self._clock.sleep(_SYNC_TICK_S)

    def suspect(self, actor_id: str, reason: str) -> None:
        """Check the health of an unreachable actor at once. Only the controller decides that it is gone."""
        logger.info("%s is suspected: %s", actor_id, reason)
        self._post(lambda: self._hurry(actor_id))

    def shutdown(self) -> bool:
        """Stop the loops in order, end all processes, release all placement groups. Bounded in time. Idempotent.
        Returns whether every process is verified to be gone."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        elif self._started.has_begun:
            with contextlib.suppress(Exception):  # only the end of the start counts
                self._started.get(STOP_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            return self._ended.get(STOP_TIMEOUT_S + GONE_TIMEOUT_S)
        return False

    # ---- requests of other threads ----

    def _post(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        self._wake.set()

    def _take_requests(self) -> None:
        while self._requests:
            self._requests.popleft()()

    def _scale(self, drafters: Mapping[str, int]) -> None:
        for method, number in drafters.items():
            self._fleet.failures.pop(method, None)
            self._desired[method] = number

    def _hurry(self, actor_id: str) -> None:
        if (member := self._fleet.members.get(actor_id)) is not None:
            member.hurry()

    # ---- start, rounds, end ----

    def _start(self) -> ClusterView:
        """Run rounds until the run has started."""
        try:
            while True:
                if self._stopping.is_set():
                    raise SpecActorError("the run was shut down while it started")
                self._round(lambda _name, step: step())
                if self._fleet.start_error is not None:
                    raise self._fleet.start_error
                self._fleet.require_room()
                if self._fleet.has_started(self._desired):
                    break
                self._wake.wait(_START_TICK_S)
                self._wake.clear()
        except BaseException:
            self._ended.get()
            raise
        self._thread = self._clock.spawn(self._reconcile, "reconcile")
        return self._view

    def _reconcile(self) -> None:
        while not self._stopping.is_set():
            self._guarded("requests", self._take_requests)
            self._round(self._guarded)
            self._wake.wait(_TICK_S if self._weights.is_settled() else _SYNC_TICK_S)
            self._wake.clear()

    def _round(self, run: Callable[[str, Callable[[], Any]], None]) -> None:
        fleet = self._fleet
        run("settle", fleet.settle_pending)
        run("decide and apply", lambda: fleet.reconcile(self._desired))
        run("weights", lambda: self._weights.update(fleet.members.values(), self._clock.now()))
        run("publish", self._publish)
        run("peers", lambda: self._peers.update(fleet.members.values(), self._view, self._clock.now()))
        run("ends", self._backend.poll_ends)

    def _guarded(self, name: str, step: Callable[[], Any]) -> None:
        """Run a step whose failure must not end the loop: the next round finds the same difference again."""
        try:
            step()
        except Exception:
            logger.exception("step %r of the controller failed", name)
            self._stopping.wait(1.0)  # no hot loop of a repeated failure

    def _publish(self) -> None:
        """Replace the snapshots that `view` and `status` return."""
        members, now = list(self._fleet.members.values()), self._clock.now()
        self._view = next_view(self._view, members, self._drafters, self._fleet.departed)
        self._status = [member.row(now) for member in members]
        is_at_rest = self._fleet.is_held and self._fleet.is_at_rest(self._weights.is_refused)
        self._rests = is_at_rest and not self._backend.poll_ends()  # a process has its memory until it has ended
        self._backend.calls.transport.export(self._metric_rows)

    def _metric_rows(self) -> Iterable[Row]:
        wanted = {key: number for key, number in self._desired.items() if key != VERIFIER}
        return controller_rows(self._status, wanted, Phase)

    def _end(self) -> bool:
        try:
            return self._fleet.end()
        finally:
            self._publish()


def start_controller(
    config: Config,
    classes: tuple[type, type] | None = None,
    limits: ReplacementLimits | None = None,
    held: contextlib.ExitStack | None = None,
) -> tuple[Any, str]:
    """Make the controller of a new run, a named actor that ends with this process, and start the run. Returns the
    controller and the name of the run, whose end is added to `held`. Errors are those of `Controller.start`, and
    ConfigError for a kind of GPUs that no node has; nothing of the run is left then."""
    run = config.run.name or new_run_name()
    if run in list_runs():
        raise ConfigError("run.name", f"a run {run!r} is alive on this cluster.", "use another name, or end that run.")
    require_kinds(config, cluster_supply())
    remove_left()
    if held is not None:
        held.callback(end_run, run)
    attempts = (limits or ReplacementLimits()).max_start_failures
    # The controller ends a start long before this, unless it hangs.
    limit_s = attempts * (config.cluster.placement_timeout_s + config.cluster.start_timeout_s)
    try:
        handle = start_here(run, CONTROLLER, Controller, config, run, classes, limits)
        Calls().ask(handle, "start", deadline_s=limit_s + _END_S)
    except CallError as error:
        end_run(run)
        raise SpecActorError(f"run {run} did not start: {error}") from None
    except BaseException:  # also on an interruption
        end_run(run)
        raise
    return handle, run


def end_run(run: str) -> None:
    """End all actors of a run in order, then by force what is left of it, placement groups included. Idempotent."""
    try:
        controller = ray.get_actor(actor_name(run, CONTROLLER), namespace=NAMESPACE)
        Calls().ask(controller, "shutdown", deadline_s=_END_S)
    except ValueError:
        logger.debug("run %s has no controller any more", run)
    except SpecActorError as error:
        logger.error("the controller did not shut down in order (%s); its actors are killed", error)
    finally:
        with signals_deferred():
            remove_left(run)
