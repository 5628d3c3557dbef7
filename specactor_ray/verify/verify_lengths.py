"""How many draft tokens a step verifies, how far models of the verifier's thread draft, and which methods promise most.

All decisions maximise the expected committed tokens per second of the step:

    (rows + sum of expected accepted tokens) / (seconds of drafting + V(positions))

Old observations decay, and unknown values are estimated optimistically. See docs/design/policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.plan.costs import StepCost
from specactor_ray.plan.search import window_rates
from specactor_ray.verify import _kernels
from specactor_ray.verify.table import BUCKET_NAMES, Acceptance, RequestTable
from specactor_ray.verify.waiting import Suspension, Waiting

_FIRST_ROUNDS = 3
"""Rounds of drafting while the seconds of a round are unknown."""
_RETURN_GAIN = 0.05
"""Least predicted gain of rounds if models must first read more than a window of commits."""
_UNRESCUED = 0.5
"""Share of refuted tails that no branch replaces."""


@dataclass(eq=False)
class Drafter:
    """The properties of a seat's drafter that the policy uses."""

    drafter_id: str
    spec: DrafterSpec
    token_s: float = 0.0
    """D: seconds in which a model drafts one token for each of its requests; 0 if unknown. `token_rows`: requests of
    the verifier when it arrived."""
    token_rows: int = 0
    trip_s: float = 0.0
    """Least seconds of a message to it and of its answer; 0 if unknown."""
    able: bool = True
    """Whether it can be reached."""
    hosted: bool = False
    """Whether the verifier's own thread runs it."""

    @property
    def takes_turns(self) -> bool:
        """Whether it is a model that drafts while the verifier waits."""
        return self.hosted and not self.spec.traits.looks_up


class Seconds(NamedTuple):
    """Seconds of a step: total, forward and sampling, waiting for drafts."""

    total: float
    engine: float
    waiting: float

    @property
    def own(self) -> float:
        """Seconds of the verifier's own Python."""
        return max(self.total - self.engine - self.waiting, 0.0)


class DraftPolicy:
    """The decisions of one verifier, without clock, messages and models. `drafters`: seat → its drafter."""

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
        """Rows of the newest step."""

    def plan_rounds(self, rows: np.ndarray) -> int:
        """Number of tokens that models that take turns with the verifier draft for each request before the step."""
        table, drafters = self.table, [one for one in self.drafters.values() if one.takes_turns]
        longest = np.zeros((len(table.method), len(rows)), np.int32)
        for seat, one in self.drafters.items():
            if one.able and one.takes_turns:
                longest[seat] = one.spec.window * table.assigned[seat, rows]
        if not longest.any() or not self.cost.is_known:
            return 0
        most = max(one.spec.window for one in drafters)
        if self._config.verify is VerifyPolicy.all:
            return most
        for one in drafters:
            if 2 * len(rows) <= one.token_rows:  # measured at twice the load, so unknown at this load
                one.token_s, one.token_rows = 0.0, 0
        token_s = sum(one.token_s for one in drafters)
        if token_s <= 0.0:
            most = min(most, _FIRST_ROUNDS)
        supply, curve = self._supply(rows), self.cost.curve(len(rows), len(rows) * table.window)
        behind = table.committed[rows] - table.told.take(rows, axis=1) > table.window
        hurdle = 1.0 + _RETURN_GAIN * float(behind[longest > 0].mean())
        tails = (self._net_probability(rows), supply, np.maximum(longest, supply), self._room(rows))
        rounds: int = _kernels.best_rounds(*tails, curve, token_s, most, hurdle)
        return rounds

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Verified parts of the tails: int32 `(rows,)` seats, -1 for none, and numbers of tokens."""
        self.rows = len(rows)
        supply, room = self._supply(rows), self._room(rows)
        seats, lengths = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
        curve = self.cost.curve(len(rows), len(rows) * self.table.window)
        _kernels.choose_lengths(self._probability(rows), supply, room, curve, seats, lengths)
        if self._config.verify is VerifyPolicy.all:
            lengths = np.where(seats >= 0, np.minimum(supply[seats, np.arange(len(rows))], room), 0)
        return seats, lengths

    def plan_wait(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        """Rows that wait for a first draft at the begin of a step, and the longest wait in seconds."""
        table, longest_s, seats = self.table, self._config.draft_wait_s, self._apart()
        if not seats or longest_s == 0.0 or (longest_s is None and self._waiting.rest):
            return rows[:0], 0.0
        silent = rows[self.silent(rows)]
        if longest_s is None:
            heard = (table.base[seats] >= 0).any(axis=0)  # for other rows the drafter still reads the prompt
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
        """bool `(rows,)`: whether the row has no tail, but a draft actor that has not answered the newest commit."""
        table, seats = self.table, self._apart()
        base, asked = table.base[seats].take(rows, axis=1), table.assigned[seats].take(rows, axis=1)
        silent: np.ndarray = (asked & (base != table.committed[rows])).any(axis=0) & ~self._supply(rows).any(axis=0)
        return silent

    def waited(self, rows: np.ndarray, seconds: float) -> None:
        """Record a wait of these rows."""
        if self._config.draft_wait_s is None:
            self._waiting.waited(rows, seconds)

    def record(self, num_rows: int, positions: int, prefill: int, accepted: int, seconds: Seconds) -> None:
        """Learn the cost of steps, and whether drafts pay, unless the configuration demands drafts. `num_rows` requests
        were decoded, with `accepted` right draft tokens; of the `positions` of the forward `prefill` were of prompts,
        which take the same time with and without drafts."""
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
        """Tokens per second of a request with this method alone at its best window, or of plain decoding if higher."""
        mine = [drafter for drafter in self.drafters.values() if drafter.spec.method == method]
        window, token_s = max(one.spec.window for one in mine), max(one.token_s for one in mine)
        verify_s = self.cost.curve(self.rows, self.rows * window)[:: self.rows]
        rates: np.ndarray = window_rates(probability, window, token_s, verify_s).max(axis=1)
        return rates.clip(1.0 / verify_s[0])

    def standings(self) -> list[dict[str, Any]]:
        """The draft ladder as plain data: each method at each range of output positions with evidence."""
        acceptance, standings = self.acceptance, list[dict[str, Any]]()
        for method, token_s in {one.spec.method: one.token_s for one in self.drafters.values()}.items():
            number = acceptance.number(method)
            chances, drafted = acceptance.of_method()[number], acceptance.evidence[1, number]
            tgs = self.predict(method, chances)
            for at in np.flatnonzero(drafted >= 1.0).tolist():
                place = {"method": method, "positions": BUCKET_NAMES[at], "token_s": token_s}
                figures = {"drafted": float(drafted[at]), "acceptance": float(chances[at]), "tgs": float(tgs[at])}
                standings.append({**place, **figures})
        return standings

    def _apart(self) -> list[int]:
        """Seats of reachable draft actors."""
        return [seat for seat, one in self.drafters.items() if one.able and not one.hosted]

    def _probability(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`: chance that a draft token is right."""
        return self.acceptance.probability(self.table, rows)[self.table.method]

    def _net_probability(self, rows: np.ndarray) -> np.ndarray:
        """`_probability`, reduced for models that take turns by the cost of a right token: the tail that a draft actor
        makes meanwhile begins before that token, and is lost if the actor is wrong there."""
        probability, drafters, assigned = self._probability(rows), self.drafters.items(), self.table.assigned
        kept = np.ones(len(rows))
        for seat, one in drafters:
            if one.able and not (one.hosted or one.spec.traits.looks_up):
                p, window = probability[seat], one.spec.window
                lost = p * (1.0 - p**window) * (_UNRESCUED if one.spec.branches else 1.0)  # (1 - p) times its tail
                kept = np.minimum(kept, np.where(assigned[seat, rows], 1.0 - lost, 1.0))
        for seat, one in drafters:
            if one.takes_turns:
                probability[seat] *= kept
        return probability

    def _supply(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`: usable draft tokens, in C order, which kernels require."""
        return self.table.length.take(rows, axis=1)

    def _room(self, rows: np.ndarray) -> np.ndarray:
        """`(rows,)`: most draft tokens of each row, which leave room for one token of the target."""
        left: np.ndarray = self.table.limit[rows] - self.table.committed[rows]
        return (left - 1).clip(0)
