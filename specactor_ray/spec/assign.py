"""Who drafts for which request: the draft ladder, and the race for stragglers.

A request has one *base* drafter, of the method that promises most and has room, and beside it every lookup that has
room for it: they cost nothing and learn from what they follow. In a race it has drafters of further methods (SpecActor,
arXiv 2511.16193, Algorithm 3). A base drafter comes before a racer, and no race takes a request's base drafter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.config.schema import RaceName, SpeculationConfig
from specactor_ray.spec.acceptance import BUCKETS, bucket_of
from specactor_ray.spec.policy import Drafter, Policy

REVISE_EVERY = 16
"""Steps between two looks at all requests."""
SWITCH_GAIN = 0.15
"""Part by which another method must promise to be faster: a new drafter first has to read the whole request."""
SWITCH_SHARE = 8
"""One request in this many changes its method at one look: what the new method is worth shows on them."""

Change = tuple[int, int, bool]
"""Seat, row, and whether the drafter is opened (or closed) for it."""


class Worker(NamedTuple):
    """A drafter as Algorithm 3 sees it."""

    method: str
    load: int
    """Requests it drafts for."""
    max_batch: int
    """b_max: most requests it may draft for."""


def assign_race(
    stragglers: Sequence[int],
    ranking: Sequence[str],
    workers: Mapping[int, Worker],
    serving: Mapping[int, Collection[str]],
) -> list[tuple[int, int]]:
    """Algorithm 3: every method that does not serve a straggler yet joins the race for it, as far as there is room.

        sort the stragglers by acceptance, ascending; methods come in the order of the draft ladder
        for each straggler, for each method that does not serve it:
            take the least loaded worker of that method among those with load < b_max, if there is one
            assign the straggler to it; its load grows by one

    Args:
        stragglers: Requests to race for, the one with the lowest acceptance first.
        ranking: Methods, best first; those not named do not race.
        workers: Worker → what it is.
        serving: Request → methods that draft for it already.

    Returns:
        (worker, request) to add, in the order in which they were assigned. Ties go to the smaller worker.
    """
    loads = {number: worker.load for number, worker in workers.items()}
    assigned = []
    for straggler in stragglers:
        served = set(serving.get(straggler, ()))
        for method in ranking:
            if method in served:
                continue
            free = [(loads[n], n) for n, w in workers.items() if w.method == method and loads[n] < w.max_batch]
            if free:
                _, number = min(free)
                loads[number] += 1
                assigned.append((number, straggler))
    return assigned


class Places:
    """Which drafter drafts for which request, and where there is room: the `assigned` plane of the table, and how many
    rows each seat has.

    Args:
        policy: Its table and drafters.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._table = policy, policy.table
        self.loads: list[int] = []
        """Requests by seat; true between `count` and the next change that is not made here."""
        self.changes: list[Change] = []
        """What was opened and closed since they were taken."""

    def count(self) -> None:
        """Count the requests of each seat anew."""
        self.loads = self._table.assigned.sum(axis=1).tolist()

    def take_changes(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    # ---- drafters ----

    def drafter(self, seat: int) -> Drafter | None:
        return self._policy.drafters[seat] if seat < len(self._policy.drafters) else None

    def seats(self) -> list[tuple[int, Drafter]]:
        """All that are taken."""
        return [(seat, one) for seat, one in enumerate(self._policy.drafters) if one is not None]

    def methods(self) -> list[str]:
        """Those of all drafters."""
        return list(dict.fromkeys(one.method for _, one in self.seats()))

    def seats_of(self, method: str) -> list[int]:
        """Drafters of this method that can be reached."""
        return [seat for seat, one in self.seats() if one.method == method and one.able]

    def is_able(self, seat: int) -> bool:
        """The drafter is there and can be reached."""
        drafter = self.drafter(seat)
        return drafter is not None and drafter.able

    def roomiest(self, method: str) -> int | None:
        """The least loaded drafter of this method that has room."""
        loads, drafters = self.loads, self._policy.drafters
        free = [
            (loads[seat], seat)
            for seat in self.seats_of(method)
            if loads[seat] < drafters[seat].max_batch  # type: ignore[union-attr]
        ]
        return min(free)[1] if free else None

    def seat_for(self, row: int, method: str) -> int | None:
        """The drafter of this method that drafts for the request already, or the least loaded one that has room."""
        mine = [seat for seat in self.seats_of(method) if self.has(seat, row)]
        return mine[0] if mine else self.roomiest(method)

    # ---- requests ----

    def has(self, seat: int, row: int) -> bool:
        """The drafter drafts for the request."""
        return bool(self._table.assigned[seat, row])

    def open(self, seat: int, row: int) -> None:
        """The drafter drafts for the request from now on, if it does not yet."""
        drafter = self.drafter(seat)
        assert drafter is not None
        if not self.has(seat, row):
            self._table.seat_row(seat, row, drafter.window)
            self.loads[seat] += 1
            self.changes.append((seat, row, True))

    def shut(self, seat: int, row: int) -> None:
        """It does no more."""
        if self.has(seat, row):
            self._table.unseat_row(seat, row)
            self.loads[seat] -= 1
            self.changes.append((seat, row, False))


class Assigner:
    """Base drafters, lookups and racers of all requests. No drafter ever has more than its `max_batch` requests.

    Args:
        config: When to race.
        policy: Its table and drafters.
        coupled: Drafters take turns with the verifier: nobody races unless `race` is `always`.
        max_batch: Most requests the verifier runs at once.
    """

    def __init__(self, config: SpeculationConfig, policy: Policy, coupled: bool, max_batch: int) -> None:
        self._policy, self._table = policy, policy.table
        self._places = Places(policy)
        self._race, self._coupled = config.race, coupled
        self._race_below = max(1, max_batch // 4) if config.race_below is None else config.race_below
        self._base: dict[int, int] = {}
        """Row → seat of its base drafter."""
        self._begun: dict[int, None] = {}
        """Rows that have been in a step."""
        self._steps, self._due, self._racing = 0, False, False
        self.standings: dict[str, Any] = {}
        """Plain data for status displays, made anew with every look: other threads may read it at any time."""

    # ---- what happens ----

    def set_drafters(self) -> list[Change]:
        """The list of drafters has changed."""
        self._base = {row: seat for row, seat in self._base.items() if self._places.has(seat, row)}
        self._places.count()
        self._serve(list(self._begun))
        self._level()
        return self._places.take_changes()

    def remove(self, row: int) -> None:
        """A request leaves; its place is given away at the next step, if somebody waits for one."""
        self._base.pop(row, None)
        if self._begun.pop(row, False) is None:
            self._due |= len(self._base) < len(self._begun)

    def step(self, decoding: np.ndarray) -> list[Change]:
        """A step over these rows begins. Requests that still wait for their turn have no drafters."""
        self._steps += 1
        fresh = [row for row in decoding.tolist() if row not in self._begun]
        self._begun.update(dict.fromkeys(fresh))
        racing = self._is_racing(len(decoding))
        looks = self._due or racing != self._racing or self._steps % REVISE_EVERY == 0
        if not (fresh or looks):
            return []
        self._places.count()
        if looks:
            self._look(racing)
        else:
            self._serve(fresh)
        return self._places.take_changes()

    def _look(self, racing: bool) -> None:
        """At all requests."""
        if self._racing and not racing:
            self._close_racers()
        self._due, self._racing = False, racing
        rows = list(self._begun)
        self._serve(rows)
        if racing:
            self._start_race(rows)
        self._switch(rows)
        self.standings = describe(self._policy, self._rates(), racing, self._places.loads)

    # ---- the ladder ----

    def rank(self, bucket: int) -> list[str]:
        """The draft ladder: methods by what they promise at this range of output positions, best first."""
        rates = self._rates()[:, bucket]
        return sorted(self._places.methods(), key=lambda method: -rates[self._policy.acceptance.number(method)])

    def _rates(self) -> np.ndarray:
        """`(methods, BUCKETS)` predicted tokens per second of a request."""
        acceptance = self._policy.acceptance
        rates = np.zeros((len(acceptance.prior), BUCKETS))
        for method in self._places.methods():
            number = acceptance.number(method)
            rates[number] = self._policy.predict(method, acceptance.of_method()[number])
        return rates

    def _serve(self, rows: Sequence[int]) -> None:
        """Give each of these a base drafter and its lookups, as far as there is room."""
        places, rankings = self._places, dict[int, list[str]]()
        lookups = list(dict.fromkeys(one.method for _, one in places.seats() if one.looks_up))
        for row in rows if places.methods() else ():
            bucket = int(bucket_of(self._table.committed[row : row + 1])[0])
            if bucket not in rankings:
                rankings[bucket] = [method for method in self.rank(bucket) if method not in lookups]
            base = self._base.get(row)
            if base is None or not places.is_able(base):
                seats = (places.seat_for(row, method) for method in rankings[bucket])
                seat = next((seat for seat in seats if seat is not None), None)
                seat = self._oust(rankings[bucket]) if seat is None else seat
                if seat is not None and seat != base:
                    self._move(row, base, seat)
            for method in lookups:
                if not any(places.has(seat, row) for seat in places.seats_of(method)):
                    seat = places.roomiest(method)
                    if seat is not None:
                        places.open(seat, row)

    def _switch(self, rows: Sequence[int]) -> None:
        """Give requests to a method that promises to be faster, a few at a time."""
        policy, table, places = self._policy, self._table, self._places
        models = list(dict.fromkeys(one.method for _, one in places.seats() if not one.looks_up))
        mine = np.array([row for row in rows if row in self._base], np.int32)
        if len(models) < 2 or not len(mine):
            return
        own = policy.acceptance.probability(table, mine)
        numbers = [policy.acceptance.number(method) for method in models]
        rates = np.stack([policy.predict(method, own[n]) for method, n in zip(models, numbers, strict=True)])
        current = np.array([numbers.index(table.method[self._base[row]]) for row in mine.tolist()])
        best = rates.argmax(axis=0)
        gain = rates.max(axis=0) / rates[current, np.arange(len(mine))]
        for index in np.argsort(-gain)[: max(1, len(mine) // SWITCH_SHARE)]:
            if gain[index] <= 1.0 + SWITCH_GAIN:
                break
            row = int(mine[index])
            seat = places.seat_for(row, models[best[index]])
            if seat is not None:
                self._move(row, self._base[row], seat)

    def _level(self) -> None:
        """Move requests from the fullest to the emptiest drafter of a method until they differ by one at most."""
        places, assigned = self._places, self._table.assigned
        for method in places.methods():
            peers = places.seats_of(method)
            while len(peers) > 1:
                full, empty = max(peers, key=places.loads.__getitem__), places.roomiest(method)
                if empty is None or places.loads[full] - places.loads[empty] <= 1:
                    break
                movable = np.flatnonzero(assigned[full] & ~assigned[empty])
                if not len(movable):
                    break
                row = int(movable[0])
                if self._base.get(row) == full:
                    self._move(row, full, empty)
                else:
                    places.shut(full, row)
                    places.open(empty, row)

    def _move(self, row: int, base: int | None, seat: int) -> None:
        """Another base drafter, in place of `base`."""
        self._base[row] = seat
        if base is not None and self._racing and self._places.has(seat, row) and self._places.is_able(base):
            return  # they change places in the race
        if base is not None:
            self._places.shut(base, row)
        self._places.open(seat, row)

    # ---- the race ----

    def _is_racing(self, decoding: int) -> bool:
        """The tail has come when few requests are left and none of them waits or still reads its prompt. One that does
        so later (it was moved here, or preempted) does not end the race; more requests than `race_below` do."""
        few = 0 < len(self._table) <= self._race_below
        match self._race:
            case RaceName.always:
                return True
            case RaceName.tail if not self._coupled:
                return few and (self._racing or decoding == len(self._table))
            case _:
                return False

    def _start_race(self, rows: Sequence[int]) -> None:
        policy, table, places = self._policy, self._table, self._places
        methods = self.rank(0)
        if len(methods) < 2 or not rows:
            return
        probability = policy.acceptance.probability(table, np.array(rows, np.int32))[table.method]
        served = np.where(table.assigned[:, rows], probability, 0.0).max(axis=0)
        slowest = [rows[index] for index in np.argsort(served, kind="stable")]
        method_of = {seat: one.method for seat, one in places.seats()}
        workers = {
            seat: Worker(one.method, places.loads[seat], one.max_batch) for seat, one in places.seats() if one.able
        }
        serving = {row: [method_of.get(seat, "") for seat in np.flatnonzero(table.assigned[:, row])] for row in rows}
        for seat, row in assign_race(slowest, methods, workers, serving):
            places.open(seat, row)

    def _close_racers(self) -> None:
        for seat, row in np.argwhere(self._table.assigned).tolist():
            drafter = self._places.drafter(seat)
            if drafter is not None and not drafter.looks_up and self._base.get(row) != seat:
                self._places.shut(seat, row)

    def _oust(self, methods: Sequence[str]) -> int | None:
        """Where no drafter has room, a racer gives way to a base drafter: that of the request that does best without
        it. Returns the seat in which there is room now."""
        table, places = self._table, self._places
        for method in methods:
            for seat in places.seats_of(method):
                rows = np.flatnonzero(table.assigned[seat]).tolist()
                rows = [row for row in rows if (base := self._base.get(row, seat)) != seat and places.is_able(base)]
                if rows:
                    chances = self._policy.acceptance.probability(table, np.array(rows, np.int32))
                    left = chances[table.method[[self._base[row] for row in rows]], np.arange(len(rows))]
                    places.shut(seat, rows[int(left.argmax())])
                    return seat
        return None


def describe(policy: Policy, rates: np.ndarray, racing: bool, loads: Sequence[int]) -> dict[str, Any]:
    """The ladder and the race as plain data.

    Args:
        policy: Its drafters and what is known of their methods.
        rates: `(methods, BUCKETS)` predicted tokens per second of a request.
        racing: Whether there is a race.
        loads: Requests by seat.
    """
    acceptance = policy.acceptance
    chances, guessing = acceptance.of_method(), acceptance.guessing_of_method()
    tried = acceptance.evidence[1]
    drafters = [(seat, one) for seat, one in enumerate(policy.drafters) if one is not None]
    methods = {}
    for _, drafter in drafters:
        number = acceptance.number(drafter.method)
        buckets = {
            BUCKET_NAMES[bucket]: {
                "drafted": round(float(tried[number, bucket]), 1),
                "acceptance": float(chances[number, bucket]),
                "guessing": float(guessing[number, bucket]),
                "tgs": float(rates[number, bucket]),
            }
            for bucket in range(BUCKETS)
            if tried[number, bucket] >= 1.0
        }
        methods[drafter.method] = {"token_s": drafter.token_s, "buckets": buckets}
    return {
        "methods": methods,
        "racing": racing,
        "loads": {drafter.drafter_id: loads[seat] for seat, drafter in drafters},
    }


BUCKET_NAMES = ("0-63", *(f"{64 << n}-{(128 << n) - 1}" for n in range(BUCKETS - 2)), f"{64 << (BUCKETS - 2)}+")
