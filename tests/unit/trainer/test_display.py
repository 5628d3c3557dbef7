"""The display of a training run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.trainer.display import ALL_COLUMNS, TrainingDisplay

STEP: dict[str, Any] = {
    "step": 3,
    "train": {"reward_mean": 0.125, "reward_std": 0.3, "pass_rate": 0.12, "length_mean": 18.2, "kl": 0.0}
    | {"entropy": 1.1, "loss": -0.01, "grad_norm": 1.2},
    "speed": {"tokens_per_s": 133, "acceptance_length": 1.31, "by_method": {}, "rollout_share": 0.6},
    "seconds": {"rollout": 12.1, "update": 6.0, "sync": 0.3},
}


def test_lines_within_a_step_and_after_it() -> None:
    text = io.StringIO()
    display = TrainingDisplay(Console(file=text, width=200), 4)
    assert display.doing().startswith("starting Ray")
    display.rollout_progress = lambda: (5, 24)
    display.begin(3)
    display.phase("rollout")
    assert display.doing().startswith("step 3/4: rollout 5/24, ")
    display.phase("update")
    assert display.doing().startswith("step 3/4: update, ")
    display.end(STEP)
    assert text.getvalue().startswith("step 3/4: reward 0.125 ±0.30, pass 12%")


@pytest.mark.parametrize(("width", "left_out"), [(60, 10), (80, 9), (110, 5), (160, 0)])
def test_columns_that_do_not_fit_are_left_out(width: int, left_out: int) -> None:
    text = io.StringIO()
    display = TrainingDisplay(Console(file=text, width=width, force_terminal=True, color_system=None), 4)
    with display:
        display.end(STEP)
    shown = [name for name, _ in ALL_COLUMNS if f" {name} " in text.getvalue()]
    assert len(shown) == len(ALL_COLUMNS) - left_out and {"step", "reward", "tok/s"} <= set(shown)
    assert "\u2026" not in text.getvalue()
