"""Counters of a verifier: tokens, drafts, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from specactor_ray.spec import _kernels
from specactor_ray.spec.policy import Seconds
from specactor_ray.target.base import StepResult


@dataclass
class StepMetrics:
    """Totals of one verifier since the start or the last reset: seconds, tokens, steps."""

    steps: int = 0
    suspended_steps: int = 0
    """Of them, those in which drafts were left alone, since they did not pay (`spec/suspension.py`)."""
    committed_tokens: int = 0
    row_steps: int = 0
    """Rows that committed, summed over steps: committed_tokens / row_steps is the acceptance length."""
    supplied_tokens: int = 0
    """Usable draft tokens that were there, summed over row-steps (supply)."""
    supplied_row_steps: int = 0
    """Row-steps with at least one usable draft token."""
    drafted_tokens: int = 0
    """Draft tokens verified."""
    accepted_tokens: int = 0
    refuted_tails: int = 0
    """Tails that committed tokens refuted, on arrival or at a commit."""
    arrival_rescues: int = 0
    """Branches that became the tail of a message as it arrived."""
    commit_rescues: int = 0
    """Branches that became the tail at a commit."""
    forward_s: float = 0.0
    sampling_s: float = 0.0
    waiting_s: float = 0.0
    protocol_s: float = 0.0
    """Everything between two forwards that is neither sampling nor waiting for drafts."""
    drafted_by_position: list[int] = field(default_factory=list)
    """How often the 1st, 2nd, ... draft token of a tail was verified."""
    accepted_by_position: list[int] = field(default_factory=list)
    """How often it was right; the same length."""

    def count_positions(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add counts per draft position; `accepted` is no longer than `drafted`."""
        missing = [0] * (len(drafted) - len(self.drafted_by_position))
        self.drafted_by_position += missing
        self.accepted_by_position += missing
        for position, count in enumerate(drafted):
            self.drafted_by_position[position] += count
        for position, count in enumerate(accepted):
            self.accepted_by_position[position] += count

    def record_step(self, result: StepResult, seconds: Seconds, suspended: bool = False) -> None:
        """What one step took, and whether drafts were left alone in it."""
        self.steps += 1
        self.suspended_steps += suspended
        self.forward_s += result.forward_s
        self.sampling_s += result.sampling_s
        self.waiting_s += seconds.waiting
        self.protocol_s += seconds.own

    def record_rows(
        self, committed: np.ndarray, supplied: np.ndarray, drafted: np.ndarray, accepted: np.ndarray
    ) -> None:
        """What one step did, by row: tokens committed, draft tokens that were there, that were verified, and right."""
        self.row_steps += len(committed)
        self.committed_tokens += int(committed.sum())
        tokens, rows, tried, right, reached = _kernels.tally(supplied, drafted, accepted)
        self.supplied_tokens += tokens
        self.supplied_row_steps += rows
        self.drafted_tokens += tried
        self.accepted_tokens += right
        self.count_positions(*reached.tolist())

    def count_outcomes(self, outcomes: np.ndarray) -> None:
        """Take the counts of `RequestTable.outcomes`, which begin at 0 again."""
        refuted, on_arrival, at_commit = outcomes.tolist()
        self.refuted_tails += refuted
        self.arrival_rescues += on_arrival
        self.commit_rescues += at_commit
        outcomes[:] = 0

    def to_dict(self) -> dict[str, Any]:
        """All counters as plain data; for any thread. The loop may count on meanwhile: both lists have equal length."""
        numbers = {counter.name: getattr(self, counter.name) for counter in fields(StepMetrics)}
        accepted = list(self.accepted_by_position)
        drafted = self.drafted_by_position[: len(accepted)]
        return {**numbers, "drafted_by_position": drafted, "accepted_by_position": accepted}
