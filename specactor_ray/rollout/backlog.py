"""Requests that wait for a verifier: which one is handed out next, and to which verifier. No Ray, no clock.

Requests that were taken off their verifier go first, then those of the smallest priority. Within a priority each
session, each stream and the requests without either take turns, so that a burst of one delays none of the others.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.rollout.quarantine import Quarantine
from specactor_ray.target.base import TargetRequest

Batches = dict[str, list[TargetRequest]]
"""Verifier → requests to submit to it."""
_Flow = OrderedDict[str, None]
"""Waiting requests, in the order of their arrival."""
_REMEMBERED = 65_536
"""Most recently used sessions with a remembered verifier."""


class Backlog:
    """Hands requests to the verifier of their session, else to the least loaded one, and suspects to verifiers that
    have nothing else.

    Args:
        journal: Keeps the owners of the requests.
        outstanding: Most requests of one verifier at a time.
    """

    def __init__(self, journal: Journal, outstanding: int) -> None:
        self.quarantine = Quarantine()
        self.holds = 0
        """Requests that have not begun stay here while this is above 0."""
        self.is_frozen = False
        """True while all requests stay here."""
        self.single = 0
        """Number of requests outside of streams that wait to begin."""
        self._journal, self._outstanding = journal, outstanding
        self._again: _Flow = OrderedDict()
        """Requests that were taken off their verifier."""
        self._fresh: dict[int, OrderedDict[tuple[int, str | None], _Flow]] = {}
        """Priority → stream and session → requests, in the order of their turns."""
        self._priorities: list[int] = []
        """The keys of `_fresh`, ascending."""
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Session → verifier."""

    def __bool__(self) -> bool:
        """Whether any request may be handed out."""
        waits = self._again or self.quarantine.waiting or (self._fresh and not self.holds)
        return bool(waits) and not self.is_frozen

    def add(self, request_ids: Iterable[str]) -> None:
        """Append requests behind all others of their priority and flow."""
        for entry in map(self._journal.entries.__getitem__, request_ids):
            if entry.priority not in self._fresh:
                insort(self._priorities, entry.priority)
            flows = self._fresh.setdefault(entry.priority, OrderedDict())
            flows.setdefault((entry.stream, entry.session), OrderedDict())[entry.request_id] = None
            self.single += not entry.stream

    def put_back(self, request_ids: Sequence[str]) -> None:
        """Add requests taken off their verifier: suspects wait in the quarantine, the others before all others."""
        for request_id in reversed(request_ids):
            self.quarantine.put_back(request_id)
            if not self.quarantine.is_suspect(request_id):
                self._again[request_id] = None
                self._again.move_to_end(request_id, last=False)

    def discard(self, entry: JournalEntry) -> None:
        """Remove a request that ends before it is handed out."""
        self.quarantine.forget(entry.request_id)
        self._again.pop(entry.request_id, None)
        if not entry.attempt:
            self._remove(entry)

    def hand_out(self, verifiers: Sequence[str]) -> Batches:
        """Make these verifiers the owners of waiting requests, as far as they have room."""
        batches: Batches = {}
        load = self._journal.load
        least = [(load(name), name) for name in self._take_suspects(verifiers, batches)]
        heapq.heapify(least)
        free = {name for _, name in least}
        while least and least[0][0] < self._outstanding:
            then, verifier_id = least[0]
            if (now := load(verifier_id)) != then:  # it was given requests
                heapq.heapreplace(least, (now, verifier_id))
                continue
            if (entry := self._take(free)) is None:
                break
            if entry.session is not None:
                home = self._homes.get(entry.session, "")
                verifier_id = home if home in free and load(home) < self._outstanding else verifier_id
                self.set_home(entry.session, verifier_id)
            batches.setdefault(verifier_id, []).append(self._journal.hand_to(entry.request_id, verifier_id))
        return batches

    def set_home(self, session: str, verifier_id: str) -> None:
        """Send all further turns of the session to this verifier."""
        self._homes[session] = verifier_id
        self._homes.move_to_end(session)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)

    def _take(self, free: Collection[str]) -> JournalEntry | None:
        """Remove the next request. Requests whose verifier is in `free` but has no room are passed over."""
        entries, load = self._journal.entries, self._journal.load
        if self._again:
            return entries[self._again.popitem(last=False)[0]]
        for priority in () if self.holds else self._priorities:
            flows = self._fresh[priority]
            for (_, session), flow in flows.items():
                home = self._homes.get(session, "") if session is not None else ""
                if home not in free or load(home) < self._outstanding:
                    entry = entries[next(iter(flow))]
                    flows.move_to_end((entry.stream, session))
                    self._remove(entry)
                    return entry
        return None

    def _remove(self, entry: JournalEntry) -> None:
        """Remove a request that has not begun from its flow."""
        flows, key = self._fresh[entry.priority], (entry.stream, entry.session)
        flow = flows[key]
        del flow[entry.request_id]
        self.single -= not entry.stream
        if not flow:
            del flows[key]
        if not flows:
            del self._fresh[entry.priority]
            self._priorities.remove(entry.priority)

    def _take_suspects(self, verifiers: Sequence[str], batches: Batches) -> list[str]:
        """Put suspects into `batches`, each group alone; returns the verifiers that may be given ordinary requests."""
        quarantine, load = self.quarantine, self._journal.load
        for name in verifiers:
            if quarantine.waiting and not quarantine.occupies(name) and not load(name):
                batches[name] = [self._journal.hand_to(request_id, name) for request_id in quarantine.take(name)]
        free = [name for name in verifiers if not quarantine.occupies(name)]
        if quarantine.waiting and free:  # the least loaded one is kept free for the suspects
            free.remove(min(free, key=load))
        return free

    def clear(self) -> None:
        self.quarantine.clear()
        self._again.clear()
        self._fresh.clear()
        self._priorities.clear()
        self.single = 0
