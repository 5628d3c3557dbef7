"""Counters of a verifier's steps. Imports no kernels: commands read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

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
