"""Counters of a verifier: tokens, drafts, and where the time of a step goes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specactor_ray.targets.base import StepResult

_RECENT_STEPS = 2048


@dataclass(slots=True)
class StepMetrics:
    """Totals since the start (seconds, tokens) and the recent steps' protocol and waiting times."""

    steps: int = 0
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
    forward_s: float = 0.0
    sampling_s: float = 0.0
    waiting_s: float = 0.0
    protocol_s: float = 0.0
    """Everything between two forwards that is neither sampling nor waiting for drafts."""
    failed_requests: int = 0
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    """Drafter id → [drafted, accepted]."""
    _recent_protocol: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def record_step(self, result: StepResult, total_s: float, waiting_s: float) -> None:
        """One step took `total_s` seconds, of which `waiting_s` were spent waiting for drafts."""
        protocol = max(total_s - waiting_s - result.forward_s - result.sampling_s, 0.0)
        self.steps += 1
        self.forward_s += result.forward_s
        self.sampling_s += result.sampling_s
        self.waiting_s += waiting_s
        self.protocol_s += protocol
        self._recent_protocol.append(protocol)

    def record_row(self, committed: int, supplied: int, drafted: int, accepted: int) -> None:
        """One row committed `committed` tokens; `supplied` draft tokens were there, `drafted` were verified."""
        self.row_steps += 1
        self.committed_tokens += committed
        self.supplied_tokens += supplied
        self.supplied_row_steps += supplied > 0
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def record_drafter(self, drafter_id: str, drafted: int, accepted: int) -> None:
        pair = self.by_drafter.setdefault(drafter_id, [0, 0])
        pair[0] += drafted
        pair[1] += accepted

    def to_dict(self) -> dict[str, Any]:
        """All counters as plain data."""
        return {
            "steps": self.steps,
            "committed_tokens": self.committed_tokens,
            "row_steps": self.row_steps,
            "supplied_tokens": self.supplied_tokens,
            "supplied_row_steps": self.supplied_row_steps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "forward_s": self.forward_s,
            "sampling_s": self.sampling_s,
            "waiting_s": self.waiting_s,
            "protocol_s": self.protocol_s,
            "protocol_median_s": median(self._recent_protocol) if self._recent_protocol else 0.0,
            "failed_requests": self.failed_requests,
            "by_drafter": {name: list(pair) for name, pair in self.by_drafter.items()},
        }
