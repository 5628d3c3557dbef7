"""Which verifier gets which request: the waiting ones, those whose verifier failed, and moves at the end of a rollout.

Pure bookkeeping: no Ray, no clock.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.target.base import TargetRequest

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
MAX_MOVES = 2
"""Number of moves after which a request stays."""
_LEAST_EXPECTED = 32
"""Smallest number of expected remaining output tokens of a request."""
_HANDOVER_TOKENS = 16
"""Cost of a move besides the prefill, in decoded tokens: a few steps without this request, and the tokens that the old
verifier committed and that are not journaled."""


class Backlog:
    """Hands requests to the verifier of their session, else to the least loaded one, and suspects to verifiers that
    have nothing else.

    Requests that were taken off their verifier go first, then those of the smallest priority. Within a priority each
    session, each stream and the requests without either take turns, so that a burst of one delays none of the others.

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

    def level(self, verifiers: Sequence[str]) -> tuple[list[tuple[Move, int]], Batches]:
        """Move requests between these verifiers where that pays (`plan_moves`). Returns the moves with the attempts
        that they end, and the requests to submit."""
        batches: Batches = {}
        ended: list[tuple[Move, int]] = []
        loads = {name: self._journal.load(name) for name in verifiers if not self.quarantine.occupies(name)}
        for move in plan_moves(loads, self._journal.owned_by):
            entry = self._journal.entries[move.request_id]
            ended.append((move, entry.attempt))
            entry.moves += 1
            if entry.session is not None:
                self.set_home(entry.session, move.target)
            batches.setdefault(move.target, []).append(self._journal.hand_to(move.request_id, move.target))
        return ended, batches

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
        self._priorities.clear()
        self.single = 0

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


@dataclass(eq=False)
class _Group:
    members: dict[str, int]
    """Suspect → number of output tokens in the journal at the failure of its verifier."""
    deaths: int = 1
    """Failures in a row without progress, for a group of one."""
    since: int = 0
    """Failures of all verifiers before these."""


class Quarantine:
    """Suspects: requests whose verifier failed. They run apart from the others, in ever smaller groups, until one is
    alone; each is in a group that waits or at a verifier.

    One request can crash every verifier it is given to. Other requests on that verifier must not fail with it, and
    requests must not fail for deaths that none of them caused. Sampling is keyed, so a request that killed its verifier
    kills the next one at the same output position: a suspect that passes that position is acquitted. A suspect that
    runs alone, makes no progress and loses `MAX_DEATHS` verifiers in a row is the cause; more are needed if verifiers
    fail without it at the same time, since then there is another problem.
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


class Move(NamedTuple):
    """Move of a request from one verifier to another."""

    request_id: str
    source: str
    target: str


def plan_moves(loads: Mapping[str, int], requests_at: Callable[[str], Iterable[JournalEntry]]) -> list[Move]:
    """Moves from the fullest to the emptiest verifiers, as long as their loads differ by 2 or more and a move pays.

    A move that does not pay to the emptiest verifier pays to none, now and later in the plan.

    Args:
        loads: Verifier that can take requests → number of its requests.
        requests_at: Requests of one of them; called only for verifiers that are too full.

    Returns:
        Moves to carry out together, each request at most once. The resulting loads cause no move back.
    """
    loads, moves = dict(loads), []
    movable: dict[str, list[JournalEntry]] = {}
    fullest = [(-load, verifier) for verifier, load in loads.items()]
    heapq.heapify(fullest)
    target = min(loads, key=loads.__getitem__, default="")
    while fullest:
        _, source = heapq.heappop(fullest)
        at = loads[source], loads[target]
        if at[0] - at[1] < 2:
            break
        if source not in movable:
            movable[source] = [entry for entry in requests_at(source) if entry.moves < MAX_MOVES]
        best = max(movable[source], key=lambda entry: gain(entry, *at), default=None)
        if best is None or gain(best, *at) <= 0:
            continue
        moves.append(Move(best.request_id, source, target))
        movable[source].remove(best)
        loads[source] -= 1
        loads[target] += 1
        heapq.heappush(fullest, (-loads[source], source))
        target = min(loads, key=loads.__getitem__)
    return moves


def gain(entry: JournalEntry, source_load: int, target_load: int) -> float:
    """Saving of a move minus its cost, in positions of a forward pass; a move pays above 0.

    A verify step of b requests takes about `b * v + β` seconds (SpecActor, arXiv 2511.16193, section 4), and a position
    of a prefill costs about as much as one of a decode step, `v`. Moving one of L requests to a verifier with m saves
    `(L - 1 - m) * v` per token for the moved request, and as much for all others taken together. It costs `v` for each
    token of prompt and output that the new verifier has to read, which its m requests wait for as well.
    """
    sampling = entry.sampling
    context = len(entry.prompt_token_ids) + entry.num_tokens if entry.has_begun else 0
    remaining = expected_remaining(entry.num_tokens, sampling.max_tokens, sampling.ignore_eos)
    saved = 2.0 * remaining * (source_load - 1 - target_load)
    return saved - (context + _HANDOVER_TOKENS) * (1 + target_load)


def expected_remaining(committed: int, max_tokens: int, ignore_eos: bool = False) -> float:
    """Expected number of remaining output tokens of a request.

    Output lengths are heavy-tailed: the longer an output is, the more tokens are expected to follow. For a Pareto
    distribution of exponent 2 the mean rest equals the present length; `max_tokens` bounds it.
    """
    room = max(max_tokens - committed, 0)
    return float(room if ignore_eos else min(room, max(committed, _LEAST_EXPECTED)))
