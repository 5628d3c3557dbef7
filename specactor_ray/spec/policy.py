"""What a verifier decides: who drafts for which request, how far, what is verified, how long a step waits.

Everything maximises one quotient, expected committed tokens per second of the step:

    (rows + sum of expected accepted tokens) / (seconds of waiting + V(positions))

Acceptance comes from `acceptance.py`, V from `cost.py`, D from the drafters. There is one rule of exploration: what was
not tried for long is forgotten, and of the unknown the best is hoped for. Of the algorithms of SpecActor (arXiv
2511.16193) the race (3) and the ladder are in `assign.py`; why there is no Algorithm 2: docs/design/policy.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.spec import _kernels
from specactor_ray.spec.acceptance import Acceptance
from specactor_ray.spec.cost import StepCost
from specactor_ray.spec.suspension import Suspension
from specactor_ray.spec.table import RequestTable
from specactor_ray.spec.tgs import window_rates

_MOST_ROUNDS = 4
"""Draft tokens per request that a step may wait for, where drafters run ahead anyway."""
_FIRST_ROUNDS = 3
"""The same of a drafter whose pace is not known."""
_SLACK = 1.3
"""A wait is given up after this many times what it should take."""


@dataclass(slots=True)
class Drafter:
    """The drafter in a seat, as the policy sees it."""

    drafter_id: str
    method: str
    window: int
    max_batch: int
    """b_max: most requests it may draft for."""
    looks_up: bool = False
    """It finds guesses in microseconds and learns from what it follows: it follows all requests it has room for."""
    inline: bool = False
    """It runs in the verifier's thread, and drafts only while a step waits for it."""
    token_s: float = 0.0
    """D: seconds per drafted token for one request at its present load, as it says; 0 if unknown."""
    answer_s: float = 0.0
    """Seconds from telling it of a commit to its first answer, drafting aside."""
    able: bool = True
    """It can be reached."""


class Wait(NamedTuple):
    """What a step waits for."""

    rounds: int
    """Further draft tokens of each request."""
    seconds: float
    """At most."""


class Positions(NamedTuple):
    """Of the forward of a step."""

    total: int
    prefill: int


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
    """The decisions of one verifier. Knows no clock, no messages and no models.

    Args:
        config: Windows, limits of waits, races.
        table: The requests; windows are set in it.
        acceptance: How good drafts are.
        cost: What a step costs.
    """

    def __init__(
        self, config: SpeculationConfig, table: RequestTable, acceptance: Acceptance, cost: StepCost, coupled: bool
    ) -> None:
        self._config, self.table, self._coupled = config, table, coupled
        self.acceptance, self.cost = acceptance, cost
        self.drafters: list[Drafter | None] = []
        """By seat."""
        self.suspension = Suspension()
        self.wanted = np.zeros(0, np.int32)
        """Draft tokens of each row that the step waits for."""
        self.rows = 1
        """Of the newest step."""
        self._probability = np.zeros((0, 0))

    # ---- before a step ----

    def plan_wait(self, rows: np.ndarray) -> Wait:
        """How many rounds of drafting are worth waiting for, with what is there already."""
        table, config = self.table, self._config
        self.rows = len(rows)
        self._probability = self.acceptance.probability(table, rows)[table.method]
        self.wanted = np.zeros(len(rows), np.int32)
        windows = table.windows.take(rows, axis=1)
        for seat, drafter in enumerate(self.drafters):
            if drafter is not None and drafter.inline:
                windows[seat] = drafter.window
        growing = self._growing(rows, windows)
        drafters = [drafter for drafter, grows in zip(self.drafters, growing, strict=False) if drafter and grows.any()]
        if not drafters or not self.cost.is_known:
            return Wait(0, 0.0)
        inline = all(drafter.inline for drafter in drafters)
        if config.verify is VerifyPolicy.all and (self._coupled or config.draft_wait_s):
            most = windows if self._coupled else np.minimum(windows, 1)
            self.wanted = np.minimum(np.where(growing, most, 0).max(axis=0), self._room(rows)).astype(np.int32)
            rounds = int(self.wanted.max())
        else:
            rounds = self._worthwhile_rounds(rows, drafters, growing, windows)
        if inline:
            self._order(rows)
            return Wait(rounds, config.coupled_wait_s)
        if config.draft_wait_s is not None:
            return Wait(rounds, config.draft_wait_s)
        return Wait(rounds, _SLACK * rounds * self._pace(drafters)[0])

    def _worthwhile_rounds(
        self, rows: np.ndarray, drafters: Sequence[Drafter], growing: np.ndarray, windows: np.ndarray
    ) -> int:
        """Compare taking the step now with waiting for one more draft token of each request, two, ..."""
        table, supply = self.table, self._supply(rows)
        if not drafters[0].inline:
            growing = growing & (supply == 0)  # who has something loses nothing: what comes is for its next step
        most = max(one.window for one in drafters) if drafters[0].inline else _MOST_ROUNDS
        hoped = np.where(growing, self.acceptance.guessing(table, rows)[table.method], 1.0)
        room, curve = self._room(rows), self.cost.curve(len(rows), len(rows) * table.window)
        token_s, answer_s = self._pace(drafters)
        if token_s <= 0.0:
            most = min(most, _FIRST_ROUNDS)  # what a token costs shows when it has been drafted
        late = np.where(
            (supply > 0) | (table.base.take(rows, axis=1) >= table.committed[rows]), 0, answer_s / max(token_s, 1e-6)
        )
        most_of_row = np.where(growing, np.maximum(windows, supply), supply)
        rounds: int = _kernels.worthwhile_rounds(
            self._probability, hoped, supply, most_of_row, np.ceil(late), room, curve, token_s, most, self.wanted
        )
        return rounds

    def _pace(self, drafters: Sequence[Drafter]) -> tuple[float, float]:
        """Seconds of a further draft token of each request, and of the first one after a commit that refuted the tail.
        Drafters of this thread take turns, others run at once."""
        if drafters[0].inline:
            return sum(drafter.token_s for drafter in drafters), 0.0
        return max(drafter.token_s for drafter in drafters), max(drafter.answer_s for drafter in drafters)

    def _order(self, rows: np.ndarray) -> None:
        """Drafters of this thread draft what the step waits for, and no more."""
        for seat, drafter in enumerate(self.drafters):
            if drafter is not None and drafter.inline and not drafter.looks_up:
                self.table.windows[seat, rows] = self.wanted

    def is_served(self, rows: np.ndarray) -> bool:
        """Whether no wait would bring anything: each row has what is wanted of it, or all its drafters are done."""
        missing = self._supply(rows).max(axis=0, initial=0) < self.wanted
        return not missing.any() or not self._growing(rows, self.table.windows.take(rows, axis=1))[:, missing].any()

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is verified of the tails that are there.

        Returns:
            `(rows,)` the seat whose tail it is, -1 for none, and how many of its tokens.
        """
        supply, room = self._supply(rows), self._room(rows)
        curve = self.cost.curve(len(rows), len(rows) * self.table.window)
        _, seats, lengths = self._choose(supply, np.ones_like(self._probability), room, curve)
        if self._config.verify is VerifyPolicy.all:
            there = supply[seats, np.arange(len(rows))]
            lengths = np.where(seats >= 0, np.minimum(there, room), 0).astype(np.int32)
        return seats, lengths

    def set_windows(self, rows: np.ndarray) -> None:
        """How far each drafter runs ahead for each row: where it runs at once, as far as it may."""
        for seat, drafter in enumerate(self.drafters):
            if drafter is not None and (drafter.looks_up or not drafter.inline):
                self.table.windows[seat, rows] = drafter.window

    def record(self, num_rows: int, positions: Positions, accepted: int, seconds: Seconds) -> None:
        """A step has ended: learn what it cost, and whether drafts pay, unless the configuration demands them. Prompts
        take the same time with drafts and without, so their share does not count.

        Args:
            num_rows: Requests that were decoded.
            positions: Of the step.
            accepted: Draft tokens that were right.
            seconds: What the step took.
        """
        if 2 * positions.prefill > positions.total:
            return
        self.cost.record(positions.total, seconds.engine)
        config, decoded = self._config, positions.total - positions.prefill
        if config.verify is VerifyPolicy.all or config.race is RaceName.always:
            return
        prefill_s = self.cost.difference(positions.total, decoded)
        drafting_s = seconds.waiting + self.cost.difference(decoded, num_rows)
        self.suspension.record(num_rows, accepted, seconds.total - prefill_s, drafting_s, seconds.own)

    def predict(self, method: str, probability: np.ndarray) -> np.ndarray:
        """Tokens per second of a request that this method drafts for alone, in its best window; plain decoding if that
        is faster."""
        mine = [drafter for drafter in self.drafters if drafter is not None and drafter.method == method]
        window, token_s = max(one.window for one in mine), max(one.token_s for one in mine)
        rows = max(self.rows, 1)
        verify_s = self.cost.curve(rows, rows * window)[::rows]
        return np.maximum(window_rates(probability, window, token_s, verify_s).max(axis=1), 1.0 / verify_s[0])

    # ---- parts ----

    def _choose(
        self, supply: np.ndarray, weight: np.ndarray, room: np.ndarray, curve: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        seats, lengths = np.empty(len(room), np.int32), np.empty(len(room), np.int32)
        rate = _kernels.choose(self._probability, weight, supply, room, curve, seats, lengths)
        return rate, seats, lengths

    def _supply(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`, as everything of `take`, in C order: kernels are compiled for that."""
        return self.table.length.take(rows, axis=1)

    def _growing(self, rows: np.ndarray, windows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`: the drafter may still lengthen the tail of the row before its next commit."""
        table = self.table
        done = table.complete.take(rows, axis=1) & (table.base.take(rows, axis=1) == table.committed[rows])
        able = np.zeros(len(table.method), np.bool_)
        for seat, drafter in enumerate(self.drafters):
            able[seat] = drafter is not None and drafter.able
        return table.assigned.take(rows, axis=1) & able[:, None] & ~done & (windows > table.length.take(rows, axis=1))

    def _room(self, rows: np.ndarray) -> np.ndarray:
        """Most draft tokens of each row: behind them comes one token of the target's own."""
        table = self.table
        return np.maximum(table.limit[rows] - table.committed[rows] - 1, 0)
