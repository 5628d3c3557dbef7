"""Pairs of steps of a training: whose seconds count for which side, and figures of parts of the run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.bench.train import (
    DRAFTED,
    PLAIN,
    StepPair,
    figures_of,
    judged_between,
    parts_of,
    run_bench,
    supplied_of,
    thirds,
)
from specactor_ray.cli.report import training_pairs_table
from specactor_ray.config.load import from_mapping
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.transport.messages import RequestStats
from tests.refused import refused


def pair(step: int, plain_s: float, drafted_s: float, accepted: int = 50, **changed: Any) -> StepPair:
    stats = RequestStats(100 - accepted, 60, accepted, 0, {"suffix": (60, accepted)})
    judged = {"suffix": [80, accepted]}
    values = {
        "sync_s": {PLAIN: 1.0, DRAFTED: 2.0},
        "stats": stats,
        "judged": judged,
        "supplied": [30.0, 40.0],
        **changed,
    }
    return StepPair(step, (step - 1) / 2, 100, {PLAIN: plain_s, DRAFTED: drafted_s}, **values)


def record(step: int, **seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "train": {"reward_mean": 0.5},
        "seconds": {"update": 10.0, "sync": 4.0, "drafter": 3.0, **seconds},
    }


def test_both_sides_have_the_update_and_the_drafted_one_the_training_of_its_drafter() -> None:
    (step,) = figures_of([pair(1, 8.0, 4.0)], [record(1)])
    assert step["shared_s"] == 10.0 + (4.0 - 1.0 - 2.0)  # the update, and the export of weights
    assert step["plain_step_s"] == 8.0 + 1.0 + 11.0
    assert step["drafted_step_s"] == 4.0 + 2.0 + 11.0 + 3.0
    assert step["acceptance_length"] == 2.0


def test_steps_without_an_update_or_without_new_weights_are_no_pairs() -> None:
    torn = [pair(1, 8.0, 4.0), pair(2, 8.0, 4.0, sync_s={PLAIN: 1.0}), pair(3, 8.0, 4.0)]
    assert [one["step"] for one in figures_of(torn, [record(1), record(2)])] == [1]


def test_parts_add_up_and_compare_step_by_step() -> None:
    pairs = [pair(step, 9.0, 9.0 if step < 3 else 4.5, 50 + step) for step in range(1, 7)]
    steps = figures_of(pairs, [record(step) for step in range(1, 7)])
    assert thirds(6) == [0, 0, 1, 1, 2, 2] and thirds(1) == [0] and thirds(4) == [0, 0, 1, 2]
    parts = parts_of(steps, thirds(6))
    assert [one["steps"] for one in parts] == [[1, 2], [3, 4], [5, 6]]
    assert [one["rollout"]["ratio"] for one in parts] == pytest.approx([1.0, 2.0, 2.0])
    assert parts[2]["step"]["ratio"] == pytest.approx((9 + 12) / (4.5 + 13 + 3), abs=1e-4)
    assert parts[0]["by_method"] == {"suffix": [120, 103]}
    assert parts[0]["judged"] == {"suffix": [160, 103]} and parts[0]["supplied"] == [60.0, 80.0]
    assert parts_of([], []) == []
    console = Console(file=io.StringIO(), width=120)
    console.print(training_pairs_table(parts, "by third"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2.00 (2.00 to 2.00)" in shown and "…" not in shown, "all columns have room"


def test_what_drafters_judged_is_counted_by_method_and_from_new_weights_on_anew() -> None:
    """Draft tokens after right ones: of two tails of 3, `right, wrong, -` and `right, right, right`, 5, and 4 right."""

    def drafter(name: str, method: str, version: int, tried: int, right: int) -> dict[str, Any]:
        return {"id": name, "method": method, "version": version, "tried": tried, "right": right}

    before = [drafter("a", "suffix", 0, 10, 3), drafter("b", "eagle", 1, 50, 20)]
    after = [drafter("a", "suffix", 0, 15, 7), drafter("c", "suffix", 0, 2, 1), drafter("b", "eagle", 2, 6, 3)]
    assert judged_between(before, after) == {"suffix": [7, 5], "eagle": [6, 3]}
    counters = RolloutMetrics(steps=20, suspended_steps=5, row_steps=80, supplied_row_steps=45)
    assert supplied_of(counters) == [45.0, 60.0]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"mode": "plain"}, "mode"),
        ({"drafters": []}, "mode"),
        ({"resume": "auto"}, "resume"),
        ({"trainer": {"max_staleness": 1}}, "trainer.max_staleness"),
    ],
)
def test_what_gives_no_pairs_is_refused(changed: dict[str, Any], key: str) -> None:
    config = from_mapping({"drafters": [{"method": "suffix"}], "data": {"path": "tasks.jsonl", "n": 2}, **changed})
    with refused(key):
        run_bench(config, None, Console())
