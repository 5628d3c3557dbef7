"""Counters of a verifier's steps. Imports no kernels: commands read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from specactor_ray.plan.costs import range_number
from specactor_ray.target.base import StepResult

if TYPE_CHECKING:
    from specactor_ray.verify.policy import Seconds

COUNTS = (
    "row_steps", "committed_tokens", "supplied_tokens", "supplied_row_steps", "drafted_tokens", "accepted_tokens",
    "refuted_tails", "rescued_tails",
)  # fmt: skip
"""Indices of `RequestTable.counts`; `StepMetrics` documents them."""


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
    """Seconds of plain steps that would have committed the tokens of the recorded steps, as many requests at once.

    A step over `rows` requests and `prefill` positions of prompts that commits `accepted` right draft tokens stands
    for a plain one over rows + prefill positions, and `accepted / rows` more over the rows. What plain steps take is
    the mean of measured ones with as many positions, with straight lines between; below the smallest measured one by
    the slope over all, but at most in proportion. Left out: cores and GPUs of draft actors, and the order in which
    requests end.
    """

    def __init__(self) -> None:
        self._measured: dict[int, list[float]] = {}
        """Range of positions → number of steps, their positions and seconds of the engine."""
        self._plain: dict[int, list[float]] = {}
        """Range of positions → number of plain steps, and their positions."""
        self._own_s = 0.0

    def record(self, result: StepResult, rows: int, accepted: int, seconds: Seconds, lookups_s: float = 0.0) -> None:
        """Record a step. `lookups_s`: the part of `seconds.own` that plain decoding has not."""
        _add(self._measured, result.num_tokens, 1.0, seconds.engine)
        more = accepted / rows if rows else 0.0
        _add(self._plain, rows + result.num_prefill_tokens, 1.0)
        _add(self._plain, rows, more)
        self._own_s += max(seconds.own - lookups_s, 0.0) * (1.0 + more)

    @property
    def seconds(self) -> float:
        """The estimate; for any thread."""
        knots = sorted((positions / steps, s / steps, steps) for steps, positions, s in list(self._measured.values()))
        if not knots:
            return self._own_s
        at, means, weights = np.array(knots).T
        off = at - np.average(at, weights=weights)
        slope = float((weights * off * means).sum() / max((weights * off * off).sum(), 1e-9))
        slope = min(max(slope, 0.0), means[0] / max(at[0], 1.0))
        total_s = self._own_s
        for steps, positions in list(self._plain.values()):
            mean = positions / steps
            total_s += steps * (float(np.interp(mean, at, means)) - slope * max(at[0] - mean, 0.0))
        return float(total_s)


def _add(ranges: dict[int, list[float]], positions: int, steps: float, *values: float) -> None:
    if positions and steps:
        sums = ranges.setdefault(range_number(positions), [0.0] * (2 + len(values)))
        for at, value in enumerate((steps, steps * positions, *values)):
            sums[at] += value
