"""One supervised actor: its start, health checks and updates; every call has a deadline, and none blocks.

A stuck actor costs its supervisor nothing: at most one call of each kind is in flight to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.cluster.processes import ProcessFacts, process_facts
from specactor_ray.core.errors import ActorLostError, ActorUnavailableError, CallTimeoutError, SpecActorError, UserError

logger = logging.getLogger(__name__)

_ERRAND_TIMEOUT_S = 300.0
"""Longest time in seconds for an actor to carry out an update (weights of a large model take minutes)."""
_STOP_POLL_S = 0.1


class Errand:
    """Updates of an actor by versions: one call at a time, which is polled, not waited for."""

    def __init__(self, actor_id: str) -> None:
        self.acked = self.sent = 0
        """Version that the actor has, and version of the last call."""
        self.failures = 0
        """Calls that failed since the last success."""
        self.retry_at = float("-inf")
        """Time of the next attempt after a failure; set by the caller."""
        self.error: SpecActorError | None = None
        """Error of the last failed call."""
        self._actor_id = actor_id
        self._call: Call | None = None

    def is_due(self, version: int, now: float) -> bool:
        """Whether this version must be sent now."""
        return self._call is None and self.acked != version and now >= self.retry_at

    def send(self, call: Call, version: int) -> None:
        """Track this call, which carries a version."""
        self._call, self.sent = call, version

    def state(self) -> str:
        """`idle`, `in flight`, `done` or `failed`; the latter two once for every `send`."""
        if self._call is None:
            return "idle"
        if not self._call.poll():
            return "in flight"
        call, self._call = self._call, None
        if call.error is not None:
            self.error = named_error(call.error, self._actor_id, "did not take what it was told")
            logger.warning("%s", self.error)
            self.failures += 1
            return "failed"
        self.acked, self.failures = self.sent, 0
        return "done"


class SupervisedActor:
    """The supervisor's side of one actor that has `start`, `ping` and `stop`.

    Attributes:
        facts: Identity of its process; None until it answered.
        started: Result of `start`; None until then.
        counters: The latest answer to a health check.
        error: Why it is dead; None while it is not.
    """

    def __init__(self, actor_id: str, handle: Any, calls: Calls, start_timeout_s: float) -> None:
        self.actor_id, self.handle = actor_id, handle
        self.facts: ProcessFacts | None = None
        self.started: dict[str, Any] | None = None
        self.counters: dict[str, Any] = {}
        self.error: SpecActorError | None = None
        self._calls = calls
        self._facts: Call | None = calls.start(handle, "__ray_call__", process_facts, deadline_s=start_timeout_s)
        self._start: Call | None = self.call("start", deadline_s=start_timeout_s)
        self._ping: Call | None = None
        self._pinged_at = float("-inf")
        self._unanswered_since: float | None = None
        self.news = Errand(actor_id)
        self.weights = Errand(actor_id)
        self.learning = Errand(actor_id)
        self._drain: Call | None = None

    def call(self, method: str, *arguments: Any, deadline_s: float = _ERRAND_TIMEOUT_S) -> Call:
        """Begin a call of one of its methods."""
        return self._calls.start(self.handle, method, *arguments, deadline_s=deadline_s)

    def poll(self, now: float, interval_s: float) -> None:
        """Take the answers that have arrived, and check the health every `interval_s` seconds. Never blocks."""
        if self._facts is not None and self._facts.poll():
            call, self._facts = self._facts, None
            self.facts = self._result(call, "did not come up")
        if self._start is not None and self._start.poll():
            call, self._start = self._start, None
            self.started = self._result(call, "did not start")
        if self._ping is not None and self._ping.poll():
            call, self._ping = self._ping, None
            self._take_ping(call)
        if self.started is None or self.error is not None or self._ping is not None:
            return
        if now - self._pinged_at >= interval_s:
            self._ask(now, interval_s)

    def hurry(self) -> None:
        """Check its health at the next `poll`, because it was reported as out of reach."""
        self._pinged_at = float("-inf")

    def silent_s(self, now: float) -> float:
        """Seconds that the oldest unanswered health check has waited."""
        return 0.0 if self._unanswered_since is None else max(0.0, now - self._unanswered_since)

    @property
    def stalled_s(self) -> float:
        """Seconds for which its loop had been in one step at its last answer."""
        return float(self.counters.get("busy_s", 0.0))

    def forgive(self, now: float) -> None:
        """Count the unanswered time from now, because the supervisor itself was delayed."""
        if self._unanswered_since is not None:
            self._unanswered_since = now

    def drain(self) -> None:
        """Stop its taking of requests; `drained` returns True when that is done."""
        self._drain = self.call("drain")

    def drained(self) -> bool:
        return self._drain is not None and self._drain.poll()

    def _ask(self, now: float, interval_s: float) -> None:
        # A lost check must not prevent later ones.
        self._ping = self._calls.start(self.handle, "ping", deadline_s=max(2.0 * interval_s, 1.0), retry=False)
        self._pinged_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now

    def _take_ping(self, call: Call) -> None:
        if call.error is None:
            self.counters = call.result() or {}
            self._unanswered_since = None
        elif not isinstance(call.error, ActorUnavailableError | CallTimeoutError):
            self.error = named_error(call.error, self.actor_id, "failed its health check")
        # Else it is out of reach for now, perhaps by the network: unanswered until the health timeout decides.

    def _result(self, call: Call, what: str) -> Any:
        if call.error is None:
            return call.result()
        if self.error is None or not isinstance(call.error, ActorLostError):  # others have more detail
            self.error = named_error(call.error, self.actor_id, what)
        return None


def stop_in_order(actors: Iterable[SupervisedActor], calls: Calls, timeout_s: float, interval_s: float) -> None:
    """Stop the loops of all, and wait until they have ended, are dead, or stay silent; at most `timeout_s` seconds."""
    clock = calls.clock
    deadline = clock.now() + timeout_s
    pending = {actor.call("stop", deadline_s=timeout_s): actor for actor in actors if actor.started is not None}
    while pending and (now := clock.now()) < deadline:
        calls.wait(list(pending), _STOP_POLL_S)
        for call, actor in list(pending.items()):
            actor.poll(now, interval_s)
            if call.done or actor.error is not None or actor.silent_s(now) > max(2.0, 2.0 * interval_s):
                del pending[call]


def named_error(error: SpecActorError, actor_id: str, what: str) -> SpecActorError:
    """The error to show for a failed call to an actor: a `UserError` unchanged, others with the actor's id."""
    if isinstance(error, UserError):
        return error
    text = f"{actor_id} {what}: {error}"
    return ActorLostError(text, error.node_lost) if isinstance(error, ActorLostError) else SpecActorError(text)
