"""Counters of a verifier's steps. Imports no kernels: commands read them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from specactor_ray.core.step_cost import range_number
from specactor_ray.table.requests import COUNTS
from specactor_ray.target.base import StepResult

if TYPE_CHECKING:
    from specactor_ray.verify.policy import Seconds

_PLAIN_STEPS = 256
"""Plain steps for which `PlainEstimate` has room at first."""


@dataclass
class StepMetrics:
    """Totals of one verifier since the start or the last reset: seconds, tokens, steps."""

    steps: int = 0
    """Steps of the engine, with or without a commit."""
    suspended_steps: int = 0
    """Steps without drafts, because drafts did not pay (`Suspension`)."""
    committed_tokens: int = 0
    """Those that no output keeps included: behind a stop text or an abort, or computed again elsewhere."""
    row_steps: int = 0
    """Rows that committed, summed over steps: committed_tokens / row_steps is the acceptance length."""
    supplied_tokens: int = 0
    """Usable draft tokens, summed over row-steps (supply)."""
    supplied_row_steps: int = 0
    """Row-steps with at least one usable draft token."""
    drafted_tokens: int = 0
    """Verified draft tokens."""
    accepted_tokens: int = 0
    refuted_tails: int = 0
    """Tails that committed tokens refuted, on arrival or at a commit."""
    rescued_tails: int = 0
    """Tails that a branch replaces in verification when they were refuted or used up."""
    forward_s: float = 0.0
    sampling_s: float = 0.0
    waiting_s: float = 0.0
    protocol_s: float = 0.0
    """Seconds between two forwards that are neither sampling nor waiting for drafts."""
    plain_s: float = 0.0
    """Estimated seconds of plain decoding for the same tokens, see `PlainEstimate`."""
    drafted_by_position: list[int] = field(default_factory=list)
    """Number of times that the 1st, 2nd, ... draft token of a tail was verified."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Number of times that it was right; the same length."""

    def count_positions(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add counts per draft position, as many of both."""
        self.drafted_by_position = list(map(sum, zip_longest(self.drafted_by_position, drafted, fillvalue=0)))
        self.accepted_by_position = list(map(sum, zip_longest(self.accepted_by_position, accepted, fillvalue=0)))

    def record_step(self, result: StepResult, seconds: Seconds, suspended: bool = False) -> None:
        """Add the seconds of one step. `suspended`: whether it used no drafts."""
        self.steps += 1
        self.suspended_steps += suspended
        self.forward_s += result.forward_s
        self.sampling_s += result.sampling_s
        self.waiting_s += seconds.waiting
        self.protocol_s += seconds.own

    def take(self, counts: np.ndarray, reached: np.ndarray) -> None:
        """Add `RequestTable.counts` and `reached`, and set these to 0."""
        for name, count in zip(COUNTS, counts.tolist(), strict=True):
            setattr(self, name, getattr(self, name) + count)
        self.count_positions(*reached[:, : np.count_nonzero(reached[0])].tolist())
        counts[:] = 0
        reached[:] = 0

    def to_dict(self) -> dict[str, Any]:
        """All counters as plain data, for any thread: both lists have equal length also while the loop counts."""
        numbers = {counter.name: getattr(self, counter.name) for counter in fields(StepMetrics)}
        accepted = list(self.accepted_by_position)
        drafted = self.drafted_by_position[: len(accepted)]
        return {**numbers, "drafted_by_position": drafted, "accepted_by_position": accepted}


class PlainEstimate:
    """Seconds of plain steps that would have committed the tokens of the recorded steps.

    A request commits one token in each plain step after it enters. It enters when the earliest free slot was freed, but
    not before the next step of the slowest running request. The seconds of a plain step are the mean of measured steps
    with as many positions, interpolated between them; below the smallest measured step they follow the slope over all
    steps, at most in proportion. Cores and GPUs of draft actors are not counted.
    """

    def __init__(self) -> None:
        self._measured: dict[int, list[float]] = {}
        """Range of positions → number of steps, their positions and seconds of the engine."""
        self._plain: dict[int, list[float]] = {}
        """Range of positions → number of plain steps, and their positions."""
        self._begin, self._decoded = 0, 0
        """The first plain step that is not in `_plain`; how many of those in it have rows."""
        self._next = np.full(32, -1, np.int64)
        """Row → plain step of its next token; -1: it has no token yet."""
        self._last = 0
        """The largest value that `_next` had."""
        self._ends: list[int] = []
        """Heap of the plain steps at which a slot became free."""
        self._more, self._others = np.zeros((2, _PLAIN_STEPS), np.int64)
        """By plain step from `_begin` on: change of the number of rows; positions that are not of these."""
        self._steps, self._decodes, self._own_s = 0, False, [0.0, 0.0]
        """Steps over rows with a token; whether the newest one is such; Python seconds of the others, and of these."""

    def commit(self, result: StepResult) -> None:
        """Record the tokens of a step, before requests leave their rows (`end`)."""
        rows, lengths, positions = result.rows, result.lengths, result.num_tokens - int(result.drafted.sum())
        if len(rows) and (most := int(rows.max())) >= len(self._next):
            self._next = np.append(self._next, np.full(most + 1, -1, np.int64))
        begins = self._next[rows]
        count = int(np.count_nonzero(begins >= 0))
        self._decodes = count > 0
        if count:
            if count < len(rows):
                running = begins >= 0
                rows, begins, lengths = rows[running], begins[running], lengths[running]
            self._next[rows] = ends = begins + lengths
            first, self._last = int(begins.min()), max(self._last, int(ends.max()))
            self._fit(first)
            np.add.at(self._more, begins - self._begin, 1)
            np.add.at(self._more, ends - self._begin, -1)
            self._others[first - self._begin] += positions - count
            self._steps += 1
        else:
            _add(self._plain, positions)
        if count < len(result.rows):
            for row in result.rows[(self._next[result.rows] < 0) & (result.lengths > 0)].tolist():
                self._next[row] = self._enter()

    def record(self, result: StepResult, seconds: Seconds, lookups_s: float = 0.0) -> None:
        """Record the seconds of a step, after `commit`; `lookups_s`: the part of `seconds.own` that is for drafts."""
        _add(self._measured, result.num_tokens, seconds.engine)
        self._own_s[self._decodes] += max(seconds.own - lookups_s, 0.0)

    def end(self, row: int) -> None:
        """Record that a request has left its row."""
        if row < len(self._next) and self._next[row] >= 0:
            heapq.heappush(self._ends, int(self._next[row]))
            self._next[row] = -1

    def _enter(self) -> int:
        """The plain step of the first token, after the one of the prompt's step, of a request that begins."""
        running = self._next[self._next >= 0]
        if not len(running):
            self._ends.clear()
            return self._last
        return max(int(running.min()), heapq.heappop(self._ends) if self._ends else 0)

    def _fit(self, first: int) -> None:
        """Make room for plain steps from `first`, the earliest of a step, to the last one."""
        if self._last - self._begin >= len(self._more):
            done = min(first, int(self._next[self._next >= 0].min())) - self._begin
            self._decoded += self._count(self._plain, done)
            self._more[done] += self._more[:done].sum()
            room = np.zeros(max(2 * (self._last - self._begin - done), _PLAIN_STEPS), np.int64)
            self._more, self._others = (np.append(one[done:], room) for one in (self._more, self._others))
            self._begin += done

    def _count(self, plain: dict[int, list[float]], steps: int) -> int:
        """Add the first plain steps from `_begin` on. Returns how many have rows."""
        rows, others = self._more[:steps].cumsum(), self._others[:steps]
        for positions, count in zip(*np.unique((rows + others)[rows > 0], return_counts=True), strict=True):
            _add(plain, int(positions), count=int(count))
        return int(np.count_nonzero(rows > 0))

    @property
    def seconds(self) -> float:
        """The estimate; for any thread."""
        knots = sorted((positions / steps, s / steps, steps) for steps, positions, s in list(self._measured.values()))
        plain = {number: list(sums) for number, sums in list(self._plain.items())}
        decoded = self._decoded + self._count(plain, len(self._more))
        own_s = self._own_s[0] + self._own_s[1] * decoded / max(self._steps, 1)
        if not knots:
            return own_s
        at, means, weights = np.array(knots).T
        off = at - np.average(at, weights=weights)
        slope = float((weights * off * means).sum() / max((weights * off * off).sum(), 1e-9))
        slope = min(max(slope, 0.0), float(means[0] / max(at[0], 1.0)))
        return own_s + sum(
            steps * float(np.interp(positions / steps, at, means) - slope * max(at[0] - positions / steps, 0.0))
            for steps, positions in plain.values()
        )


def _add(ranges: dict[int, list[float]], positions: int, *values: float, count: int = 1) -> None:
    """Add `count` steps to their range, with the sums of other figures."""
    if positions:
        sums = ranges.setdefault(range_number(positions), [0.0] * (2 + len(values)))
        for at, value in enumerate((count, count * positions, *values)):
            sums[at] += value
