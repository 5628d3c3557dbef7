"""What a verifier decides: how far drafters of its own thread draft, and what a step verifies.

Everything maximises one quotient, expected committed tokens per second of the step:

    (rows + sum of expected accepted tokens) / (seconds of drafting + V(positions))

Acceptance comes from `acceptance.py`, V from `cost.py`, D from the drafters. There is one rule of exploration: what was
not tried for long is forgotten, and of the unknown the best is hoped for. Of the algorithms of SpecActor (arXiv
2511.16193) the race (3) and the ladder are in `assign.py`; why there is no Algorithm 2: docs/design/policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.spec import _kernels
from specactor_ray.spec.acceptance import BUCKET_NAMES, Acceptance
from specactor_ray.spec.cost import StepCost
from specactor_ray.spec.suspension import Suspension
from specactor_ray.spec.table import RequestTable
from specactor_ray.spec.tgs import window_rates
from specactor_ray.spec.waiting import Waiting

_FIRST_ROUNDS = 3
"""Rounds of drafting where it is not known yet what one takes."""
_UNRESCUED = 0.5
"""Share of refuted tails whose place no branch takes: where the first candidate is wrong, one of the next four is
right in 0.6 of the cases, and not each of them has a branch."""


@dataclass(eq=False)
class Drafter:
    """The drafter in a seat, as the policy sees it."""

    drafter_id: str
    spec: DrafterSpec
    token_s: float = 0.0
    """D: seconds in which a model drafts a token for each of its requests, as it says; 0 if unknown."""
    token_rows: int = 0
    """Requests of the verifier when it said so."""
    trip_s: float = 0.0
    """Seconds of a message to it and of its answer, at least; 0 if unknown."""
    able: bool = True
    """It can be reached."""
    hosted: bool = False
    """The verifier's own thread drives it."""

    @property
    def takes_turns(self) -> bool:
        """It is a model that drafts while the verifier waits."""
        return self.hosted and not self.spec.traits.looks_up


class Seconds(NamedTuple):
    """What a step took."""

    total: float
    engine: float
    """Forward and sampling."""
    waiting: float
    """For drafts."""

    @property
    def own(self) -> float:
        """The verifier's own Python."""
        return max(self.total - self.engine - self.waiting, 0.0)


class Policy:
    """The decisions of one verifier, without clock, messages and models. `drafters`: seat → the drafter in it."""

    def __init__(
        self,
        config: SpeculationConfig,
        table: RequestTable,
        acceptance: Acceptance,
        cost: StepCost,
        drafters: Mapping[int, Drafter],
    ) -> None:
        self._config, self.table, self.drafters = config, table, drafters
        self.acceptance, self.cost = acceptance, cost
        self.suspension, self._waiting = Suspension(), Waiting()
        self.rows = 1
        """Of the newest step."""
        self.step_s = 0.0
        """Seconds of the forward of the newest step with drafts, by `cost`; 0 if unknown."""

    # ---- before a step ----

    def plan_rounds(self, rows: np.ndarray) -> int:
        """How many tokens drafters that take turns with the verifier draft for each request before the step."""
        drafters = [one for one in self.drafters.values() if one.takes_turns]
        longest = self._longest(rows)
        if not longest.any() or not self.cost.is_known:
            return 0
        most = max(one.spec.window for one in drafters)
        if self._config.verify is VerifyPolicy.all:
            return most
        for one in drafters:
            if 2 * len(rows) <= one.token_rows:  # measured at twice the load: unknown at this one
                one.token_s, one.token_rows = 0.0, 0
        token_s = sum(one.token_s for one in drafters)
        if token_s <= 0.0:
            most = min(most, _FIRST_ROUNDS)
        supply, curve = self._supply(rows), self.cost.curve(len(rows), len(rows) * self.table.window)
        rounds: int = _kernels.best_rounds(
            self._net_probability(rows), supply, np.maximum(longest, supply), self._room(rows), curve, token_s, most
        )
        return rounds

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is verified of the tails that are there: int32 `(rows,)` the seat whose tail it is, -1 for none, and how
        many of its tokens."""
        self.rows = len(rows)
        supply, room = self._supply(rows), self._room(rows)
        seats, lengths = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
        curve = self.cost.curve(len(rows), len(rows) * self.table.window)
        _kernels.choose(self._probability(rows), supply, room, curve, seats, lengths)
        if self._config.verify is VerifyPolicy.all:
            lengths = np.where(seats >= 0, np.minimum(supply[seats, np.arange(len(rows))], room), 0)
        self.step_s = float(curve[lengths.sum()]) if self.cost.is_known else 0.0
        return seats, lengths

    def plan_wait(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        """A step begins: which of the rows wait for a first draft, and how long at most, in seconds."""
        table, longest_s, seats = self.table, self._config.draft_wait_s, self._apart()
        if not seats or longest_s == 0.0 or (longest_s is None and self._waiting.rest):
            return rows[:0], 0.0
        silent = rows[self.silent(rows)]
        if longest_s is None:
            heard = (table.base[seats] >= 0).any(axis=0)  # of others the prompt is yet to be read
            known, silent = rows[heard[rows]], silent[heard[silent]]
            self._waiting.begin(table, known, self._supply(known).any(axis=0))
            if not len(silent) or not self.cost.is_known:
                return silent, 0.0
            chances = np.where(table.assigned[seats].take(silent, axis=1), self._probability(silent)[seats], 0.0)
            step_s = self.cost.curve(len(rows), len(silent))
            least_s = min(self.drafters[seat].token_s + self.drafters[seat].trip_s for seat in seats)
            longest_s = self._waiting.plan(chances.max(axis=0), float(step_s[-1] - step_s[0]), least_s)
            longest_s = min(longest_s, float(step_s[0]))
        return silent, longest_s

    def silent(self, rows: np.ndarray) -> np.ndarray:
        """bool `(rows,)`: without a tail, and with a draft actor that has yet to say what follows the newest commit."""
        table, seats = self.table, self._apart()
        base, asked = table.base[seats].take(rows, axis=1), table.assigned[seats].take(rows, axis=1)
        silent: np.ndarray = (asked & (base != table.committed[rows])).any(axis=0) & ~self._supply(rows).any(axis=0)
        return silent

    def waited(self, rows: np.ndarray, seconds: float) -> None:
        """These rows have waited for so long."""
        if self._config.draft_wait_s is None:
            self._waiting.waited(rows, seconds)

    def record(self, num_rows: int, positions: int, prefill: int, accepted: int, seconds: Seconds) -> None:
        """A step has ended: learn what it cost, and whether drafts pay, unless the configuration demands them. Prompts
        take the same time with drafts and without, so their share does not count.

        Args:
            num_rows: Requests that were decoded.
            positions, prefill: Positions of the forward, and how many of them were of prompts.
            accepted: Draft tokens that were right.
            seconds: Duration of the step.
        """
        if 2 * prefill > positions:
            return
        self.cost.record(positions, seconds.engine)
        self._waiting.record(num_rows + accepted, seconds.total)
        config, decoded = self._config, positions - prefill
        if config.verify is VerifyPolicy.all or config.race is RaceName.always:
            return
        prefill_s = self.cost.difference(positions, decoded) if prefill else 0.0
        drafting_s = seconds.waiting + self.cost.difference(decoded, num_rows)
        self.suspension.record(num_rows, accepted, seconds.total - prefill_s, drafting_s, seconds.own)

    def predict(self, method: str, probability: np.ndarray) -> np.ndarray:
        """Tokens per second of a request that this method drafts for alone, in its best window; plain decoding if that
        is faster."""
        mine = [drafter for drafter in self.drafters.values() if drafter.spec.method == method]
        window, token_s = max(one.spec.window for one in mine), max(one.token_s for one in mine)
        verify_s = self.cost.curve(self.rows, self.rows * window)[:: self.rows]
        return np.maximum(window_rates(probability, window, token_s, verify_s).max(axis=1), 1.0 / verify_s[0])

    def standings(self) -> list[dict[str, Any]]:
        """The draft ladder as plain data: acceptance and predicted speed of each method, per range of output positions
        at which it was tried."""
        acceptance, standings = self.acceptance, []
        token_s = {one.spec.method: one.token_s for one in self.drafters.values()}
        for method in token_s:
            number = acceptance.number(method)
            chances, drafted = acceptance.of_method()[number], acceptance.evidence[1, number]
            tgs = self.predict(method, chances)
            for at in np.flatnonzero(drafted >= 1.0).tolist():
                place = {"method": method, "positions": BUCKET_NAMES[at], "token_s": token_s[method]}
                figures = {"drafted": float(drafted[at]), "acceptance": float(chances[at]), "tgs": float(tgs[at])}
                standings.append({**place, **figures})
        return standings

    # ---- parts ----

    def _apart(self) -> list[int]:
        """Seats of draft actors that can be reached."""
        return [seat for seat, one in self.drafters.items() if one.able and not one.hosted]

    def _probability(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`."""
        return self.acceptance.probability(self.table, rows)[self.table.method]

    def _net_probability(self, rows: np.ndarray) -> np.ndarray:
        """`_probability`, of models that take turns less what a right token of theirs costs: the tail that a draft
        actor makes meanwhile begins before that token, and is lost where the actor is wrong there."""
        probability, drafters, assigned = self._probability(rows), self.drafters.items(), self.table.assigned
        kept = np.ones(len(rows))
        for seat, one in drafters:
            if one.able and not (one.hosted or one.spec.traits.looks_up):
                p, window = probability[seat], one.spec.window
                lost = p * (1.0 - p**window) * (_UNRESCUED if one.spec.branches else 1.0)  # (1 - p) of its tail
                kept = np.minimum(kept, np.where(assigned[seat, rows], 1.0 - lost, 1.0))
        for seat, one in drafters:
            if one.takes_turns:
                probability[seat] *= kept
        return probability

    def _supply(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`, as everything of `take`, in C order: kernels are compiled for that."""
        return self.table.length.take(rows, axis=1)

    def _longest(self, rows: np.ndarray) -> np.ndarray:
        """int32 `(seats, rows)`: how long models that take turns may make the tails; 0 where none drafts."""
        windows = np.zeros(len(self.table.method), np.int32)
        for seat, drafter in self.drafters.items():
            if drafter.able and drafter.takes_turns:
                windows[seat] = drafter.spec.window
        return np.where(self.table.assigned.take(rows, axis=1), windows[:, None], 0).astype(np.int32)

    def _room(self, rows: np.ndarray) -> np.ndarray:
        """Most draft tokens of each row: behind them comes one token of the target's own."""
        table = self.table
        return np.maximum(table.limit[rows] - table.committed[rows] - 1, 0)
