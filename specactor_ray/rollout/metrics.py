"""Counters of a rollout, summed over its verifiers, and the ratios derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from specactor_ray.verify.requests import StepMetrics

_NOT_SUMS = ("drafted_by_position", "accepted_by_position")
"""Counters with their own way of merging."""
_RATIOS = ("acceptance_rate", "acceptance_length", "supply", "supply_share")


@dataclass
class RolloutMetrics(StepMetrics):
    """Sums over all verifiers."""

    @classmethod
    def merge(cls, counters: Iterable[Mapping[str, Any]]) -> RolloutMetrics:
        """Sum the counters (`StepMetrics.to_dict`) of several verifiers."""
        total = cls()
        for one in counters:
            for counter in fields(StepMetrics):
                if counter.name not in _NOT_SUMS:
                    setattr(total, counter.name, getattr(total, counter.name) + one.get(counter.name, 0))
            total.count_positions(one.get("drafted_by_position", ()), one.get("accepted_by_position", ()))
        return total

    def since(self, before: RolloutMetrics) -> RolloutMetrics:
        """Counters since `before`; the positions of drafts are left out."""
        names = [counter.name for counter in fields(StepMetrics) if counter.name not in _NOT_SUMS]
        # The counters of a verifier that was lost meanwhile are gone.
        return RolloutMetrics(**{name: max(getattr(self, name) - getattr(before, name), 0) for name in names})

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per request and step, including the bonus or recovered one; 1 for plain decoding."""
        return self.committed_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def supply(self) -> float:
        """Usable draft tokens per request and step, whether verified or not."""
        return self.supplied_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def supply_share(self) -> float:
        """Share of request steps with at least one usable draft token."""
        return self.supplied_row_steps / self.row_steps if self.row_steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counters and ratios as plain data."""
        return {**super().to_dict(), **{name: getattr(self, name) for name in _RATIOS}}
