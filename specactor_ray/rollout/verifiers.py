"""The verifiers of a run in its driver: list of the serving ones, a poll at each, reports of those out of reach.

Only the controller decides whether a verifier is alive: a verifier that cannot be reached is reported (`suspect`) and
polled again until the controller's view drops it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from specactor_ray.actors.specs import ClusterView, Departure
from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.config.schema import VERIFIERS_PER_GROUP
from specactor_ray.core.errors import ActorLostError, SpecActorError
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.table.requests import TargetRequest
from specactor_ray.transport.messages import FinishedOutput, ToRollout

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Longest time a poll waits at the verifier for an event."""
_LINGER_S, _PAUSE_S, _S_PER_VERIFIER = 0.1, 5e-3, 1e-3
"""Longest time an answer is held back to gather progress of several steps while nothing reads tokens as they come (ends
of requests are sent at once); pause after an answer while something does, so that short steps share an answer; and the
minimum of both per verifier, so that the driver takes at most a thousand answers per second."""
_POLL_TIMEOUT_S = 15.0
"""Longest time for an answer to a poll, after which it is sent again."""
_WAIT_S = 0.25
"""Longest wait for any answer before the view is checked again, and pause after a failed poll."""
_VIEW_INTERVAL_S = 0.5
_VIEW_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 30.0
"""Longest time for an answer to another call of a verifier."""
_SUSPECT_INTERVAL_S = 1.0
"""Time between two reports of the same verifier."""
_MOST_SHARED = 256
"""Most finished outputs that wait for a verifier; the oldest are dropped beyond."""


@dataclass(eq=False, slots=True)
class VerifierLink:
    """The driver's side of one verifier."""

    verifier_id: str
    handle: Any
    answered_at: float
    cursor: int = 0
    """Number of its journaled events."""
    poll: Call | None = None
    lingers: bool = False
    """Whether the poll gathers progress of several steps."""
    poll_at: float = 0.0
    """Time from which it may be polled again."""
    free_at: float = 0.0
    """Time from which it may be given requests again."""
    suspected_at: float = float("-inf")
    submits: dict[Call, list[tuple[str, int]]] = field(default_factory=dict)
    """Calls that hand over requests → (request, attempt)."""

    def unconfirmed(self) -> list[str]:
        """Requests without a confirmed arrival."""
        calls = [call for call in self.submits if not call.poll() or call.error is not None]
        return [request_id for call in calls for request_id, _ in self.submits[call]]

    def is_open(self, now: float) -> bool:
        """Whether it may be given requests: it refused none lately, and answered since it was last suspected."""
        return now >= self.free_at and self.suspected_at <= self.answered_at


class Verifiers:
    """Follows the controller's view and polls every verifier in it. Fails after `timeout_s` seconds without any
    verifier, or without an answer of the controller."""

    def __init__(self, controller: Any, calls: Calls, timeout_s: float) -> None:
        self.links: dict[str, VerifierLink] = {}
        """Serving verifiers, by id."""
        self.counters: dict[str, dict[str, Any]] = {}
        """Latest counters of all verifiers, including former ones. A verifier that runs requests sends them once a
        second."""
        self.wake = calls.clock.event()
        """Ends `wait`. Set when an answer arrives, and by other threads."""
        self._controller, self._calls, self._clock, self._timeout_s = controller, calls, calls.clock, timeout_s
        self._view: Call | None = None
        self._view_asked = float("-inf")
        self._known: int | None = None
        """Version of the latest view."""
        self._notices: list[Call] = []
        """Calls with answers that are not awaited."""
        self.begin()

    def begin(self) -> None:
        """Start the time limits now."""
        self._controller_seen = self._verifier_seen = self._looked_at = self._clock.now()

    def refresh(self, unfinished: int) -> list[tuple[VerifierLink, Departure | None]]:
        """Apply an arrived view, and request the next when it is due; never blocks. Returns verifiers that serve no
        longer, and the reason, if the controller has one. Raises ActorLostError, with the number of unfinished
        requests, if the controller or all verifiers were gone for longer than allowed."""
        now, gone = self._clock.now(), []
        if now - self._looked_at > _VIEW_TIMEOUT_S:  # this process was delayed, not the others
            self._controller_seen = self._verifier_seen = now
        self._looked_at = now
        if self._view is None and (not self.links or now - self._view_asked >= _VIEW_INTERVAL_S):
            self._view_asked, wake = now, self.wake.set
            self._view = self._calls.start(self._controller, "view", self._known, deadline_s=_VIEW_TIMEOUT_S, wake=wake)
        if self._view is not None and self._view.poll():
            call, self._view = self._view, None
            if call.error is None:
                self._controller_seen = now
                view = call.result()
                if view is not None:  # None: nothing has changed
                    gone, self._known = self._take_view(view), view.version
            elif isinstance(call.error, ActorLostError):
                _give_up(f"the controller of the run is gone ({call.error})", unfinished)
        if self.links:
            self._verifier_seen = now
        if now - self._controller_seen > self._timeout_s:
            _give_up(f"the controller of the run has not answered for {self._timeout_s:.0f} s", unfinished)
        if now - self._verifier_seen > self._timeout_s:
            _give_up(f"no verifier for {self._timeout_s:.0f} s (the controller's log has the reason)", unfinished)
        return gone

    def _take_view(self, view: ClusterView) -> list[tuple[VerifierLink, Departure | None]]:
        gone = [self.links.pop(name) for name in list(self.links) if name not in view.verifiers]
        for name, handle in view.verifiers.items():
            if name not in self.links:
                self.links[name] = VerifierLink(name, handle, self._clock.now())
        return [(link, view.departed.get(link.verifier_id)) for link in gone]

    def submit(self, link: VerifierLink, requests: Sequence[TargetRequest]) -> None:
        """Hand requests to a verifier; see `failed_submits`."""
        wake = self.wake.set
        call = self._calls.start(link.handle, "submit", list(requests), deadline_s=_CALL_TIMEOUT_S, wake=wake)
        link.submits[call] = [(request.request_id, request.attempt) for request in requests]

    def notify(self, actor: Any, method: str, *arguments: Any) -> None:
        """Call without waiting for the answer. `retry_notices` must be called regularly, so that it arrives."""
        wake = self.wake.set
        self._notices.append(self._calls.start(actor, method, *arguments, deadline_s=_CALL_TIMEOUT_S, wake=wake))

    def retry_notices(self) -> None:
        self._notices = [call for call in self._notices if not call.poll()]

    @property
    def has_notices(self) -> bool:
        """Whether calls of `notify` and `cancel` are on their way."""
        return bool(self._notices)

    def cancel(self, link: VerifierLink, attempts: Sequence[tuple[str, int]], has_ended: bool = False) -> None:
        """Send a verifier these requests and attempts to drop. `has_ended`: their outputs ended without an abort."""
        self.notify(link.handle, "cancel", attempts, has_ended)

    def suspect(self, link: VerifierLink, error: SpecActorError) -> None:
        """Report a verifier that could not be reached; the controller finds the reason."""
        now = self._clock.now()
        if now - link.suspected_at >= _SUSPECT_INTERVAL_S or link.suspected_at <= link.answered_at:
            link.suspected_at = now
            logger.warning("verifier %s: %s", link.verifier_id, error)
            self.notify(self._controller, "suspect", link.verifier_id, str(error))

    def poll(self, is_read: bool = False) -> None:
        """Keep a poll at every verifier. `is_read`: tokens are read as they come, so answers do not linger, and a poll
        that does is replaced: the new one ends it."""
        now, linger_s = self._clock.now(), 0.0 if is_read else max(_LINGER_S, len(self.links) * _S_PER_VERIFIER)
        for link in self.links.values():
            if is_read and link.lingers:
                link.poll = None
            if link.poll is None and now >= link.poll_at:
                link.lingers, arguments = not is_read, (link.cursor, _POLL_S, linger_s)
                link.poll = self._calls.start(
                    link.handle, "poll", *arguments, deadline_s=_POLL_TIMEOUT_S, retry=False, wake=self.wake.set
                )

    def wait(self) -> None:
        """Wait for any answer, or until `wake` is set."""
        links = self.links.values()
        calls = [link.poll for link in links if link.poll is not None]
        calls += [call for link in links for call in link.submits if not call.done]
        calls += [self._view] if self._view is not None and not self._view.done else []
        if not any(call.done for call in calls):
            now = self._clock.now()
            pauses = [link.poll_at for link in links if link.poll is None and link.poll_at > now]
            self.wake.wait(max(0.0, min([now + _WAIT_S, *pauses, *(call.next_at() for call in calls)]) - now))
        self.wake.clear()  # before the check, so that an answer during it wakes the next wait
        self._calls.wait(calls, 0.0)

    def failed_submits(self) -> Iterator[tuple[VerifierLink, list[tuple[str, int]]]]:
        """Requests and attempts of unknown arrival; their verifier is reported. Those of a verifier that is gone
        stay with it until the view drops it."""
        for link in self.links.values():
            for call in [call for call in link.submits if call.done and not isinstance(call.error, ActorLostError)]:
                attempts = link.submits.pop(call)
                if call.error is not None:
                    self.suspect(link, call.error)
                    yield link, attempts

    def events(self) -> Iterator[tuple[VerifierLink, Sequence[ToRollout]]]:
        """Events since the last call."""
        for link in list(self.links.values()):
            if link.poll is None or not link.poll.done:
                continue
            call, link.poll = link.poll, None
            if call.error is not None:
                link.poll_at = self._clock.now() + _WAIT_S
                self.suspect(link, call.error)
                continue
            first, events, counters = call.result()
            link.answered_at = self._clock.now()
            if counters is not None:
                self.counters[link.verifier_id] = counters
            if not link.lingers:
                link.poll_at = link.answered_at + max(_PAUSE_S, len(self.links) * _S_PER_VERIFIER)
            fresh = events[max(0, link.cursor - first) :]
            link.cursor = max(link.cursor, first + len(events))
            yield link, fresh

    def ask_counters(self, timeout_s: float) -> bool:
        """Take the present counters of the verifiers that answer; for any thread. Returns whether none runs a
        request."""
        links = list(self.links.items())
        calls = {
            name: self._calls.start(link.handle, "ping", deadline_s=timeout_s, retry=False) for name, link in links
        }
        for name, call in calls.items():
            with contextlib.suppress(SpecActorError):  # the controller finds the reason
                self.counters[name] = call.result()
        return not any(self.counters[name]["running"] for name in calls if name in self.counters)

    def forget_counters(self) -> None:
        """Drop all counters, including those of polls in flight."""
        self.counters.clear()
        for link in self.links.values():
            link.poll = None


class OutputSharing:
    """Sends finished outputs to the lookups that other verifiers host. Lost ones cost drafts only. Each output goes to
    at most seven others, those of the same eight in the order of the ids."""

    def __init__(self, calls: Calls, links: Mapping[str, VerifierLink], is_on: bool) -> None:
        self._calls, self._links, self._is_on = calls, links, is_on
        self._waiting: dict[str, deque[FinishedOutput]] = {}
        """Verifier id → outputs to send."""

    def add(self, verifier_id: str, entry: JournalEntry) -> None:
        """Add an output that was finished at this verifier."""
        if not self._is_on:
            return
        names = sorted({*self._links, verifier_id})
        begin = names.index(verifier_id) // VERIFIERS_PER_GROUP * VERIFIERS_PER_GROUP
        others = [name for name in names[begin : begin + VERIFIERS_PER_GROUP] if name != verifier_id]
        if others and entry.num_tokens:
            output = FinishedOutput(entry.request_id, entry.prompt_token_ids, np.array(entry.token_ids, np.int32))
            for name in others:
                self._waiting.setdefault(name, deque(maxlen=_MOST_SHARED)).append(output)

    def send(self) -> None:
        """Send the waiting outputs; answers are not awaited."""
        waiting, self._waiting = self._waiting, {}
        for name, outputs in waiting.items():
            if link := self._links.get(name):
                self._calls.start(link.handle, "learn", list(outputs), deadline_s=_CALL_TIMEOUT_S, retry=False)


def _give_up(why: str, unfinished: int) -> NoReturn:
    raise ActorLostError(f"{why}; {unfinished} requests are unfinished")
