"""The gap: how far log-probabilities of the rollout are from the trainer's, judged against its level at step 1."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_ROUNDING = {"float32": 1e-4}
_ROUNDING_16 = 5e-3
"""Least level, in nats per token, by the target's data type; the trainer computes in float32."""
_WARNS, _STOPS = 10.0, 50.0
"""Multiples of the level beyond which there is a warning, and beyond which the rollout has other weights."""
_ANOTHER_POLICY = 0.5
"""Gap that no rounding explains, in nats per token."""


class GapRule:
    """Judges the steps of a run in their order. `problem`: why the run must end; empty while there is no reason.
    `records`: those of the run so far (`StepRecorder`), so that a resumed run is judged like an uninterrupted one."""

    def __init__(self, dtype: str, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.problem = ""
        self._level = 0.0
        self._least = _ROUNDING.get(dtype, _ROUNDING_16)
        self._far_before = False
        for record in records:
            if not is_unfit(record):
                self._follow(float(record["gap"]["mean"]))

    def judge(self, record: Mapping[str, Any], last: bool = False) -> None:
        """Warn of this step, or set `problem`: the gap is that of another policy, or far above the level twice in a row
        or in the last step. Steps `is_unfit` are not judged."""
        if is_unfit(record):
            return
        step, gap, far_before = record["step"], float(record["gap"]["mean"]), self._far_before
        level, is_far = self._follow(gap)
        if gap > _ANOTHER_POLICY or (is_far and (far_before or last)):
            self.problem = (
                f"step {step}: log-probabilities of rollout and trainer differ by {gap:.3g} nats per token on average, "
                f"in step 1 by {level:.2g}. The rollout does not run the trained weights. Fix: the other "
                "target.backend, or target.dtype=float32, from a checkpoint before this step"
            )
        elif gap > _WARNS * level or (gap > _WARNS * self._least and level == gap):
            logger.warning(
                "step %d: log-probabilities of rollout and trainer differ by %.3g nats per token on average, in step 1 "
                "by %.2g; algorithm.importance=token corrects for it",
                step, gap, level,
            )  # fmt: skip

    def _follow(self, gap: float) -> tuple[float, bool]:
        """The level after this step, and whether its gap is far above it."""
        self._level = self._level or max(min(gap, _ANOTHER_POLICY), self._least)
        self._far_before = gap > min(_STOPS * self._level, _ANOTHER_POLICY)
        return self._level, self._far_before


def is_unfit(record: Mapping[str, Any]) -> bool:
    """Whether a step compares nothing: it has no samples, numbers that are not finite, or tokens that other weights
    sampled than those it trains."""
    gap = record["gap"]["mean"]
    return gap is None or not math.isfinite(gap) or record["train"].get("staleness_max", 0) > 0
