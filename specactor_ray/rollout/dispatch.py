"""Hands requests to verifiers, journals what they commit, and moves requests off verifiers that die.

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

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Longest time one poll waits at the verifier for an event."""
_LINGER_S = 0.1
"""Longest time an answer is held back to gather progress of several steps; ends of requests are told at once."""
_WAIT_S = 0.25
"""Longest wait for any poll before the view is looked at again."""
_VIEW_INTERVAL_S = 0.5
_MAX_ISSUES = 3
"""A request whose verifier died this often is taken for the cause and fails."""


class Dispatcher:
    """Runs journaled requests on the verifiers the controller has.

    Args:
        fetch_view: Asks the controller for its view; returns an object reference of one.
        outstanding_per_verifier: Most requests handed to one verifier at a time; the rest wait here, so that a
            verifier that joins late or is faster gets its share.
        no_verifier_timeout_s: Longest time without any verifier before the rollout gives up.
    """

    def __init__(
        self, fetch_view: Callable[[], Any], outstanding_per_verifier: int, no_verifier_timeout_s: float
    ) -> None:
        self.journal = Journal()
        self.counters: dict[str, dict[str, Any]] = {}
        """Latest counters of every verifier there has been."""
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
        try:
            while self.journal.entries:
                self._refresh_view()
                self._hand_out()
                yield from self._collect()
        finally:
            self._cancel_rest()

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
            logger.warning("verifier %s is gone; %d requests are issued again", verifier_id, len(released))
        self._backlog.extendleft(entry.request_id for entry in reversed(released))

    def _hand_out(self) -> None:
        loads = {verifier_id: self.journal.load(verifier_id) for verifier_id in self._verifiers}
        batches: dict[str, list[Any]] = {}
        while self._backlog and loads:
            verifier_id = min(loads, key=loads.__getitem__)
            if loads[verifier_id] >= self._outstanding:
                break
            request_id = self._backlog[0]
            if self.journal.entries[request_id].issues >= _MAX_ISSUES:
                break
            self._backlog.popleft()
            batches.setdefault(verifier_id, []).append(self.journal.assign(request_id, verifier_id))
            loads[verifier_id] += 1
        for verifier_id, batch in batches.items():
            self._verifiers[verifier_id].submit.remote(batch)

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
            self._polls[self._verifiers[verifier_id].poll.remote(_POLL_S, _LINGER_S)] = verifier_id
            yield from self._journal_events(verifier_id, events)

    def _journal_events(self, verifier_id: str, events: Sequence[ToRollout]) -> Iterator[JournalEntry]:
        for event in events:
            if isinstance(event, Progress):
                self.journal.progress(verifier_id, event)
            else:
                entry = self.journal.finish(verifier_id, event)
                if entry is not None:
                    yield entry

    def _fail_repeat_offenders(self) -> Iterator[JournalEntry]:
        while self._backlog and self.journal.entries[self._backlog[0]].issues >= _MAX_ISSUES:
            request_id = self._backlog.popleft()
            reason = f"its verifier died {_MAX_ISSUES} times while it ran"
            yield self.journal.fail(request_id, Finished(request_id, "error", RequestStats(), reason))

    def _cancel_rest(self) -> None:
        """The caller stopped early: verifiers drop what is left."""
        for verifier_id, handle in self._verifiers.items():
            left = [entry.request_id for entry in self.journal.entries.values() if entry.owner == verifier_id]
            if left:
                handle.cancel.remote(left)
        self.journal.entries.clear()
        self._backlog.clear()
