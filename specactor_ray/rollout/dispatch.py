"""Hands requests to verifiers, journals what they commit, and moves requests off verifiers that die or are crowded.

Every request added is returned exactly once: finished, or failed with its reason.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from specactor_ray.errors import ActorLostError
from specactor_ray.messages import Finished, Progress, RequestStats, ToRollout
from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.rollout.rebalance import (
    Pace,
    RunningRequest,
    are_missed,
    expected_remaining,
    plan_moves,
    spare_verifiers,
)
from specactor_ray.rollout.spares import Spares, is_done
from specactor_ray.targets.base import TargetRequest

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Longest time one poll waits at the verifier for an event."""
_LINGER_S = 0.1
"""Longest time an answer is held back to gather progress of several steps; ends of requests are told at once."""
_WAIT_S = 0.25
"""Longest wait for any poll before the view is looked at again."""
_VIEW_INTERVAL_S = 0.5
_VIEW_TIMEOUT_S = 5.0
_MAX_ISSUES = 3
"""A request whose verifier died this often is taken for the cause and fails."""
_TAIL_INTERVAL_S = 0.1
"""Time between two looks at the loads when no request waits."""


class Dispatcher:
    """Runs journaled requests on the verifiers the controller has.

    Args:
        fetch_view: Asks the controller for its view; returns an object reference of one.
        outstanding_per_verifier: Most requests handed to one verifier at a time; the rest wait here, so that a
            verifier that joins late or is faster gets its share.
        no_verifier_timeout_s: Longest time without any verifier before the rollout gives up.
        spares: Where verifiers without requests are offered at the tail; None: they just idle.
    """

    def __init__(
        self,
        fetch_view: Callable[[], Any],
        outstanding_per_verifier: int,
        no_verifier_timeout_s: float,
        spares: Spares | None = None,
    ) -> None:
        self.journal = Journal()
        self.counters: dict[str, dict[str, Any]] = {}
        """Latest counters of every verifier there has been."""
        self.moves = 0
        """Requests moved from one healthy verifier to another since the start."""
        self.reissues = 0
        """Requests issued again since the start, because their verifier was gone."""
        self._fetch_view = fetch_view
        self._outstanding = outstanding_per_verifier
        self._no_verifier_timeout_s = no_verifier_timeout_s
        self._verifiers: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._backlog: deque[str] = deque()
        self._polls: dict[Any, str] = {}
        self._view_ref: Any = None
        self._view_asked = 0.0
        self._last_verifier_seen = time.monotonic()
        self._version = 0
        self.spares = spares or Spares()
        self._pace = Pace()
        self._handed: dict[str, Any] = {}
        """Request → the call that handed it to its verifier."""
        self._taken_off: dict[tuple[str, str], Any] = {}
        """(request, verifier) → the call that told the verifier to drop it."""
        self._tail_looked = 0.0

    def expect_version(self, version: int) -> None:
        """From now on, only verifiers with this version of the weights may commit."""
        self._version = version

    def run(self, entries: Sequence[JournalEntry]) -> Iterator[JournalEntry]:
        """Yield each entry when it has ended, in the order they end.

        Raises:
            ActorLostError: There was no verifier for longer than allowed.
        """
        for entry in entries:
            self.journal.add(entry)
            self._backlog.append(entry.request_id)
        self._last_verifier_seen = time.monotonic()
        self.await_spares()
        try:
            while self.journal.entries:
                self._refresh_view()
                self._hand_out()
                self._look_after_tail()
                yield from self._collect()
        finally:
            self._cancel_rest()
            self.spares.ask_back()

    def await_spares(self) -> bool:
        """Wait for the verifiers that were lent. False when some do not serve in time; they join when they do."""
        if not self.spares.away:
            return True
        are_back = self.spares.settle()
        self._look_again()
        ray.wait([self._view_ref], timeout=_VIEW_TIMEOUT_S)
        return are_back

    def _look_again(self) -> None:
        """Ask for a view that is newer than whatever happened up to now."""
        self._view_ref, self._view_asked = self._fetch_view(), time.monotonic()

    def _refresh_view(self) -> None:
        now = time.monotonic()
        if self._view_ref is None and (not self._verifiers or now - self._view_asked >= _VIEW_INTERVAL_S):
            self._view_ref, self._view_asked = self._fetch_view(), now
        if self._view_ref is not None:
            ready, _ = ray.wait([self._view_ref], timeout=0.0 if self._verifiers else _WAIT_S)
            if ready:
                view = ray.get(ready[0])
                self._view_ref = None
                self._take_verifiers(view.verifiers)
        if self._verifiers:
            self._last_verifier_seen = now
        elif now - self._last_verifier_seen > self._no_verifier_timeout_s:
            raise ActorLostError(
                f"no verifier for {self._no_verifier_timeout_s:.0f} s; "
                f"{len(self.journal.entries)} requests are unfinished (the controller's log says why)"
            )

    def _take_verifiers(self, verifiers: Mapping[str, Any]) -> None:
        for verifier_id in self._verifiers.keys() - verifiers.keys():
            if verifier_id in self.spares.away:
                del self._verifiers[verifier_id]  # it sleeps; it has no requests
            else:
                self._lose(verifier_id)
        for verifier_id, handle in verifiers.items():
            if verifier_id not in self._verifiers and verifier_id not in self._lost:
                self._verifiers[verifier_id] = handle
        polled = set(self._polls.values())
        for verifier_id, handle in self._verifiers.items():
            if verifier_id not in polled:
                self._polls[handle.poll.remote(_POLL_S, _LINGER_S)] = verifier_id

    def _lose(self, verifier_id: str) -> None:
        """The verifier is gone: its requests go on elsewhere from what the journal holds."""
        self._verifiers.pop(verifier_id, None)
        self._lost.add(verifier_id)
        self._polls = {ref: owner for ref, owner in self._polls.items() if owner != verifier_id}
        released = self.journal.release(verifier_id)
        if released:
            self.reissues += len(released)
            when = "" if self._verifiers else " when its replacement is ready"
            logger.warning("verifier %s is gone; %d requests are issued again%s", verifier_id, len(released), when)
        for entry in released:
            self._pace.forget(entry.request_id)
        self._backlog.extendleft(entry.request_id for entry in reversed(released))

    def _hand_out(self) -> None:
        loads = self._loads() if self._backlog else {}
        batches: dict[str, list[TargetRequest]] = {}
        while self._backlog and loads:
            verifier_id = min(loads, key=loads.__getitem__)
            if loads[verifier_id] >= self._outstanding:
                break
            request_id = self._backlog[0]
            if self.journal.entries[request_id].issues >= _MAX_ISSUES:
                break
            if not self._has_dropped(verifier_id, request_id):
                break
            self._backlog.popleft()
            batches.setdefault(verifier_id, []).append(self.journal.assign(request_id, verifier_id))
            loads[verifier_id] += 1
        self._submit(batches)

    def _loads(self) -> dict[str, int]:
        """Requests of every verifier that can take some."""
        return {name: self.journal.load(name) for name in self._verifiers if name not in self.spares.away}

    def _submit(self, batches: Mapping[str, Sequence[TargetRequest]]) -> None:
        for verifier_id, batch in batches.items():
            call = self._verifiers[verifier_id].submit.remote(list(batch))
            self._handed.update({request.request_id: call for request in batch})

    def _has_dropped(self, verifier_id: str, request_id: str) -> bool:
        """Whether a verifier that had this request before has heard that it was taken off it.

        Calls to an actor with several threads may overtake each other."""
        call = self._taken_off.get((request_id, verifier_id))
        return call is None or is_done(call)

    def _look_after_tail(self) -> None:
        """When no request waits: level the loads, and lend verifiers that have none, or ask for them back."""
        now = time.monotonic()
        if now - self._tail_looked < _TAIL_INTERVAL_S:
            return
        self._tail_looked = now
        if self.spares.poll():
            self._look_again()
        if are_missed(len(self._loads()), len(self.spares.away), len(self.journal.entries)):
            self.spares.ask_back()
        if self._backlog:
            return
        self._level()
        self._taken_off = {key: call for key, call in self._taken_off.items() if not is_done(call)}
        dropping = {verifier_id for _, verifier_id in self._taken_off}
        spare = [name for name in spare_verifiers(self._loads()) if name not in dropping]
        left = {name: _expected(entry) for name, entry in self.journal.entries.items()}
        remaining_s = self._pace.remaining_s(left)
        if spare and remaining_s is not None:
            self.spares.offer(spare, len(left), remaining_s, now)

    def _level(self) -> None:
        running = [
            RunningRequest(
                entry.request_id,
                entry.owner,
                len(entry.prompt_token_ids) + len(entry.token_ids) if self._pace.begun(entry.request_id) else 0,
                _expected(entry),
                entry.moves,
                entry.owners,
            )
            for entry in self.journal.entries.values()
            if entry.owner is not None
        ]
        batches: dict[str, list[TargetRequest]] = {}
        for move in plan_moves(running, self._loads()):
            if not is_done(self._handed[move.request_id]):  # its verifier may not know of it yet: another time
                continue
            call = self._verifiers[move.source].cancel.remote([move.request_id])
            self._taken_off[move.request_id, move.source] = call
            batches.setdefault(move.target, []).append(self.journal.move(move.request_id, move.target))
            self._pace.forget(move.request_id)
            self.moves += 1
            logger.info("request %s moves from %s to %s", move.request_id, move.source, move.target)
        self._submit(batches)

    def _collect(self) -> Iterator[JournalEntry]:
        yield from self._fail_repeat_offenders()
        if not self._polls:
            return
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=_WAIT_S)
        for ref in ready:
            verifier_id = self._polls.pop(ref)
            try:
                events, counters = ray.get(ref)
            except RayError as error:
                logger.warning("polling verifier %s failed: %s", verifier_id, type(error).__name__)
                self._lose(verifier_id)
                continue
            if counters["weight_version"] != self._version and events:
                logger.error("verifier %s has weights of version %s", verifier_id, counters["weight_version"])
                self._lose(verifier_id)
                continue
            self.counters[verifier_id] = counters
            if verifier_id not in self._verifiers:
                continue  # it was lent meanwhile
            self._polls[self._verifiers[verifier_id].poll.remote(_POLL_S, _LINGER_S)] = verifier_id
            yield from self._journal_events(verifier_id, events)

    def _journal_events(self, verifier_id: str, events: Sequence[ToRollout]) -> Iterator[JournalEntry]:
        for event in events:
            if isinstance(event, Progress):
                if self.journal.progress(verifier_id, event):
                    entry = self.journal.entries[event.request_id]
                    self._pace.progress(event.request_id, len(entry.token_ids), time.monotonic())
                continue
            ended = self.journal.finish(verifier_id, event)
            if ended is not None:
                self._forget(ended.request_id)
                yield ended

    def _fail_repeat_offenders(self) -> Iterator[JournalEntry]:
        while self._backlog and self.journal.entries[self._backlog[0]].issues >= _MAX_ISSUES:
            request_id = self._backlog.popleft()
            reason = f"its verifier died {_MAX_ISSUES} times while it ran"
            self._forget(request_id)
            yield self.journal.fail(request_id, Finished(request_id, "error", RequestStats(), reason))

    def _forget(self, request_id: str) -> None:
        self._pace.forget(request_id)
        self._handed.pop(request_id, None)

    def _cancel_rest(self) -> None:
        """The caller stopped early: verifiers drop what is left."""
        for verifier_id, handle in self._verifiers.items():
            left = [entry.request_id for entry in self.journal.entries.values() if entry.owner == verifier_id]
            if left:
                handle.cancel.remote(left)
        for request_id in self.journal.entries:
            self._forget(request_id)
        self.journal.entries.clear()
        self._backlog.clear()


def _expected(entry: JournalEntry) -> float:
    """Output tokens that this request is expected to have ahead."""
    sampling = entry.sampling
    return expected_remaining(len(entry.token_ids), sampling.max_tokens, sampling.ignore_eos)
