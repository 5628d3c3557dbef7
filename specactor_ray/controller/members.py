"""The controller's record of one incarnation of an actor: its start, health checks and updates; and views of all."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.actors.specs import VERIFIER, ClusterView, Departure, DraftEndpoint, Phase
from specactor_ray.cluster.backend import ProcessFacts, process_facts
from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.cluster.supply import Place
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.controller.reconcile import ActorState
from specactor_ray.controller.seating import Seat
from specactor_ray.core.errors import (
    ActorLostError,
    ActorUnavailableError,
    CallTimeoutError,
    FetchError,
    InputError,
    SpecActorError,
    UserError,
    WeightsError,
)

logger = logging.getLogger(__name__)

UPDATE_TIMEOUT_S = 300.0
"""Longest time in seconds for an actor to carry out an update without the time for its size."""
_RETRY_S = 2.0
"""Seconds between two attempts to send the same version."""
_ATTEMPTS = 3
"""Most attempts to send an actor one version of weights."""
_STOP_POLL_S = 0.1
_FAILURE_OF = {"__ray_call__": "did not come up", "start": "did not start", "ping": "failed its health check"}


class Channel:
    """Updates of an actor by versions: one call at a time, polled, not waited for, and at most `attempts` for each.
    `acked`: version that the actor has; `error`: that of the last call, None after a success."""

    def __init__(self, actor_id: str, attempts: float = float("inf")) -> None:
        self.acked = 0
        self.error: SpecActorError | None = None
        self._actor_id, self._attempts = actor_id, attempts
        self._sent, self._failures, self._retry_at = 0, 0, float("-inf")
        self._call: Call | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the last version is not sent again."""
        return self._failures >= self._attempts or self.is_final

    @property
    def is_final(self) -> bool:
        """Whether the last version failed in a way that no repetition mends."""
        return self._failures > 0 and isinstance(self.error, WeightsError | InputError)

    def is_new(self, version: int) -> bool:
        """Whether this version would be sent now, for the first time."""
        return self._call is None and version not in (self.acked, self._sent)

    def update(self, version: int, now: float, send: Callable[[], Call]) -> None:
        """Take an answer that has arrived. Then send this version, unless the actor has it or a call is in flight.
        After a failure it is sent again two seconds later."""
        self.poll(now)
        if self._call is not None or version == self.acked:
            return
        if version != self._sent:
            self._sent, self._failures, self.error = version, 0, None
        elif self.has_failed or now < self._retry_at:
            return
        self._call = send()

    def poll(self, now: float) -> None:
        """Take an answer that has arrived."""
        if self._call is not None and self._call.poll():
            self._take(self._call, now)

    def _take(self, call: Call, now: float) -> None:
        self._call, self.error = None, None
        if call.error is None:
            self.acked, self._failures = self._sent, 0
            return
        self.error = _named(call.error, self._actor_id, "failed an update")
        self._failures, self._retry_at = self._failures + 1, now + _RETRY_S
        logger.warning("%s", self.error)


@dataclass(eq=False)
class Member(ActorState):
    """One incarnation of an actor, from its request to its removal. No method blocks: calls are polled, and at most one
    of each kind is in flight."""

    seat: Seat = field(kw_only=True)
    calls: Calls = field(kw_only=True)
    note: str = ""
    """Readable reason why it is not ready."""
    serves: bool = False
    """Whether other processes may use it: a verifier has the current weights, a draft actor has had current ones."""
    handle: Any = None
    """Handle of the actor; None while it is pending."""
    facts: ProcessFacts | None = None
    """Identity of its process; None until it answered."""
    counters: dict[str, Any] = field(default_factory=dict)
    """The latest answer to a health check."""

    def __post_init__(self) -> None:
        self.peers = Channel(self.actor_id)
        self.weights = defaultdict[str, Channel](lambda: Channel(self.actor_id, _ATTEMPTS))
        """`VERIFIER` for the target's weights, or a draft method → their updates; those of its own key are the ones
        that it needs."""
        self._open: dict[str, Call] = {}
        """Method → its call in flight."""
        self.has_started = False
        self._pinged_at = float("-inf")

    def enter(self, phase: Phase, now: float) -> None:
        self.phase, self.since = phase, now

    def launched(self, handle: Any, start_timeout_s: float, now: float) -> None:
        """Begin the start of the actor that was made."""
        self.handle, self.note = handle, ""
        self._open["__ray_call__"] = self.call("__ray_call__", process_facts, deadline_s=start_timeout_s)
        self._open["start"] = self.call("start", deadline_s=start_timeout_s)
        self.enter(Phase.STARTING, now)

    def call(self, method: str, *arguments: Any, deadline_s: float = UPDATE_TIMEOUT_S) -> Call:
        """Begin a call of one of its methods."""
        return self.calls.start(self.handle, method, *arguments, deadline_s=deadline_s)

    def hurry(self) -> None:
        """Check its health at the next `poll`."""
        self._pinged_at = float("-inf")

    def forgive(self, now: float) -> None:
        """Count the unanswered time from now, because the controller itself was delayed."""
        if self.unanswered_since is not None:
            self.unanswered_since = now

    def poll(self, now: float, health_interval_s: float) -> bool:
        """Take the answers that have arrived, and check the health once in an interval. Returns True when it became
        ready just now."""
        for method, call in list(self._open.items()):
            if call.poll():
                del self._open[method]
                self._take(method, call)
        is_due = "ping" not in self._open and now - self._pinged_at >= health_interval_s
        if self.has_started and self.error is None and is_due:
            self._ping(now, health_interval_s)
        if self.error is not None:
            if self.phase in (Phase.STARTING, Phase.READY):
                self.enter(Phase.DEAD, now)
        elif self.phase is Phase.STARTING and self.has_started and self.facts is not None:
            self.enter(Phase.READY, now)
            self.was_ready = True
            return True
        return False

    def _ping(self, now: float, interval_s: float) -> None:
        # A lost check must not prevent later ones.
        self._open["ping"] = self.calls.start(self.handle, "ping", deadline_s=max(2.0 * interval_s, 1.0), retry=False)
        self._pinged_at = now
        if self.unanswered_since is None:
            self.unanswered_since = now

    def _take(self, method: str, call: Call) -> None:
        error = call.error
        if error is None and method == "ping":
            self.counters, self.unanswered_since = call.result() or {}, None
            self.stalled_s = float(self.counters.get("busy_s", 0.0))
        elif error is None and method == "start":
            self.has_started = True
        elif error is None:
            self.facts = call.result()
        elif method == "ping" and isinstance(error, ActorUnavailableError | CallTimeoutError):
            pass  # perhaps only the network fails: the actor is silent until the health timeout decides
        elif self.error is None or not isinstance(error, ActorLostError):  # others have more detail
            self.error = _named(error, self.actor_id, _FAILURE_OF[method])

    def row(self, now: float) -> dict[str, Any]:
        """One row of the status table."""
        node, facts, is_verifier = self.seat.node or Place("", ""), self.facts, self.key == VERIFIER
        return {
            "id": self.actor_id,
            "kind": "verifier" if is_verifier else "drafter",
            "method": "" if is_verifier else self.key,
            "phase": self.phase.value,
            "node": node.ip,
            "node_id": node.node_id,
            "pid": facts.pid if facts else None,
            "cores": self.seat.cores,
            "gpus": facts.gpus if facts else (),
            "accelerator": node.kind if self.seat.demand.gpus else "",
            "silent_s": round(self.silent_s(now), 1),
            "note": (self.note or str(self.error or "") or self._doing()).partition("\n")[0],
            "weight_version": self.weights[self.key].acked,
            "counters": self.counters,
        }

    def _doing(self) -> str:
        if self.phase is Phase.STARTING:
            return "its process starts" if self.facts is None else "it loads"
        hosted = self.counters.get("hosted")
        return f"drafts itself: {', '.join(hosted)}" if hosted else ""


def _named(error: SpecActorError, actor_id: str, what: str) -> SpecActorError:
    """The error to show for a failed call of an actor: a `UserError` unchanged, others with the actor's id."""
    if isinstance(error, UserError):
        return error
    text = f"{actor_id} {what}: {error}"
    if isinstance(error, WeightsError | FetchError):
        return type(error)(text)
    return ActorLostError(text, error.node_lost) if isinstance(error, ActorLostError) else SpecActorError(text)


def stop_in_order(members: Iterable[Member], calls: Calls, timeout_s: float, interval_s: float) -> None:
    """Stop the loops of all, and wait until they have ended, are dead, or stay silent; at most `timeout_s` seconds."""
    clock = calls.clock
    deadline = clock.now() + timeout_s
    pending = {one.call("stop", deadline_s=timeout_s): one for one in members if one.has_started}
    while pending and (now := clock.now()) < deadline:
        calls.wait(list(pending), _STOP_POLL_S)
        for call, member in list(pending.items()):
            member.poll(now, interval_s)
            if call.done or member.error is not None or member.silent_s(now) > max(2.0, 2.0 * interval_s):
                del pending[call]


def next_view(
    last: ClusterView,
    members: Iterable[Member],
    drafters: Mapping[str, DrafterSpec],
    departed: Mapping[str, Departure],
) -> ClusterView:
    """The view of these members: `last` if nothing changed, else a new view with the next version."""
    serving = [one for one in members if one.phase is Phase.READY and one.serves]
    handles = {one.actor_id: one.handle for one in serving if one.key == VERIFIER}
    endpoints = [DraftEndpoint(one.actor_id, drafters[one.key], one.handle) for one in serving if one.key != VERIFIER]
    view = ClusterView(last.version + 1, handles, tuple(endpoints), dict(departed))
    return last if _ids(view) == _ids(last) else view


def _ids(view: ClusterView) -> tuple[list[str], ...]:
    return list(view.verifiers), [one.actor_id for one in view.drafters], list(view.departed)
