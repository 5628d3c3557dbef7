"""The verifiers of a run in its driver: the list of those that serve, a poll at each, reports of those out of reach.

Who is alive is for the controller to say: a verifier that cannot be reached is reported (`suspect`) and asked again
until the controller's view drops it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.controller.state import ClusterView, Departure
from specactor_ray.errors import ActorLostError, SpecActorError
from specactor_ray.messages import ToRollout
from specactor_ray.target.base import TargetRequest

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Longest time one poll waits at the verifier for an event."""
_LINGER_S, _LINGER_S_PER_VERIFIER = 0.1, 1e-3
"""Longest time an answer is held back to gather progress of several steps, and at least that per verifier, so that the
driver takes no more than a thousand answers a second; ends of requests are told at once."""
_POLL_TIMEOUT_S = 15.0
"""Longest time for an answer to a poll; then it is sent again."""
_REPOLL_S = 0.25
"""Pause after a poll that failed."""
_WAIT_S = 0.25
"""Longest wait for any answer before the view is looked at again."""
_VIEW_INTERVAL_S = 0.5
_VIEW_TIMEOUT_S = 5.0
_NOTICE_TIMEOUT_S = 30.0
_SUBMIT_TIMEOUT_S = 30.0
_SUSPECT_INTERVAL_S = 1.0
"""Time between two reports of the same verifier."""


@dataclass(eq=False, slots=True)
class VerifierLink:
    """The driver's side of one verifier."""

    verifier_id: str
    handle: Any
    answered_at: float
    cursor: int = 0
    """Events of it that are journaled."""
    poll: Call | None = None
    poll_at: float = 0.0
    """When it may be polled again."""
    free_at: float = 0.0
    """When it may be given requests again."""
    progress_at: float = float("-inf")
    """When any of its requests made progress last."""
    suspected_at: float = float("-inf")
    submits: dict[Call, list[tuple[str, int]]] = field(default_factory=dict)
    """Calls that hand it requests → (request, attempt)."""

    def unconfirmed(self) -> list[str]:
        """Requests of which it is not known whether they have arrived."""
        calls = [call for call in self.submits if not call.poll() or call.error is not None]
        return [request_id for call in calls for request_id, _ in self.submits[call]]

    def is_open(self, now: float) -> bool:
        """It may be given requests: it refused none lately, and answered the last time it was asked."""
        return now >= self.free_at and self.suspected_at <= self.answered_at


class Verifiers:
    """Follows the controller's view and polls every verifier in it. Gives up after `timeout_s` seconds without any
    verifier, or without an answer of the controller."""

    def __init__(self, controller: Any, calls: Calls, timeout_s: float) -> None:
        self.links: dict[str, VerifierLink] = {}
        """Those that serve, by id."""
        self.counters: dict[str, dict[str, Any]] = {}
        """Latest counters of every verifier there has been."""
        self.wake = calls.clock.event()
        """Ends `wait`. Set when an answer arrives; other threads set it, too."""
        self._controller, self._calls, self._clock, self._timeout_s = controller, calls, calls.clock, timeout_s
        self._view: Call | None = None
        self._view_asked = float("-inf")
        self._known: int | None = None
        """Version of the view that was taken last."""
        self._notices: list[Call] = []
        """Calls whose answers are not awaited."""
        self.begin()

    def begin(self) -> None:
        """Count the limits from now on."""
        self._controller_seen = self._verifier_seen = self._looked_at = self._clock.now()

    # ---- verifiers that serve ----

    def _ask_view(self) -> None:
        """Ask for a view that is newer than whatever happened up to now."""
        wake = self.wake.set
        self._view = self._calls.start(self._controller, "view", self._known, deadline_s=_VIEW_TIMEOUT_S, wake=wake)
        self._view_asked = self._clock.now()

    def refresh(self, unfinished: int) -> list[tuple[VerifierLink, Departure | None]]:
        """Take a view that came, and ask for the next when it is time; never blocks.

        Args:
            unfinished: Requests that are lost if this gives up.

        Returns:
            Verifiers that serve no more, and why as far as the controller says.

        Raises:
            ActorLostError: The controller, or all verifiers, were gone for longer than allowed.
        """
        now, gone = self._clock.now(), []
        if now - self._looked_at > _VIEW_TIMEOUT_S:  # this process was held up, not the others
            self._controller_seen = self._verifier_seen = now
        self._looked_at = now
        if self._view is None and (not self.links or now - self._view_asked >= _VIEW_INTERVAL_S):
            self._ask_view()
        if self._view is not None and self._view.poll():
            call, self._view = self._view, None
            if call.error is None:
                self._controller_seen = now
                view = call.result()
                if view is not None:  # else nothing has changed
                    gone, self._known = self._take_view(view), view.version
            elif isinstance(call.error, ActorLostError):
                _give_up(f"the controller of the run is gone ({call.error})", unfinished)
        if self.links:
            self._verifier_seen = now
        if now - self._controller_seen > self._timeout_s:
            _give_up(f"the controller of the run has not answered for {self._timeout_s:.0f} s", unfinished)
        if now - self._verifier_seen > self._timeout_s:
            _give_up(f"no verifier for {self._timeout_s:.0f} s (the controller's log says why)", unfinished)
        return gone

    def _take_view(self, view: ClusterView) -> list[tuple[VerifierLink, Departure | None]]:
        gone = [self.links.pop(name) for name in list(self.links) if name not in view.verifiers]
        for name, handle in view.verifiers.items():
            if name not in self.links:
                self.links[name] = VerifierLink(name, handle, self._clock.now())
        return [(link, view.departed.get(link.verifier_id)) for link in gone]

    # ---- what is told ----

    def submit(self, link: VerifierLink, requests: Sequence[TargetRequest]) -> None:
        """Hand requests to a verifier; see `failed_submits`."""
        wake = self.wake.set
        call = self._calls.start(link.handle, "submit", list(requests), deadline_s=_SUBMIT_TIMEOUT_S, wake=wake)
        link.submits[call] = [(request.request_id, request.attempt) for request in requests]

    def notify(self, actor: Any, method: str, *arguments: Any) -> None:
        """Call without waiting for the answer. `retry_notices` has to be called now and then, so that it arrives."""
        wake = self.wake.set
        self._notices.append(self._calls.start(actor, method, *arguments, deadline_s=_NOTICE_TIMEOUT_S, wake=wake))

    def retry_notices(self) -> None:
        self._notices = [call for call in self._notices if not call.poll()]

    @property
    def has_notices(self) -> bool:
        """Whether calls of `notify` and `cancel` are on their way."""
        return bool(self._notices)

    def cancel(self, link: VerifierLink, attempts: Sequence[tuple[str, int]], has_ended: bool = False) -> None:
        """Let a verifier drop these requests and attempts. `has_ended`: their outputs have ended by themselves."""
        self.notify(link.handle, "cancel", attempts, has_ended)

    def suspect(self, link: VerifierLink, error: SpecActorError) -> None:
        """Report a verifier that could not be reached; the controller finds out what is the matter."""
        now = self._clock.now()
        if now - link.suspected_at >= _SUSPECT_INTERVAL_S or link.suspected_at <= link.answered_at:
            link.suspected_at = now
            logger.warning("verifier %s: %s", link.verifier_id, error)
            self.notify(self._controller, "suspect", link.verifier_id, str(error))

    # ---- what they say ----

    def poll(self) -> None:
        """Keep a poll at every verifier."""
        now, wake = self._clock.now(), self.wake.set
        linger_s = max(_LINGER_S, len(self.links) * _LINGER_S_PER_VERIFIER)
        for link in self.links.values():
            if link.poll is None and now >= link.poll_at:
                arguments = (link.cursor, _POLL_S, linger_s)
                link.poll = self._calls.start(
                    link.handle, "poll", *arguments, deadline_s=_POLL_TIMEOUT_S, retry=False, wake=wake
                )

    def wait(self) -> None:
        """Wait for any answer, or until `wake` is set."""
        links = self.links.values()
        calls = [link.poll for link in links if link.poll is not None]
        calls += [call for link in links for call in link.submits if not call.done]
        calls += [self._view] if self._view is not None and not self._view.done else []
        if not any(call.done for call in calls):
            now = self._clock.now()
            self.wake.wait(max(0.0, min([now + _WAIT_S, *(call.next_at() for call in calls)]) - now))
        self.wake.clear()  # before the look, so that what comes during it wakes the next wait
        self._calls.wait(calls, 0.0)

    def failed_submits(self) -> Iterator[tuple[VerifierLink, list[tuple[str, int]]]]:
        """Requests and attempts that may or may not have arrived; their verifier is reported. Those of a
        verifier that is gone stay with it until the view says so."""
        for link in self.links.values():
            for call in [call for call in link.submits if call.done and not isinstance(call.error, ActorLostError)]:
                attempts = link.submits.pop(call)
                if call.error is not None:
                    self.suspect(link, call.error)
                    yield link, attempts

    def events(self) -> Iterator[tuple[VerifierLink, Sequence[ToRollout]]]:
        """What has come since the last time."""
        for link in list(self.links.values()):
            if link.poll is None or not link.poll.done:
                continue
            call, link.poll = link.poll, None
            if call.error is not None:
                link.poll_at = self._clock.now() + _REPOLL_S
                self.suspect(link, call.error)
                continue
            first, events, counters = call.result()
            self.counters[link.verifier_id], link.answered_at = counters, self._clock.now()
            fresh = events[max(0, link.cursor - first) :]
            link.cursor = max(link.cursor, first + len(events))
            yield link, fresh

    def forget_counters(self) -> None:
        """Drop all counters, also those on their way."""
        self.counters.clear()
        for link in self.links.values():
            link.poll = None


def _give_up(why: str, unfinished: int) -> NoReturn:
    raise ActorLostError(f"{why}; {unfinished} requests are unfinished")
