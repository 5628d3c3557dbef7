"""A run whose rollout does not run the trained weights warns early and never completes; rounding does neither."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from specactor_ray.trainer.gap import GapRule


def record(step: int, gap: float, staleness: int = 0) -> dict[str, Any]:
    return {"step": step, "gap": {"mean": gap}, "train": {"staleness_max": staleness} if staleness else {}}


def judged(dtype: str, gaps: Sequence[float], before: Sequence[float] = ()) -> tuple[int, GapRule]:
    """The rule after these steps, or the first with a problem; the number of steps. The last of them is the run's."""
    rule = GapRule(dtype, [record(step, gap) for step, gap in enumerate(before, 1)])
    for step, gap in enumerate(gaps, len(before) + 1):
        rule.judge(record(step, gap), last=step == len(before) + len(gaps))
        if rule.problem:
            return step, rule
    return 0, rule


@pytest.mark.parametrize(
    ("dtype", "gaps", "stops"),
    [
        ("float32", [1.2e-5, 1.1e-2, 1.2e-2, 1.2e-2], 3),  # a head that keeps its first weights
        ("float32", [4.7e-7, 8.6e-2], 2),
        ("float32", [4.9e-7, 0.78, 1.01], 2),  # experts that are noise
        ("float32", [1.0, 1.0], 1),
        ("bfloat16", [0.008, 1.0], 2),
        ("bfloat16", [0.004, 0.3, 0.3, 0.01], 3),
        ("float32", [1e-5, 9e-3, 1e-5, 9e-3, 1e-5], 0),  # once may be one odd sample
        ("float32", [1e-5, 3e-5, 8e-5, 1e-4, 3e-4], 0),
        ("float32", [0.0, 0.0, 2e-6], 0),
        ("float32", [2e-3, 4e-3, 9e-3, 2e-2], 0),  # a GPU's level, as at the start
        ("bfloat16", [0.02, 0.04, 0.015, 0.06], 0),
        ("float16", [0.001, 0.004, 0.01, 0.02], 0),
    ],
)
def test_what_no_rounding_explains_ends_the_run(dtype: str, gaps: list[float], stops: int) -> None:
    step, rule = judged(dtype, gaps)
    assert step == stops
    assert ("The rollout does not run the trained weights" in rule.problem) == bool(stops)


def test_a_resumed_run_has_the_level_of_step_1() -> None:
    assert judged("float32", [2e-2, 2e-2, 2e-2], before=[1e-5, 1e-5])[0] == 4
    assert judged("float32", [2e-2, 2e-2, 2e-2], before=[1e-3, 2e-3])[0] == 0
    assert judged("float32", [2e-2, 2e-2, 2e-2])[0] == 0


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
