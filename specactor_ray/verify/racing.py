"""Assignment of drafters to requests: the draft ladder, and the race for stragglers.

A request has at most one *base* drafter, a model of the method with the best prediction and with room. Further drafters
join by Algorithm 3 of SpecActor (arXiv 2511.16193): lookups for every request, other models in a
race. A drafter that already has the request is preferred, since another one must first read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from specactor_ray.config.schema import RaceName, SpeculationConfig
from specactor_ray.table._kernels import ROW_TRIES
from specactor_ray.verify.policy import DraftPolicy

REVISE_EVERY = 16
"""Steps between two revisions of all requests."""
WATCHED = 16
"""Requests for which a model drafts beside others if it has fewer of its own, so that it can be compared."""
HORIZON_STEPS = ROW_TRIES
"""Least steps in which a change of the base drafter must gain the seconds of reading the request, and of `PLAIN_STEPS`:
those for which the acceptance of the other model has lasted, if these are more."""
PLAIN_STEPS = 2.0
"""Steps of a request without a tail after a change."""


class Places:
    """A new assignment. `level`: share the requests of a method evenly among its drafters with room."""

    def __init__(self, policy: DraftPolicy, level: bool) -> None:
        self._assigned, self._level = policy.table.assigned, level
        self.drafters = {seat: one for seat, one in sorted(policy.drafters.items()) if one.able}
        self.wanted = np.zeros_like(self._assigned)
        self.loads = [0] * len(self.wanted)
        self.served: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(self.wanted.shape[1], np.bool_))
        """Method → bool `(rows,)`: whether it drafts for the request."""

    def take(self, seat: int, rows: np.ndarray) -> None:
        """Assign these requests to the drafter."""
        self.wanted[seat, rows] = self.served[self.drafters[seat].spec.method][rows] = True
        self.loads[seat] += len(rows)

    def keep(self, seats: np.ndarray, rows: np.ndarray) -> None:
        """Keep pairs of seat and row, `(n,)` each, while the drafter has room; with `level` at most its even share of
        the method's pairs. The first pairs of a drafter count, and for a method those with lower seats."""
        held = Counter[str](self.drafters[seat].spec.method for seat in seats.tolist())
        peers = Counter(one.spec.method for one in self.drafters.values())
        for seat in np.unique(seats).tolist():
            one = self.drafters[seat].spec
            most = min(one.max_batch, held[one.method] // peers[one.method]) if self._level else one.max_batch
            mine = rows[seats == seat]
            mine = mine[~self.served[one.method][mine]]
            self.take(seat, mine[: max(most - self.loads[seat], 0)])

    def place(self, method: str, row: int) -> bool:
        """Assign the request to a drafter of this method with room: one that has it already, or the least loaded.
        Returns False if none has room."""
        loads, specs = self.loads, {seat: one.spec for seat, one in self.drafters.items()}
        free = [seat for seat, spec in specs.items() if spec.method == method and loads[seat] < spec.max_batch]
        if free:
            best = min(free, key=lambda n: (loads[n] * self._level, not self._assigned[n, row], loads[n]))
            self.take(best, np.array([row]))
        return bool(free)

    def assign_race(self, stragglers: Sequence[int], methods: Sequence[str]) -> None:
        """Algorithm 3: stragglers by acceptance, ascending; methods in the order of the draft ladder; each method that
        does not serve a straggler yet joins the race with its least loaded worker with room (load < b_max), if there is
        one. Drafters of a straggler stay if there is room. As a worker has one method, the order has no effect."""
        mine = [seat for seat, one in self.drafters.items() if one.spec.method in methods]
        there = np.zeros_like(self.wanted)
        there[mine] = self._assigned[mine] & ~self.wanted[mine]
        self.keep(*there.nonzero())
        for straggler in stragglers:
            for method in methods:
                if not self.served[method][straggler]:
                    self.place(method, straggler)


class Assigner:
    """Base drafters, lookups and racers of all requests. A drafter never has more than its `max_batch` requests.

    `coupled`: all drafters take turns with the verifier, so there is no race unless `race` is `always`; `max_batch`:
    most requests the verifier runs at once."""

    def __init__(self, config: SpeculationConfig, policy: DraftPolicy, coupled: bool, max_batch: int) -> None:
        self._policy, self._table = policy, policy.table
        self._race, self._coupled = config.race, coupled
        self._race_below = max(1, max_batch // 4) if config.race_below is None else config.race_below
        self._steps, self._racing = 0, False
        self._watched = np.zeros_like(self._table.assigned)
        """bool `(seats, rows)`: drafters beside the base drafter of a request, by the newest revision."""

    def step(self, decoding: np.ndarray) -> list[tuple[int, int]] | None:
        """`revise`, if a revision is due at the step over these rows; else None."""
        self._steps += 1
        racing, begun = self._is_racing(len(decoding)), self._table.begun
        if begun[decoding].all() and racing == self._racing and self._steps % REVISE_EVERY != 0:
            return None
        begun[decoding], self._racing = True, racing
        return self.revise()

    def revise(self, level: bool = False) -> list[tuple[int, int]]:
        """Assign drafters to all requests; `level`: whether the list of drafters has changed. Returns the ended
        (seat, row) pairs."""
        table, places = self._table, Places(self._policy, level)
        rows, ones = np.flatnonzero(table.begun), places.drafters.values()
        bases = list(dict.fromkeys(one.spec.method for one in ones if not one.spec.traits.looks_up))
        followers = list(dict.fromkeys(one.spec.method for one in ones if one.spec.method not in bases))
        chances = self._policy.acceptance.probability(table, rows)
        self._settle(places, bases, rows, chances)
        chance = np.where(places.wanted[:, rows], chances[table.method], 0.0).max(axis=0)
        if racers := [*bases, *followers] if self._racing else followers:
            places.assign_race(rows[np.argsort(chance, kind="stable")].tolist(), racers)
        self._watch(places, bases, rows)
        released: list[tuple[int, int]] = []
        for seat, row in np.argwhere(places.wanted != table.assigned).tolist():
            if places.wanted[seat, row]:
                table.assign(seat, row)
            else:
                table.release(seat, row)
                released.append((seat, row))
        return released

    def _settle(self, places: Places, models: Sequence[str], rows: np.ndarray, chances: np.ndarray) -> None:
        """Assign base drafters. A request keeps its model unless another one promises more beyond doubt, and gains the
        seconds of reading it. A request without a model gets one of the best method with room, after requests with a
        model, so that it does not take a place that they give up. A model of which no draft was tried yet promises
        nothing beside one that was: `_watch` lets it draft beside others."""
        policy, table = self._policy, self._table
        promised, sure = np.zeros((2, len(models), len(rows)))  # predicted tokens per second of each request
        numbers = [policy.acceptance.number(method) for method in models]
        tried = policy.acceptance.evidence[1, numbers].any(axis=1)
        chances = np.where(tried | ~tried.any(), chances[numbers].T, 0.0).T
        sure_chances = (chances - policy.acceptance.doubt(table, rows)[numbers]).clip(0.0)
        for index, method in enumerate(models):
            promised[index] = policy.predict(method, chances[index])
            sure[index] = policy.predict(method, sure_chances[index])
        is_base = table.assigned.copy()
        is_base[: len(self._watched), : self._watched.shape[1]] &= ~self._watched
        together = len(rows) > 0 and any(one.takes_turns for one in places.drafters.values())
        if together:  # each model with work delays all requests
            held = Counter[str]()
            for seat, one in places.drafters.items():
                held[one.spec.method] += int(is_base[seat, rows].sum())
            promised[:], sure[:] = promised.mean(axis=1, keepdims=True), sure.mean(axis=1, keepdims=True)
            others = [index for index, method in enumerate(models) if held[method] < max(held.values())]
            promised[others] = sure[others]
        here = np.zeros((len(table.assigned), len(rows)))  # the same for the base drafters
        for seat, one in places.drafters.items():
            if one.spec.method in models:
                here[seat] = is_base[seat, rows] * promised[models.index(one.spec.method)]
        base, best = here.argmax(axis=0), here.max(axis=0)
        stays = best > 0.0
        order = np.argsort(~stays, kind="stable")
        for index in np.flatnonzero(stays & (sure.max(axis=0, initial=0.0) > best)).tolist():
            method, gain = models[int(sure[:, index].argmax())], float(sure[:, index].max() / best[index] - 1.0)
            lasts = max(HORIZON_STEPS, policy.acceptance.overall[4, policy.acceptance.number(method)])
            gained_s = policy.share_s * (gain * lasts - PLAIN_STEPS)
            stays[index] = gained_s < policy.reading_s(method, rows if together else rows[[index]])
        places.keep(base[stays], rows[stays])
        ladder = np.argsort(-np.where(best > 0.0, sure, promised), axis=0, kind="stable")
        for index in order[~places.wanted[:, rows[order]].any(axis=0)].tolist():
            any(places.place(models[n], int(rows[index])) for n in ladder[:, index].tolist())

    def _watch(self, places: Places, models: Sequence[str], rows: np.ndarray) -> None:
        """Assign a few requests to models with fewer of their own: those that they have, and those with the fewest
        tokens to read."""
        before, table = places.wanted.copy(), self._table
        for seat, one in places.drafters.items():
            one.watches = not places.loads[seat]
        for method in models:
            served = places.served[method]
            seats = [seat for seat, one in places.drafters.items() if one.spec.method == method]
            missing = min(WATCHED, len(rows)) - int(served[rows].sum())
            if missing > 0:
                elsewhere = ~table.assigned[seats][:, rows].any(axis=0)
                order = np.lexsort((table.committed[rows], elsewhere))
                for row in rows[order[~served[rows[order]]]][:missing].tolist():
                    places.place(method, row)
        self._watched = places.wanted & ~before

    def _is_racing(self, decoding: int) -> bool:
        """Whether few requests are left, of which none waited or read its prompt at the begin of the race."""
        if self._race is RaceName.tail and not self._coupled:
            return 0 < len(self._table) <= self._race_below and (self._racing or decoding == len(self._table))
        return self._race is RaceName.always
