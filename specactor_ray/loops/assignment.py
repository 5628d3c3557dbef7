"""Which drafters draft for which request. Pure bookkeeping.

Every request has one *base* drafter, of the method that promises most and has room. Requests in a race have drafters of
further methods beside it (SpecActor, arXiv 2511.16193, Algorithm 3). A base drafter comes before a racer: racers
give way where room is short, and no race ever takes a request's base drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specactor_ray.speculation.race import Straggler, Worker, assign_race, least_loaded

Placement = dict[str, dict[str, str]]
"""Request id → method → drafter id; the base method comes first."""


class DraftSeat(NamedTuple):
    """What the assignment has to know about a drafter."""

    method: str
    max_batch: int
    """Most requests it may draft for."""
    usable: bool = True
    """False: it may keep what it has but gets no more, and its requests look for others."""


class Wish(NamedTuple):
    """What one request wants."""

    request_id: str
    methods: Sequence[str]
    """Methods for its base drafter, best first."""


@dataclass(slots=True)
class AssignmentChange:
    """What has to be told to drafters: pairs of (drafter id, request id)."""

    opened: list[tuple[str, str]] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)


class DrafterAssignment:
    """Base drafters and racers of all requests. No drafter ever has more than its `max_batch` requests."""

    def __init__(self) -> None:
        self._seats: dict[str, DraftSeat] = {}
        self._of_request: Placement = {}

    @property
    def seats(self) -> Mapping[str, DraftSeat]:
        """Drafter id → what it is."""
        return self._seats

    def of(self, request_id: str) -> list[str]:
        """Drafters of a request, its base drafter first; empty for unknown ids."""
        return list(self._of_request.get(request_id, {}).values())

    def base_method(self, request_id: str) -> str | None:
        """Method of the request's base drafter; None if it has none."""
        return next(iter(self._of_request.get(request_id, {})), None)

    def add(self, request_id: str) -> None:
        """A new request; the next `revise` finds its drafter."""
        self._of_request.setdefault(request_id, {})

    def remove(self, request_id: str) -> AssignmentChange:
        """A request ended."""
        chosen = self._of_request.pop(request_id, {})
        return AssignmentChange(closed=[(drafter, request_id) for drafter in chosen.values()])

    def set_seats(self, seats: Mapping[str, DraftSeat]) -> None:
        """The complete list of drafters now. Those that left have lost their requests, which the next `revise` gives to
        others."""
        self._seats = dict(seats)
        for request_id, chosen in self._of_request.items():
            kept = {method: drafter for method, drafter in chosen.items() if drafter in seats}
            # A racer is as good as its predecessor: the first that is left becomes the base drafter.
            self._of_request[request_id] = kept

    def revise(
        self,
        wishes: Sequence[Wish],
        racers: Sequence[Straggler] = (),
        ranking: Sequence[str] = (),
        level: bool = False,
    ) -> AssignmentChange:
        """Give every request what it wants, as far as there is room.

        Args:
            wishes: The requests to look at, those to be served first in front; others keep their base drafter.
            racers: Requests in a race; the racers of all others are closed.
            ranking: Methods that race, best first.
            level: Move requests between drafters of a method until their base loads differ by one at most.
        """
        base = {request_id: dict(list(chosen.items())[:1]) for request_id, chosen in self._of_request.items()}
        loads = self._loads(base)
        for wish in wishes:
            self._place_base(wish.request_id, base[wish.request_id], wish.methods, loads)
        if level:
            self._level(base, loads)
        placed = self._keep_racers(base, racers, ranking, loads)
        for drafter, request_id in assign_race(racers, ranking, self._workers(loads), placed):
            placed[request_id][self._seats[drafter].method] = drafter
        return self._apply(placed)

    def _loads(self, placement: Placement) -> Counter[str]:
        loads = Counter(dict.fromkeys(self._seats, 0))
        for chosen in placement.values():
            loads.update(chosen.values())
        return loads

    def _place_base(self, request_id: str, chosen: dict[str, str], methods: Sequence[str], loads: Counter[str]) -> None:
        """Move a request to the first method with room, unless it is there; its old place is free only then."""
        current = next(iter(chosen.values()), None)
        for method in methods:
            if method in chosen and current is not None and self._seats[current].usable:
                return
            drafter = self._find(request_id, method, loads)
            if drafter is not None:
                if current is not None:
                    loads[current] -= 1
                loads[drafter] += 1
                chosen.clear()
                chosen[method] = drafter
                return

    def _find(self, request_id: str, method: str, loads: Counter[str]) -> str | None:
        """A drafter with room: the one that races for the request already, else the least loaded."""
        racer = self._of_request[request_id].get(method)
        if racer is not None and self._has_room(racer, loads):
            return racer
        return least_loaded(method, self._workers(loads), loads)

    def _has_room(self, drafter: str, loads: Counter[str]) -> bool:
        seat = self._seats[drafter]
        return seat.usable and loads[drafter] < seat.max_batch

    def _workers(self, loads: Counter[str]) -> dict[str, Worker]:
        return {d: Worker(s.method, loads[d], s.max_batch) for d, s in self._seats.items() if s.usable}

    def _level(self, base: Placement, loads: Counter[str]) -> None:
        """Move base requests from the fullest to the emptiest drafter of a method until they differ by one at most."""
        usable = {drafter: seat for drafter, seat in self._seats.items() if seat.usable}
        for method in dict.fromkeys(seat.method for seat in usable.values()):
            peers = [drafter for drafter, seat in usable.items() if seat.method == method]
            while True:
                full = max(peers, key=lambda d: loads[d])
                open_to_more = [d for d in peers if loads[d] < usable[d].max_batch]
                empty = min(open_to_more, key=lambda d: loads[d], default=full)
                if loads[full] - loads[empty] <= 1:
                    break
                request_id = next(r for r, chosen in base.items() if full in chosen.values())
                base[request_id] = {method: empty}
                loads[full] -= 1
                loads[empty] += 1

    def _keep_racers(
        self, base: Placement, racers: Sequence[Straggler], ranking: Sequence[str], loads: Counter[str]
    ) -> Placement:
        """The base drafters, and those racers of now that are still wanted and have room; the slowest request first."""
        placed = {request_id: dict(chosen) for request_id, chosen in base.items()}
        for racer in sorted(racers, key=lambda r: (r.acceptance, r.request_id)):
            chosen = placed[racer.request_id]
            for method, drafter in self._of_request[racer.request_id].items():
                if method in ranking and method not in chosen and self._has_room(drafter, loads):
                    chosen[method] = drafter
                    loads[drafter] += 1
        return placed

    def _apply(self, placed: Placement) -> AssignmentChange:
        change = AssignmentChange()
        for request_id, chosen in placed.items():
            before, after = set(self._of_request[request_id].values()), set(chosen.values())
            change.closed += [(drafter, request_id) for drafter in sorted(before - after)]
            change.opened += [(drafter, request_id) for drafter in chosen.values() if drafter not in before]
        self._of_request = placed
        return change
