"""Hands requests to verifiers, journals what they commit, and moves requests off verifiers that die or are crowded.

Every request added is returned exactly once: finished, or failed with its reason. Who is alive is for the controller to
say: a verifier that cannot be reached is reported (`suspect`) and asked again until the controller's view drops it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.controller.state import ClusterView, Departure
from specactor_ray.errors import ActorLostError, SpecActorError
from specactor_ray.messages import Finished, Progress, Refused, RequestStats, ToRollout
from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.rollout.quarantine import Quarantine
from specactor_ray.rollout.rebalance import (
    Pace,
    RunningRequest,
    are_missed,
    expected_remaining,
    plan_moves,
    spare_verifiers,
)
from specactor_ray.rollout.spares import Spares
from specactor_ray.targets.base import TargetRequest

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Longest time one poll waits at the verifier for an event."""
_LINGER_S = 0.1
"""Longest time an answer is held back to gather progress of several steps; ends of requests are told at once."""
_POLL_TIMEOUT_S = 15.0
"""Longest time for an answer to a poll; then it is sent again."""
_REPOLL_S = 0.25
"""Pause after a poll that failed."""
_WAIT_S = 0.25
"""Longest wait for any answer before the view is looked at again."""
_SUBMIT_TIMEOUT_S = 30.0
_VIEW_INTERVAL_S = 0.5
_VIEW_TIMEOUT_S = 5.0
_NOTICE_TIMEOUT_S = 30.0
_SUSPECT_INTERVAL_S = 1.0
"""Time between two reports of the same verifier."""
_MAX_STALLS = 3
"""A request that stalled this often fails."""
_REFUSED_S = 1.0
"""A verifier that refused a request is given none for this long."""
_TAIL_INTERVAL_S = 0.1
"""Time between two looks at the loads when no request waits."""


@dataclass(eq=False, slots=True)
class _Link:
    """The dispatcher's side of one verifier."""

    handle: Any
    cursor: int = 0
    """Events of it that are journaled."""
    poll: Call | None = None
    poll_at: float = 0.0
    free_at: float = 0.0
    """When it may be given requests again."""
    answered_at: float = 0.0
    progress_at: float = float("-inf")
    """When any of its requests made progress last."""
    suspected_at: float = float("-inf")
    submits: dict[Call, list[tuple[str, int]]] = field(default_factory=dict)
    """Calls that hand it requests → (request, attempt)."""

    def is_open(self, now: float) -> bool:
        """It may be given requests: it refused none lately, and answered the last time it was asked."""
        return now >= self.free_at and self.suspected_at <= self.answered_at


class Dispatcher:
    """Runs journaled requests on the verifiers the controller has.

    Args:
        controller: Handle of the controller.
        calls: What calls are made with.
        outstanding_per_verifier: Most requests handed to one verifier at a time; the rest wait here, so that a
            verifier that joins late or is faster gets its share.
        no_verifier_timeout_s: Longest time without any verifier, or without an answer of the controller, before the
            rollout gives up.
        request_stall_timeout_s: Longest time that a request which has begun, or has stalled before, makes no progress
            while its verifier answers; then it is handed out again.
        spares: Where verifiers without requests are offered at the tail; None: they just idle.
    """

    def __init__(
        self,
        controller: Any,
        calls: Calls,
        outstanding_per_verifier: int,
        no_verifier_timeout_s: float,
        request_stall_timeout_s: float,
        spares: Spares | None = None,
    ) -> None:
        self.journal = Journal()
        self.counters: dict[str, dict[str, Any]] = {}
        """Latest counters of every verifier there has been."""
        self.moves = 0
        """Requests moved from one healthy verifier to another since the start."""
        self.reissues = 0
        """Requests issued again since the start, because their verifier was gone or did not run them."""
        self._controller, self._calls, self._clock = controller, calls, calls.clock
        self._outstanding = outstanding_per_verifier
        self._no_verifier_timeout_s, self._request_stall_timeout_s = no_verifier_timeout_s, request_stall_timeout_s
        self._links: dict[str, _Link] = {}
        self._departed: Mapping[str, Departure] = {}
        self._backlog: deque[str] = deque()
        self._ended: deque[JournalEntry] = deque()
        """Requests that have ended and were not yielded yet."""
        self._progress_at: dict[str, float] = {}
        """Request → when its present attempt made progress last."""
        self._quarantine = Quarantine()
        self._view: Call | None = None
        self._view_asked = float("-inf")
        self._controller_seen = self._verifier_seen = self._looked_at = self._clock.now()
        self._notices: list[Call] = []
        """Calls whose answers nobody waits for."""
        self._version = 0
        self.spares = spares or Spares(None, calls)
        self._pace = Pace()
        self._tail_looked = 0.0

    def expect_version(self, version: int) -> None:
        """Requests that are added from now on are run with this version of the weights."""
        self._version = version

    def run(self, entries: Sequence[JournalEntry]) -> Iterator[JournalEntry]:
        """Yield each entry when it has ended, in the order they end.

        Raises:
            ActorLostError: The controller, or all verifiers, were gone for longer than allowed.
        """
        for entry in entries:
            entry.weight_version = self._version
            self.journal.add(entry)
            self._backlog.append(entry.request_id)
        self._controller_seen = self._verifier_seen = self._clock.now()
        self.await_spares()
        try:
            while self.journal.entries:
                self._refresh_view()
                self._hand_out()
                self._look_after_tail()
                self._wait()
                self._collect()
                while self._ended:
                    yield self._ended.popleft()
        finally:
            self._cancel_rest()
            self.spares.ask_back()

    def await_spares(self) -> bool:
        """Wait for the verifiers that were lent. False when some do not serve in time; they join when they do."""
        if not self.spares.away:
            return True
        are_back = self.spares.settle()
        self._ask_view()
        self._calls.wait([call for call in [self._view] if call is not None], _VIEW_TIMEOUT_S)
        return are_back

    # ---- who is there ----

    def _ask_view(self) -> None:
        """Ask for a view that is newer than whatever happened up to now."""
        self._view = self._calls.start(self._controller, "view", deadline_s=_VIEW_TIMEOUT_S)
        self._view_asked = self._clock.now()

    def _refresh_view(self) -> None:
        now = self._clock.now()
        if now - self._looked_at > _VIEW_TIMEOUT_S:  # we were held up, or whoever takes what has ended: not they
            self._controller_seen = self._verifier_seen = now
        self._looked_at = now
        if self._view is None and (not self._links or now - self._view_asked >= _VIEW_INTERVAL_S):
            self._ask_view()
        if self._view is not None and self._view.poll():
            call, self._view = self._view, None
            if call.error is None:
                self._controller_seen = now
                self._take_view(call.result())
            elif isinstance(call.error, ActorLostError):
                self._give_up(f"the controller of the run is gone ({call.error})")
        if self._links:
            self._verifier_seen = now
        limit_s = self._no_verifier_timeout_s
        if now - self._controller_seen > limit_s:
            self._give_up(f"the controller of the run has not answered for {limit_s:.0f} s")
        if now - self._verifier_seen > limit_s:
            self._give_up(f"no verifier for {limit_s:.0f} s (the controller's log says why)")

    def _give_up(self, why: str) -> None:
        raise ActorLostError(f"{why}; {len(self.journal.entries)} requests are unfinished")

    def _take_view(self, view: ClusterView) -> None:
        self._departed = view.departed
        for verifier_id in [name for name in self._links if name not in view.verifiers]:
            self._release_all(verifier_id, self._links.pop(verifier_id))
        for verifier_id, handle in view.verifiers.items():
            if verifier_id not in self._links:
                self._links[verifier_id] = _Link(handle, answered_at=self._clock.now())

    def _release_all(self, verifier_id: str, link: _Link) -> None:
        """The verifier is gone: its requests continue elsewhere from what the journal holds. Those whose arrival it did
        not confirm are not suspected."""
        positions = {entry.request_id: len(entry.token_ids) for entry in self.journal.owned_by(verifier_id)}
        arrived = {call for call in link.submits if call.poll() and call.error is None}
        unseen = [name for call in link.submits if call not in arrived for name, _ in link.submits[call]]
        why = f"verifier {verifier_id} is gone"
        self._reissue([name for name in unseen if positions.pop(name, None) is not None], why)
        if self._departed.get(verifier_id) is Departure.FAILED:
            for request_id in self._quarantine.accuse(verifier_id, positions):
                del positions[request_id]
                self._fail(request_id, "its verifiers failed again and again while it ran alone")
        else:
            self._quarantine.excuse(verifier_id)
        self._reissue(list(positions), why)

    def _reissue(self, request_ids: Sequence[str], why: str) -> None:
        """Take requests off their verifier; suspects wait in the quarantine, the others first in the backlog."""
        if not request_ids:
            return
        self.reissues += len(request_ids)
        when = "" if self._links else " when a verifier is ready"
        logger.warning("%s; %d requests are issued again%s", why, len(request_ids), when)
        for request_id in reversed(request_ids):
            self.journal.release(request_id)
            self._pace.forget(request_id)
            self._progress_at.pop(request_id, None)
            self._quarantine.put_back(request_id)
            if not self._quarantine.is_suspect(request_id):
                self._backlog.appendleft(request_id)

    def _fail(self, request_id: str, reason: str) -> None:
        """End a request from the rollout's side."""
        entry = self.journal.entries[request_id]
        self._forget(request_id)
        tokens = len(entry.token_ids)
        self._ended.append(self.journal.end(Finished(request_id, "error", RequestStats(), reason, tokens)))

    def _suspect(self, verifier_id: str, link: _Link, error: SpecActorError) -> None:
        """Report a verifier that could not be reached; the controller finds out what is the matter."""
        now = self._clock.now()
        if now - link.suspected_at >= _SUSPECT_INTERVAL_S or link.suspected_at <= link.answered_at:
            link.suspected_at = now
            logger.warning("verifier %s: %s", verifier_id, error)
            self._notify(self._controller, "suspect", verifier_id, str(error))

    def _notify(self, actor: Any, method: str, *arguments: Any) -> None:
        """Call without waiting for the answer; `_look_after_tail` sees to it that it arrives."""
        self._notices.append(self._calls.start(actor, method, *arguments, deadline_s=_NOTICE_TIMEOUT_S))

    # ---- handing out ----

    def _hand_out(self) -> None:
        now = self._clock.now()
        batches: dict[str, list[TargetRequest]] = {}
        open_to_all = self._open_verifiers(now, batches)
        loads = {name: self.journal.load(name) for name in open_to_all} if self._backlog else {}
        while self._backlog and loads:
            verifier_id = min(loads, key=loads.__getitem__)
            if loads[verifier_id] >= self._outstanding:
                break
            self._hand(self._backlog.popleft(), verifier_id, batches)
            loads[verifier_id] += 1
        self._submit(batches)

    def _open_verifiers(self, now: float, batches: dict[str, list[TargetRequest]]) -> list[str]:
        """Verifiers that may be given ordinary requests. Suspects are put into `batches`, each group alone."""
        free = [name for name, link in self._links.items() if link.is_open(now) and name not in self.spares.away]
        for name in free:
            if self._quarantine.waiting and not self._quarantine.occupies(name) and not self.journal.load(name):
                for request_id in self._quarantine.take(name):
                    self._hand(request_id, name, batches)
        free = [name for name in free if not self._quarantine.occupies(name)]
        if self._quarantine.waiting and free:  # the emptiest one is kept free for the suspects
            free.remove(min(free, key=self.journal.load))
        return free

    def _hand(self, request_id: str, verifier_id: str, batches: dict[str, list[TargetRequest]]) -> None:
        batches.setdefault(verifier_id, []).append(self.journal.hand_to(request_id, verifier_id))
        if self.journal.entries[request_id].stalls:
            self._progress_at[request_id] = self._clock.now()  # it may be stuck before it has begun

    def _submit(self, batches: Mapping[str, Sequence[TargetRequest]]) -> None:
        for verifier_id, batch in batches.items():
            link = self._links[verifier_id]
            call = self._calls.start(link.handle, "submit", list(batch), deadline_s=_SUBMIT_TIMEOUT_S)
            link.submits[call] = [(request.request_id, request.attempt) for request in batch]

    def _check_submits(self, verifier_id: str, link: _Link) -> None:
        """Requests that did not arrive at their verifier are handed out again."""
        for call in [call for call in link.submits if call.done]:
            attempts = link.submits.pop(call)
            if call.error is None:
                continue
            self._suspect(verifier_id, link, call.error)
            self._notify(link.handle, "cancel", attempts)  # it may have arrived all the same
            lost = [request_id for request_id, attempt in attempts if self.journal.is_current(request_id, attempt)]
            link.free_at = self._clock.now() + _REFUSED_S
            self._reissue(lost, f"verifier {verifier_id} could not be handed requests")

    # ---- the tail ----

    def _look_after_tail(self) -> None:
        """When no request waits: level the loads, and lend verifiers that have none, or ask for them back."""
        now = self._clock.now()
        if now - self._tail_looked < _TAIL_INTERVAL_S:
            return
        self._tail_looked = now
        self._notices = [call for call in self._notices if not call.poll()]
        self._reissue_stalled(now)
        if self.spares.poll():
            self._ask_view()
        loads = self._loads()
        if are_missed(len(loads), len(self.spares.away), len(self.journal.entries)) or self._quarantine.waiting:
            self.spares.ask_back()
        if self._backlog or self._quarantine.waiting:
            return
        self._level(loads)
        left = {name: _expected(entry) for name, entry in self.journal.entries.items()}
        spare, remaining_s = spare_verifiers(self._loads()), self._pace.remaining_s(left)
        if spare and remaining_s is not None:
            self.spares.offer(spare, len(left), remaining_s, now)

    def _loads(self) -> dict[str, int]:
        """Requests of every verifier that can take ordinary ones."""
        return {
            name: self.journal.load(name)
            for name in self._links
            if name not in self.spares.away and not self._quarantine.occupies(name)
        }

    def _level(self, loads: Mapping[str, int]) -> None:
        running = [
            RunningRequest(
                entry.request_id,
                entry.owner,
                len(entry.prompt_token_ids) + len(entry.token_ids) if self._pace.begun(entry.request_id) else 0,
                _expected(entry),
                entry.moves,
            )
            for entry in self.journal.entries.values()
            if entry.owner is not None
        ]
        batches: dict[str, list[TargetRequest]] = {}
        for move in plan_moves(running, loads):
            entry = self.journal.entries[move.request_id]
            self._notify(self._links[move.source].handle, "cancel", [(move.request_id, entry.attempt)])
            entry.moves += 1
            self._hand(move.request_id, move.target, batches)
            self._pace.forget(move.request_id)
            self.moves += 1
            logger.info("request %s moves from %s to %s", move.request_id, move.source, move.target)
        self._submit(batches)

    # ---- what comes back ----

    def _wait(self) -> None:
        """Keep a poll at every verifier, and wait for any answer."""
        now = self._clock.now()
        for link in self._links.values():
            if link.poll is None and now >= link.poll_at:
                arguments = (link.cursor, _POLL_S, _LINGER_S)
                link.poll = self._calls.start(link.handle, "poll", *arguments, deadline_s=_POLL_TIMEOUT_S, retry=False)
        calls = [link.poll for link in self._links.values() if link.poll is not None]
        calls += [call for link in self._links.values() for call in link.submits]
        calls += [self._view] if self._view is not None else []
        self._calls.wait(calls, _WAIT_S)

    def _collect(self) -> None:
        for verifier_id, link in list(self._links.items()):
            self._check_submits(verifier_id, link)
            if link.poll is None or not link.poll.done:
                continue
            call, link.poll = link.poll, None
            if call.error is not None:
                link.poll_at = self._clock.now() + _REPOLL_S
                self._suspect(verifier_id, link, call.error)
                continue
            first, events, counters = call.result()
            self.counters[verifier_id], link.answered_at = counters, self._clock.now()
            fresh = events[max(0, link.cursor - first) :]
            link.cursor = max(link.cursor, first + len(events))
            self._journal_events(verifier_id, link, fresh)

    def _journal_events(self, verifier_id: str, link: _Link, events: Sequence[ToRollout]) -> None:
        for event in events:
            if isinstance(event, Progress):
                self._journal_progress(verifier_id, link, event)
                continue
            request_id = event.request_id
            if not self.journal.is_current(request_id, event.attempt):
                continue
            if isinstance(event, Finished) and (ended := self.journal.finish(event)) is not None:
                self._forget(request_id)
                self._ended.append(ended)
                continue
            if isinstance(event, Refused):
                link.free_at = self._clock.now() + _REFUSED_S
                why = f"verifier {verifier_id} refused: {event.reason}"
            else:
                why = self._miss(verifier_id, link, request_id, event.attempt)
            self._reissue([request_id], why)

    def _journal_progress(self, verifier_id: str, link: _Link, event: Progress) -> None:
        gapped, now = self.journal.progress(event), self._clock.now()
        link.progress_at = now
        for request_id, attempt in event.requests:
            if request_id in gapped:
                self._reissue([request_id], self._miss(verifier_id, link, request_id, attempt))
            elif self.journal.is_current(request_id, attempt):
                tokens = len(self.journal.entries[request_id].token_ids)
                self._progress_at[request_id] = now
                self._pace.progress(request_id, tokens, now)
                self._quarantine.progress(request_id, tokens)

    def _miss(self, verifier_id: str, link: _Link, request_id: str, attempt: int) -> str:
        self._notify(link.handle, "cancel", [(request_id, attempt)])
        return f"verifier {verifier_id} told of {request_id} with a gap"

    def _reissue_stalled(self, now: float) -> None:
        """Requests that have begun and make no progress at a verifier that answers are handed out again."""
        limit_s = self._request_stall_timeout_s
        for request_id in [name for name, since in self._progress_at.items() if now - since > limit_s]:
            entry = self.journal.entries[request_id]
            link = self._links.get(entry.owner or "")
            if link is None or now - link.answered_at > limit_s:
                continue  # its verifier is what stalls; the controller sees to it
            if not self._pace.begun(request_id) and now - link.progress_at <= limit_s:
                continue  # it may wait for the others there to end
            self._notify(link.handle, "cancel", [(request_id, entry.attempt)])
            entry.stalls += 1
            link.free_at = now + _REFUSED_S  # another one first
            if entry.stalls < _MAX_STALLS:
                self._reissue([request_id], f"request {request_id} made no progress for {limit_s:g} s at {entry.owner}")
            else:
                self._fail(request_id, f"it stopped making progress {_MAX_STALLS} times, for {limit_s:g} s each")

    def _forget(self, request_id: str) -> None:
        self._pace.forget(request_id)
        self._progress_at.pop(request_id, None)
        self._quarantine.forget(request_id)

    def _cancel_rest(self) -> None:
        """The caller stopped early, or all have ended: verifiers drop what is left, and no answer is waited for."""
        for verifier_id, link in self._links.items():
            left = [(entry.request_id, entry.attempt) for entry in self.journal.owned_by(verifier_id)]
            if left:
                self._notify(link.handle, "cancel", left)
            link.poll = None
            link.submits.clear()
        for request_id in self.journal.entries:
            self._pace.forget(request_id)
        self._progress_at.clear()
        self._quarantine.clear()
        self.journal.clear()
        self._backlog.clear()
        self._ended.clear()


def _expected(entry: JournalEntry) -> float:
    """Output tokens that this request is expected to have ahead."""
    sampling = entry.sampling
    return expected_remaining(len(entry.token_ids), sampling.max_tokens, sampling.ignore_eos)
