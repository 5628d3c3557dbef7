"""Who drafts for which request: the draft ladder, and the race for stragglers.

A request has one *base* drafter, of the method that promises most and has room, and beside it every lookup that has
room for it: they cost nothing and learn from what they follow. In a race it has drafters of further methods (SpecActor,
arXiv 2511.16193, Algorithm 3). Assignments are made afresh, base drafters first, then lookups, then racers, so a racer
never holds a place that a base drafter wants. Whoever drafts for a request already is preferred, since another one
first has to read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.config.schema import RaceName, SpeculationConfig
from specactor_ray.spec.acceptance import BUCKETS
from specactor_ray.spec.policy import Policy

REVISE_EVERY = 16
"""Steps between two looks at all requests."""
SWITCH_GAIN = 0.15
"""Part by which another method must promise to be faster."""
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


def draft_ladder(methods: Sequence[str], promised: np.ndarray) -> list[str]:
    """The draft ladder: `methods`, best first, by `(methods,)` predicted tokens per second. Of equals the first."""
    return [methods[n] for n in np.argsort(-promised, kind="stable").tolist()]


class Places:
    """An assignment in the making: `wanted`, `(seats, rows)`, and how many requests each seat has in it.

    Args:
        policy: Its table and drafters.
    """

    def __init__(self, policy: Policy) -> None:
        self._assigned = policy.table.assigned
        self.wanted = np.zeros_like(self._assigned)
        self.loads = [0] * len(self.wanted)
        self.drafters = {seat: one for seat, one in enumerate(policy.drafters) if one is not None}
        self.able = np.zeros(len(self.wanted), np.bool_)
        self.able[[seat for seat, one in self.drafters.items() if one.able]] = True

    def methods(self, looks_up: bool) -> list[str]:
        """Methods that look up, or the others."""
        return list(dict.fromkeys(one.method for one in self.drafters.values() if one.looks_up == looks_up))

    def free_seats(self, method: str) -> list[int]:
        """Drafters of this method that can be reached and have room, the least loaded one first."""
        loads, mine = self.loads, [seat for seat, one in self.drafters.items() if one.method == method and one.able]
        return sorted((seat for seat in mine if loads[seat] < self.drafters[seat].max_batch), key=loads.__getitem__)

    def free_seat(self, row: int, method: str) -> int | None:
        """The one of them that drafts for the request already, or the first."""
        free = self.free_seats(method)
        return min(free, key=lambda seat: not self._assigned[seat, row], default=None)

    def take(self, seat: int, row: int) -> None:
        """The drafter will draft for the request."""
        self.wanted[seat, row] = True
        self.loads[seat] += 1

    def leave(self, seat: int, row: int) -> None:
        """It will not, after all."""
        self.wanted[seat, row] = False
        self.loads[seat] -= 1

    def settle(
        self, rows: np.ndarray, held: np.ndarray, methods: Sequence[str], promised: np.ndarray, level: bool
    ) -> None:
        """Give each request one drafter: the one it has, if that can be reached, or one of the best method with room.

        Args:
            rows: The requests.
            held: `(rows,)` the seat that each has; -1: none. Set to the one it has then.
            methods: Whose drafters these may be.
            promised: `(methods, rows)` predicted tokens per second.
            level: Drafters of one method share their requests evenly, as far as there is room.
        """
        stays = (held >= 0) & self.able[held]
        self.wanted[held[stays], rows[stays]] = True
        self.loads = self.wanted.sum(axis=1).tolist()
        for index in np.flatnonzero(~stays).tolist():
            row = int(rows[index])
            seats = (self.free_seat(row, method) for method in draft_ladder(methods, promised[:, index]))
            held[index] = next((seat for seat in seats if seat is not None), held[index])
            if held[index] >= 0:
                self.take(int(held[index]), row)
        for index in np.flatnonzero(held >= 0).tolist() if level else ():
            row, seat = int(rows[index]), int(held[index])
            free = self.free_seats(self.drafters[seat].method)
            if free and self.loads[free[0]] + 1 < self.loads[seat]:
                self.leave(seat, row)
                self.take(free[0], row)
                held[index] = free[0]


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
        self._steps, self._freed, self._racing = 0, False, False
        self.standings: dict[str, Any] = {}
        """Plain data for status displays, replaced with every revision: other threads may read it at any time."""

    def free(self) -> None:
        """A request leaves; its place is given away at the next step, if somebody waits for one."""
        self._freed = True

    def step(self, decoding: np.ndarray) -> list[Change]:
        """A step over these rows begins. Requests that still wait for their turn have no drafters."""
        table = self._table
        self._steps += 1
        racing, fresh = self._is_racing(len(decoding)), not table.begun[decoding].all()
        freed = self._freed and bool((table.home[decoding] < 0).any())
        if not (fresh or freed or racing != self._racing or self._steps % REVISE_EVERY == 0):
            return []
        table.begun[decoding] = True
        self._racing = racing
        return self.revise()

    def revise(self, level: bool = False) -> list[Change]:
        """Who drafts for what from now on; `level`: the list of drafters has changed."""
        table, self._freed = self._table, False
        rows, places = np.flatnonzero(table.begun), Places(self._policy)
        models, lookups = places.methods(looks_up=False), places.methods(looks_up=True)
        promised = self._promised(models, rows)
        home = table.home[rows]
        places.settle(rows, home, models, promised, level)
        if len(models) > 1 and not level:
            self._switch(places, models, promised, rows, home)
        table.home[rows] = home
        for method in lookups:
            held = np.full(len(rows), -1)
            for seat in (seat for seat, one in places.drafters.items() if one.method == method):
                held[table.assigned[seat, rows]] = seat
            places.settle(rows, held, [method], np.zeros((1, len(rows))), level)
        if self._racing and len(rows):
            racing = [*models, *lookups]
            self._start_race(places, rows, draft_ladder(racing, self._promised(racing, rows).mean(axis=1)))
        changes = [
            (seat, row, bool(places.wanted[seat, row]))
            for seat, row in np.argwhere(places.wanted != table.assigned).tolist()
        ]
        for seat, row, opened in changes:
            (table.assign if opened else table.release)(seat, row)
        self.standings = self._describe(places)
        return changes

    # ---- the ladder ----

    def _promised(self, methods: Sequence[str], rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)` predicted tokens per second of each request."""
        acceptance, promised = self._policy.acceptance, np.zeros((len(methods), len(rows)))
        chances = acceptance.probability(self._table, rows)
        for index, method in enumerate(methods):
            promised[index] = self._policy.predict(method, chances[acceptance.number(method)])
        return promised

    def _switch(
        self, places: Places, models: Sequence[str], promised: np.ndarray, rows: np.ndarray, home: np.ndarray
    ) -> None:
        """Give requests to a method that promises to be faster, a few at a time."""
        has = np.flatnonzero(home >= 0)
        current = [models.index(places.drafters[seat].method) for seat in home[has].tolist()]
        gain = promised[:, has].max(axis=0, initial=0.0) / promised[current, has]
        for index in np.argsort(-gain)[: max(1, len(has) // SWITCH_SHARE)].tolist():
            if gain[index] <= 1.0 + SWITCH_GAIN:
                break
            at = int(has[index])
            row = int(rows[at])
            seat = places.free_seat(row, models[int(promised[:, at].argmax())])
            if seat is not None:
                places.leave(int(home[at]), row)
                places.take(seat, row)
                home[at] = seat

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

    def _start_race(self, places: Places, rows: np.ndarray, ranking: Sequence[str]) -> None:
        """Racers that there are stay as far as there is room; Algorithm 3 adds those that are missing."""
        table, drafters = self._table, places.drafters
        serving = {
            row: {drafters[s].method for s in np.flatnonzero(places.wanted[:, row]).tolist()} for row in rows.tolist()
        }
        for seat, row in np.argwhere(table.assigned & ~places.wanted & places.able[:, None]).tolist():
            method = drafters[seat].method
            if method not in serving[row] and places.loads[seat] < drafters[seat].max_batch:
                places.take(seat, row)
                serving[row].add(method)
        chances = self._policy.acceptance.probability(table, rows)[table.method]
        served = np.where(places.wanted[:, rows], chances, 0.0).max(axis=0)
        workers = {
            seat: Worker(one.method, places.loads[seat], one.max_batch) for seat, one in drafters.items() if one.able
        }
        for seat, row in assign_race(rows[np.argsort(served, kind="stable")].tolist(), ranking, workers, serving):
            places.take(seat, row)

    def _describe(self, places: Places) -> dict[str, Any]:
        """The ladder and the race as plain data."""
        acceptance, methods = self._policy.acceptance, dict[str, Any]()
        for drafter in places.drafters.values():
            number = acceptance.number(drafter.method)
            chances, tried = acceptance.of_method()[number], acceptance.evidence[1, number]
            rates = self._policy.predict(drafter.method, chances)
            buckets = {
                BUCKET_NAMES[n]: {
                    "drafted": round(float(tried[n]), 1),
                    "acceptance": float(chances[n]),
                    "tgs": float(rates[n]),
                }
                for n in np.flatnonzero(tried >= 1.0).tolist()
            }
            methods[drafter.method] = {"token_s": drafter.token_s, "buckets": buckets}
        loads = {one.drafter_id: places.loads[seat] for seat, one in places.drafters.items()}
        return {"methods": methods, "racing": self._racing, "loads": loads}


BUCKET_NAMES = ("0-63", *(f"{64 << n}-{(128 << n) - 1}" for n in range(BUCKETS - 2)), f"{64 << (BUCKETS - 2)}+")
