"""Counters of a rollout, summed over its verifiers, and the ratios derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RolloutMetrics:
    """Sums over all verifiers; see `loops/step_metrics.py` for the meaning of each counter."""

    steps: int = 0
    committed_tokens: int = 0
    row_steps: int = 0
    supplied_tokens: int = 0
    supplied_row_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forward_s: float = 0.0
    sampling_s: float = 0.0
    waiting_s: float = 0.0
    protocol_s: float = 0.0
    protocol_median_s: float = 0.0
    """Largest of the verifiers' medians over recent steps."""
    failed_requests: int = 0
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    """Drafter id → [drafted, accepted]."""

    @classmethod
    def merge(cls, counters: Iterable[Mapping[str, Any]]) -> RolloutMetrics:
        """Sum the counters of several verifiers."""
        total = cls()
        for one in counters:
            for name in cls.__dataclass_fields__:
                if name in ("by_drafter", "protocol_median_s"):
                    continue
                setattr(total, name, getattr(total, name) + one.get(name, 0))
            total.protocol_median_s = max(total.protocol_median_s, one.get("protocol_median_s", 0.0))
            for drafter, (drafted, accepted) in one.get("by_drafter", {}).items():
                pair = total.by_drafter.setdefault(drafter, [0, 0])
                pair[0] += drafted
                pair[1] += accepted
        return total

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 where nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per request and step, the bonus or recovered one included; 1 for plain decoding."""
        return self.committed_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def supply(self) -> float:
        """Usable draft tokens per request and step, whether verified or not."""
        return self.supplied_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def supply_share(self) -> float:
        """Share of requests and steps at which at least one usable draft token was there."""
        return self.supplied_row_steps / self.row_steps if self.row_steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counters and ratios as plain data."""
        ratios = {
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "supply": self.supply,
            "supply_share": self.supply_share,
        }
        return {**asdict(self), **ratios}
