"""One actor under supervision: started, asked for its health, told news; every call bounded, none of them blocking.

A stuck actor costs its supervisor nothing: at most one call of each kind is in flight to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specactor_ray.cluster.names import NAMESPACE
from specactor_ray.cluster.placement import Placement
from specactor_ray.cluster.processes import ProcessFacts, ask_facts
from specactor_ray.errors import ActorLostError, SpecActorError, UserError

logger = logging.getLogger(__name__)

_CONCURRENCY = 8
"""Threads of an actor: a long poll or a load must not hold up health checks and deliveries."""


@dataclass(frozen=True, slots=True)
class Share:
    """What an actor takes of its placement group's bundle."""

    cpus: float
    gpus: float = 0.0


def launch(cls: Any, spec: Any, name: str, placement: Placement, share: Share) -> Any:
    """Make the actor `cls(spec)` in its placement group; returns its handle at once.

    A crashed actor is never restarted by Ray: it would come back without its state under the same name.
    """
    strategy = PlacementGroupSchedulingStrategy(placement.group, placement.bundle_index)
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": share.cpus,
        "num_gpus": share.gpus,
        "max_concurrency": _CONCURRENCY,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": strategy,
    }
    return ray.remote(cls).options(**options).remote(spec)


class Errand:
    """One call to an actor at a time, looked after without waiting for it."""

    def __init__(self, actor_id: str) -> None:
        self.error: SpecActorError | None = None
        """Why the last one failed."""
        self._actor_id, self._ref = actor_id, None

    def send(self, ref: Any) -> None:
        """Look after this call."""
        self._ref = ref

    def state(self) -> str:
        """`idle`, `in flight`, `done` or `failed`; the latter two once for every `send`."""
        if self._ref is None:
            return "idle"
        if not _is_done(self._ref):
            return "in flight"
        ref, self._ref = self._ref, None
        try:
            ray.get(ref)
        except RayError as error:
            self.error = readable_error(error, self._actor_id, "did not take what it was told")
            logger.warning("%s", self.error)
            return "failed"
        return "done"


class SupervisedActor:
    """The supervisor's side of one actor that has `start`, `ping` and `stop`.

    Attributes:
        facts: Which process it is; None until it answered.
        started: What `start` returned; None until then.
        counters: The latest answer to a health check.
        error: Why it is dead; None while it is not known to be.
    """

    def __init__(self, actor_id: str, handle: Any) -> None:
        self.actor_id, self.handle = actor_id, handle
        self.facts: ProcessFacts | None = None
        self.started: dict[str, Any] | None = None
        self.counters: dict[str, Any] = {}
        self.error: SpecActorError | None = None
        self._facts_ref: Any = ask_facts(handle)
        self._start_ref: Any = handle.start.remote()
        self._ping_ref: Any = None
        self._pinged_at = float("-inf")
        self._unanswered_since: float | None = None
        self.news = Errand(actor_id)
        self.weights = Errand(actor_id)
        self.learning = Errand(actor_id)
        self.rest = Errand(actor_id)
        self._drain_ref: Any = None

    def poll(self, now: float, interval_s: float) -> None:
        """Take the answers that came, and ask for the health when it is time. Never blocks.

        Args:
            now: Monotonic seconds.
            interval_s: Time between two health checks.
        """
        if self._facts_ref is not None and _is_done(self._facts_ref):
            ref, self._facts_ref = self._facts_ref, None
            self.facts = self._result(ref, "did not come up")
        if self._start_ref is not None and _is_done(self._start_ref):
            ref, self._start_ref = self._start_ref, None
            self.started = self._result(ref, "did not start")
        if self._ping_ref is not None and _is_done(self._ping_ref):
            ref, self._ping_ref = self._ping_ref, None
            self._take_ping(ref)
        if self.started is None or self.error is not None or self._ping_ref is not None:
            return
        if now - self._pinged_at >= interval_s:
            self._ping_ref, self._pinged_at = self.handle.ping.remote(), now
            if self._unanswered_since is None:
                self._unanswered_since = now

    def silent_s(self, now: float) -> float:
        """Seconds that the oldest unanswered health check has waited."""
        return 0.0 if self._unanswered_since is None else max(0.0, now - self._unanswered_since)

    def forgive(self, now: float) -> None:
        """The supervisor itself was held up: what is unanswered counts from now."""
        if self._unanswered_since is not None:
            self._unanswered_since = now

    def drain(self) -> None:
        """Ask it to stop taking requests; `drained` tells when it has."""
        self._drain_ref = self.handle.drain.remote()

    def drained(self) -> bool:
        return self._drain_ref is not None and _is_done(self._drain_ref)

    def _take_ping(self, ref: Any) -> None:
        try:
            self.counters = ray.get(ref) or {}
            self._unanswered_since = None
        except ActorUnavailableError:
            pass  # out of reach for now, perhaps the network: stays unanswered until the health timeout decides
        except RayError as error:
            self.error = readable_error(error, self.actor_id, "failed its health check")

    def _result(self, ref: Any, what: str) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            if self.error is None or isinstance(error, RayTaskError):  # the latter says more than "it died"
                self.error = readable_error(error, self.actor_id, what)
            return None


def stop_in_order(actors: Iterable[SupervisedActor], timeout_s: float, interval_s: float) -> None:
    """Ask all to end their loops and wait until they have, or are dead, or stay silent; at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pending = {actor.handle.stop.remote(): actor for actor in actors if actor.started is not None}
    while pending and (now := time.monotonic()) < deadline:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0.1)
        for ref, actor in list(pending.items()):
            actor.poll(now, interval_s)
            if ref in done or actor.error is not None or actor.silent_s(now) > max(2.0, 2.0 * interval_s):
                del pending[ref]


def readable_error(error: Exception, actor_id: str, what: str) -> SpecActorError:
    """What to show a person for an error that a call to an actor raised.

    Returns:
        A `UserError` as the actor raised it (type and message); anything else wrapped, with its traceback.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, UserError):
            return cause
        return SpecActorError(f"{actor_id} {what}: {type(cause).__name__ if cause else 'error'}: {error}")
    if isinstance(error, RayActorError):
        hint = "killed, out of memory, or its node is gone"
        return ActorLostError(f"{actor_id} {what}: its process ended ({hint}): {_first_line(error)}")
    return SpecActorError(f"{actor_id} {what}: {type(error).__name__}: {_first_line(error)}")


def _is_done(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
