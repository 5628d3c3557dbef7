"""Rewards of a rollout's trajectories: their mean, and pass@k."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol


class RowScorer(Protocol):
    """Scores rows of `trajectories.jsonl`, while others are rolled out."""

    def check(self, rows: Sequence[Any]) -> None:
        """Refuse rows of prompts that cannot be scored. Raises UserError, before anything starts."""

    def submit(self, row: Mapping[str, Any]) -> Future[tuple[float | None, str]]:
        """Begin to score a row. The result is the reward, or None and the reason if there is none."""


@dataclass(slots=True)
class Scores:
    """Rewards by prompt. A sample passes with `threshold` or more."""

    threshold: float
    rewards: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row that has its `reward`, or a `reward_error`."""
        if "reward_error" in row:
            self.failures[row["reward_error"]] += 1
        if row.get("reward") is not None:
            self.rewards[row["prompt_index"]].append(row["reward"])

    def figures(self) -> dict[str, Any]:
        """Mean reward, and `pass@1`, `pass@2`, `pass@4`, ... up to the largest group, as plain data."""
        groups = [(len(one), sum(reward >= self.threshold for reward in one)) for one in self.rewards.values()]
        figures: dict[str, Any] = {
            "scored": sum(size for size, _ in groups),
            "failures": dict(self.failures),
            "mean": fmean(reward for one in self.rewards.values() for reward in one) if groups else None,
        }
        largest = max((size for size, _ in groups), default=0)
        for k in [1 << power for power in range(largest.bit_length())]:
            figures[f"pass@{k}"] = fmean(pass_at_k(size, passed, k) for size, passed in groups if size >= k)
        return figures


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of k of these samples passes, drawn without replacement: the unbiased estimate of pass@k."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)
