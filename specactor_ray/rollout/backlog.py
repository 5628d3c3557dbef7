"""Which verifier gets which request: the waiting ones, and those of failed verifiers.

Pure bookkeeping: no Ray, no clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.table.requests import TargetRequest

Batches = dict[str, list[TargetRequest]]
"""Verifier → requests to submit to it."""
_Flow = OrderedDict[str, None]
"""Waiting requests, in the order of their arrival."""
_REMEMBERED = 65_536
"""Most recently used sessions with a remembered verifier."""
ACQUITTED_AFTER = 16
"""Output tokens beyond the journaled position at the failure: tokens that may have been committed but not journaled."""
MAX_DEATHS, MOST_DEATHS = 3, 8
"""Smallest and largest number of failures alone, in a row and without progress, that convict."""


class Backlog:
    """Hands requests to the verifier of their session, else to the least loaded one, and suspects to verifiers that
    have nothing else.

    Requests that were taken off their verifier go first, then those of the smallest priority. Within a priority each
    session, each stream and the requests without either take turns, so that a burst of one delays none of the others.
    `outstanding`: most requests of one verifier at a time.
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
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Session → verifier."""

    def __bool__(self) -> bool:
        """Whether any request may be handed out."""
        waits = self._again or self.quarantine.waiting or (self._fresh and not self.holds)
        return bool(waits) and not self.is_frozen

    def add(self, request_ids: Iterable[str]) -> None:
        """Append requests behind all others of their priority and flow."""
        for entry in map(self._journal.entries.__getitem__, request_ids):
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

    def release(self) -> None:
        """End one hold."""
        self.holds -= 1
        if not self.holds:
            self.is_frozen = False

    def set_home(self, session: str, verifier_id: str) -> None:
        """Send all further turns of the session to this verifier."""
        self._homes[session] = verifier_id
        self._homes.move_to_end(session)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)

    def clear(self) -> None:
        self.quarantine.clear()
        self._again.clear()
        self._fresh.clear()
        self.single = 0

    def _take(self, free: Collection[str]) -> JournalEntry | None:
        """Remove the next request. Requests of a verifier that is in `free` but has no room are passed over."""
        entries, load = self._journal.entries, self._journal.load
        if self._again:
            return entries[self._again.popitem(last=False)[0]]
        for _, flows in () if self.holds else sorted(self._fresh.items()):
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


@dataclass(eq=False)
class _Group:
    members: dict[str, int]
    """Suspect → number of output tokens in the journal at the failure of its verifier."""
    deaths: int = 1
    """Failures in a row without progress, for a group of one."""
    since: int = 0
    """Failures of all verifiers before these."""


class Quarantine:
    """Suspects: requests of failed verifiers. They run apart from the others, in ever smaller groups, until one is
    alone; each is in a group that waits or at a verifier.

    Sampling is keyed, so a request that killed its verifier kills the next one at the same output position: a suspect
    that passes that position is acquitted. A suspect that runs alone, makes no progress and loses `MAX_DEATHS`
    verifiers in a row is the cause; more are needed if verifiers fail without it at the same time.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Group] = deque()
        self._at: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._failures = 0
        """Number of failures of all verifiers."""

    def accuse(self, verifier_id: str, requests: Mapping[str, int]) -> list[str]:
        """Record a failure of a verifier with these requests (→ output tokens journaled). Returns those that are the
        cause; the other suspects wait for `take`."""
        group = self._at.pop(verifier_id, None)
        self._failures += 1
        if group is None or not group.members:
            self._split(dict(requests))
            return []
        for name in group.members:
            self._group_of.pop(name)
        positions = {name: requests.get(name, position) for name, position in group.members.items()}
        if len(positions) > 1 or positions != group.members:
            self._split(positions)
            return []
        deaths = group.deaths + 1
        elsewhere = self._failures - group.since - deaths
        if deaths >= min(MAX_DEATHS + elsewhere, MOST_DEATHS):
            return list(positions)
        self._wait(_Group(positions, deaths, group.since))
        return []

    def excuse(self, verifier_id: str) -> None:
        """Record that a verifier is gone for another reason: its suspects wait again."""
        group = self._at.pop(verifier_id, None)
        if group is not None and group.members:
            self._waiting.append(group)

    def put_back(self, request_id: str) -> None:
        """Record that a request was taken off a live verifier; a suspect waits again, alone."""
        group = self._group_of.get(request_id)
        if group is None or group in self._waiting:
            return
        alone = replace(group, members={request_id: group.members[request_id]})
        self.forget(request_id)
        self._wait(alone)

    def take(self, verifier_id: str) -> list[str]:
        """The next group for a verifier without requests; empty if none waits."""
        if not self._waiting:
            return []
        group = self._waiting.popleft()
        self._at[verifier_id] = group
        return list(group.members)

    def progress(self, request_id: str, tokens: int) -> None:
        """Record the number of output tokens of a request in the journal."""
        group = self._group_of.get(request_id)
        if group is not None and tokens >= group.members[request_id] + ACQUITTED_AFTER:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended or is acquitted."""
        group = self._group_of.pop(request_id, None)
        if group is None:
            return
        del group.members[request_id]
        if not group.members:
            self._waiting = deque(waiting for waiting in self._waiting if waiting is not group)
            self._at = {verifier_id: at for verifier_id, at in self._at.items() if at is not group}

    def is_suspect(self, request_id: str) -> bool:
        return request_id in self._group_of

    def occupies(self, verifier_id: str) -> bool:
        """Whether this verifier runs suspects, so that it must not be given other requests."""
        return verifier_id in self._at

    def members_at(self, verifier_id: str) -> list[str]:
        """The suspects that this verifier runs."""
        group = self._at.get(verifier_id)
        return [] if group is None else list(group.members)

    @property
    def waiting(self) -> int:
        """Number of groups that wait for a verifier."""
        return len(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
        self._at.clear()
        self._group_of.clear()

    def _split(self, positions: Mapping[str, int]) -> None:
        names, half = list(positions), (len(positions) + 1) // 2
        for part in (names[:half], names[half:]):
            if part:
                self._wait(_Group({name: positions[name] for name in part}, since=self._failures - 1))

    def _wait(self, group: _Group) -> None:
        self._waiting.append(group)
        self._group_of.update(dict.fromkeys(group.members, group))
