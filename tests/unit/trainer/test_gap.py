"""A run whose rollout does not run the trained weights warns early and never completes; rounding does neither."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest

from specactor_ray.trainer.gap import GapRule


def record(step: int, gap: float, staleness: int = 0) -> dict[str, Any]:
    return {"step": step, "gap": {"mean": gap}, "train": {"staleness_max": staleness} if staleness else {}}


def judged(dtype: str, gaps: Sequence[float], done: int = 0) -> tuple[int, str]:
    """Number of the step that ends the run, resumed after `done` steps, 0 without one, and the problem."""
    rule = GapRule(dtype, [record(step, gap) for step, gap in enumerate(gaps[:done], 1)])
    for step, gap in enumerate(gaps[done:], done + 1):
        rule.judge(record(step, gap), last=step == len(gaps))
        if rule.problem:
            return step, rule.problem
    return 0, ""


@pytest.mark.parametrize(
    ("dtype", "gaps", "stops"),
    [
        ("float32", [1.2e-5, 1.1e-2, 1.2e-2, 1.2e-2], 3),  # a head that keeps its first weights
        ("float32", [4.9e-7, 0.78, 1.01], 2),  # experts that are noise
        ("float32", [1.0, 1.0], 1),
        ("bfloat16", [0.004, 0.3, 0.3, 0.01], 3),
        ("float32", [1e-5, 9e-3, 1e-5, 9e-3, 1e-5], 0),  # once may be one odd sample
        ("float32", [0.0, 3e-5, 8e-5, 1e-4, 3e-4], 0),
        ("float32", [2e-3, 4e-3, 9e-3, 2e-2], 0),  # a GPU's level, as at the start
        ("bfloat16", [0.02, 0.04, 0.015, 0.06], 0),
        ("float32", [math.nan, 1e-5, 2e-2, 2e-2], 4),
        ("float32", [1e-5, 2e-2, math.nan, 2e-2, 1e-5], 4),
        ("float32", [math.nan, math.inf], 0),  # the loss is not finite either, which ends the run by itself
    ],
)
def test_what_no_rounding_explains_ends_the_run(dtype: str, gaps: list[float], stops: int) -> None:
    """In a resumed run at the same step."""
    step, problem = judged(dtype, gaps)
    assert step == stops and ("The rollout does not run the trained weights" in problem) == bool(stops)
    for done in range(1, stops):
        assert judged(dtype, gaps, done) == (step, problem)


def test_a_warning_comes_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert judged("float32", [1e-5, 9e-4, 2e-3, 1e-5])[0] == 0
        assert [line.getMessage().partition(":")[0] for line in caplog.records] == ["step 3"]
        caplog.clear()
        judged("float32", [0.05, 0.06])  # differ from the beginning: say it once
        assert [line.getMessage().partition(":")[0] for line in caplog.records] == ["step 1"]


def test_tokens_of_older_weights_are_not_judged() -> None:
    rule = GapRule("float32", [record(1, 0.3, staleness=1), record(2, 1e-5)])
    for step in range(3, 9):
        rule.judge(record(step, 0.4 if step % 3 else 1e-5, staleness=step % 3), last=step == 8)
    assert not rule.problem
    rule.judge(record(9, 0.4), last=True)
    assert rule.problem
