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
        self._base = {row: seat for row, seat in self._base.items() if self._table.assigned[seat, row]}
        changes = self._serve(list(self._begun))
        return changes + self._level()

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
        if not (fresh or self._due or racing != self._racing or self._steps % REVISE_EVERY == 0):
            return []
        if not self._due and racing == self._racing and self._steps % REVISE_EVERY:
            return self._serve(fresh)
        changes = self._close_racers() if self._racing and not racing else []
        self._due, self._racing = False, racing
        rows = list(self._begun)
        changes += self._serve(rows)
        if racing:
            changes += self._start_race(rows)
        changes += self._switch(rows)
        self.standings = describe(self._policy, self._rates(), racing, self._loads())
        return changes

    # ---- the ladder ----

    def rank(self, bucket: int) -> list[str]:
        """The draft ladder: methods by what they promise at this range of output positions, best first."""
        rates = self._rates()[:, bucket]
        methods = dict.fromkeys(one.method for one in self._policy.drafters if one is not None)
        return sorted(methods, key=lambda method: -rates[self._policy.acceptance.number(method)])

    def _rates(self) -> np.ndarray:
        """`(methods, BUCKETS)` predicted tokens per second of a request."""
        acceptance = self._policy.acceptance
        rates = np.zeros((len(acceptance.prior), BUCKETS))
        for method in {one.method for one in self._policy.drafters if one is not None}:
            number = acceptance.number(method)
            rates[number] = self._policy.predict(method, acceptance.of_method()[number])
        return rates

    def _serve(self, rows: Sequence[int]) -> list[Change]:
        """Give each of these a base drafter and its lookups, as far as there is room."""
        policy, table = self._policy, self._table
        changes: list[Change] = []
        if not any(one is not None for one in policy.drafters):
            return changes
        loads = self._loads()
        rankings: dict[int, list[str]] = {}
        lookups = dict.fromkeys(one.method for one in policy.drafters if one is not None and one.looks_up)
        for row in rows:
            bucket = int(bucket_of(table.committed[row : row + 1])[0])
            if bucket not in rankings:
                rankings[bucket] = [method for method in self.rank(bucket) if method not in lookups]
            base = self._base.get(row)
            if base is None or not self._is_able(base):
                seat = next((s for m in rankings[bucket] if (s := self._seat_for(row, m, loads)) is not None), None)
                if seat is None:
                    seat, closed = self._oust(rankings[bucket], loads)
                    changes += closed
                if seat is not None and seat != base:
                    changes += self._move(row, base, seat, loads)
            for method in lookups:
                if not any(table.assigned[s, row] and self._is_able(s) for s in self._seats_of(method)):
                    seat = self._roomiest(method, loads)
                    if seat is not None:
                        changes.append(self._open(seat, row, loads))
        return changes

    def _switch(self, rows: Sequence[int]) -> list[Change]:
        """Give requests to a method that promises to be faster, a few at a time."""
        policy, table = self._policy, self._table
        models = dict.fromkeys(one.method for one in policy.drafters if one is not None and not one.looks_up)
        mine = np.array([row for row in rows if row in self._base], np.int32)
        if len(models) < 2 or not len(mine):
            return []
        own = policy.acceptance.probability(table, mine)
        numbers = [policy.acceptance.number(method) for method in models]
        rates = np.stack([policy.predict(method, own[n]) for method, n in zip(models, numbers, strict=True)])
        current = np.array([numbers.index(table.method[self._base[row]]) for row in mine.tolist()])
        best = rates.argmax(axis=0)
        gain = rates.max(axis=0) / rates[current, np.arange(len(mine))]
        changes: list[Change] = []
        loads, names = self._loads(), list(models)
        for index in np.argsort(-gain)[: max(1, len(mine) // SWITCH_SHARE)]:
            if gain[index] <= 1.0 + SWITCH_GAIN:
                break
            row = int(mine[index])
            seat = self._seat_for(row, names[best[index]], loads)
            if seat is not None:
                changes += self._move(row, self._base[row], seat, loads)
        return changes

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

    def _start_race(self, rows: Sequence[int]) -> list[Change]:
        policy, table = self._policy, self._table
        methods = self.rank(0)
        if len(methods) < 2 or not rows:
            return []
        probability = policy.acceptance.probability(table, np.array(rows, np.int32))[table.method]
        served = np.where(table.assigned[:, rows], probability, 0.0).max(axis=0)
        slowest = [rows[index] for index in np.argsort(served, kind="stable")]
        loads = self._loads()
        workers = {
            seat: Worker(one.method, loads[seat], one.max_batch)
            for seat, one in enumerate(policy.drafters)
            if one is not None and one.able
        }
        serving = {row: [self._method(seat) for seat in np.flatnonzero(table.assigned[:, row])] for row in rows}
        return [self._open(seat, row, loads) for seat, row in assign_race(slowest, methods, workers, serving)]

    def _close_racers(self) -> list[Change]:
        changes: list[Change] = []
        for seat, row in np.argwhere(self._table.assigned).tolist():
            drafter = self._drafter(seat)
            if drafter is not None and not drafter.looks_up and self._base.get(row) != seat:
                changes.append(self._shut(seat, row))
        return changes

    def _oust(self, methods: Sequence[str], loads: list[int]) -> tuple[int | None, list[Change]]:
        """Where no drafter has room, a racer gives way to a base drafter: that of the request that does best without
        it."""
        table = self._table
        for method in methods:
            for seat in filter(self._is_able, self._seats_of(method)):
                rows = np.flatnonzero(table.assigned[seat]).tolist()
                rows = [row for row in rows if (base := self._base.get(row, seat)) != seat and self._is_able(base)]
                if rows:
                    chances = self._policy.acceptance.probability(table, np.array(rows, np.int32))
                    left = chances[table.method[[self._base[row] for row in rows]], np.arange(len(rows))]
                    return seat, [self._shut(seat, rows[int(left.argmax())], loads)]
        return None, []

    # ---- parts ----

    def _level(self) -> list[Change]:
        """Move requests from the fullest to the emptiest drafter of a method until they differ by one at most."""
        changes: list[Change] = []
        loads = self._loads()
        for method in dict.fromkeys(one.method for one in self._policy.drafters if one is not None):
            peers = [seat for seat in self._seats_of(method) if self._is_able(seat)]
            while len(peers) > 1:
                full, empty = max(peers, key=loads.__getitem__), self._roomiest(method, loads)
                if empty is None or loads[full] - loads[empty] <= 1:
                    break
                movable = np.flatnonzero(self._table.assigned[full] & ~self._table.assigned[empty])
                if not len(movable):
                    break
                row = int(movable[0])
                if self._base.get(row) == full:
                    changes += self._move(row, full, empty, loads)
                else:
                    changes += [self._shut(full, row, loads), self._open(empty, row, loads)]
        return changes

    def _move(self, row: int, base: int | None, seat: int, loads: list[int]) -> list[Change]:
        self._base[row] = seat
        if base is not None and self._racing and self._table.assigned[seat, row] and self._is_able(base):
            return []  # they change places in the race
        changes = [self._shut(base, row, loads)] if base is not None and self._table.assigned[base, row] else []
        return changes if self._table.assigned[seat, row] else [*changes, self._open(seat, row, loads)]

    def _open(self, seat: int, row: int, loads: list[int]) -> Change:
        drafter = self._drafter(seat)
        assert drafter is not None
        self._table.seat_row(seat, row, drafter.window)
        loads[seat] += 1
        return seat, row, True

    def _shut(self, seat: int, row: int, loads: list[int] | None = None) -> Change:
        self._table.unseat_row(seat, row)
        if loads is not None:
            loads[seat] -= 1
        return seat, row, False

    def _loads(self) -> list[int]:
        loads: list[int] = self._table.assigned.sum(axis=1).tolist()
        return loads

    def _roomiest(self, method: str, loads: Sequence[int]) -> int | None:
        """The least loaded drafter of this method that has room."""
        free = [
            (loads[seat], seat)
            for seat in self._seats_of(method)
            if self._is_able(seat) and loads[seat] < self._policy.drafters[seat].max_batch  # type: ignore[union-attr]
        ]
        return min(free)[1] if free else None

    def _seat_for(self, row: int, method: str, loads: Sequence[int]) -> int | None:
        """The drafter of this method that drafts for the request already, or the least loaded one that has room."""
        mine = [seat for seat in self._seats_of(method) if self._table.assigned[seat, row] and self._is_able(seat)]
        return mine[0] if mine else self._roomiest(method, loads)

    def _seats_of(self, method: str) -> list[int]:
        return [seat for seat, one in enumerate(self._policy.drafters) if one is not None and one.method == method]

    def _drafter(self, seat: int) -> Drafter | None:
        return self._policy.drafters[seat] if seat < len(self._policy.drafters) else None

    def _is_able(self, seat: int) -> bool:
        drafter = self._drafter(seat)
        return drafter is not None and drafter.able

    def _method(self, seat: int) -> str:
        drafter = self._drafter(seat)
        return drafter.method if drafter is not None else ""


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
