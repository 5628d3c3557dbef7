"""Tasks, figures and conclusions of `specactor demo`."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.bench import demo
from specactor_ray.bench.demo import (
    Round,
    ratio_with_error,
    similarity,
    speed_figures,
    training_figures,
)
from specactor_ray.cli.demo import demo_table, verdict
from specactor_ray.config import load_config
from specactor_ray.config.load import find_file
from specactor_ray.core.errors import SpecActorError
from specactor_ray.trainer.rewards import RewardSample


def one_round(requests: int, identical: int, tokens: int, plain_s: float, auto_s: float, row_steps: int) -> Round:
    common = {"requests": requests, "tokens": tokens, "metrics": {"row_steps": row_steps}}
    different = [{}] * (requests - identical)
    return {**common, "seconds": plain_s, "differences": []}, {**common, "seconds": auto_s, "differences": different}


def record(step: int, reward: float) -> dict[str, Any]:
    train = {"reward_mean": reward, "reward_std": 0.2, "sampled": 16}
    return {"step": step, "train": train, "speed": {"acceptance_length": 1.0 + step / 10}}


ROUNDS = (one_round(3, 3, 300, 6.0, 3.0, 150), one_round(3, 2, 100, 2.0, 1.0, 50))


def test_the_ratio_is_that_of_all_turns_and_its_error_grows_with_their_difference() -> None:
    assert ratio_with_error([2.0, 4.0], [1.0, 2.0]) == (2.0, 0.0)
    calm = ratio_with_error([2.0, 2.1, 1.9], [1.0, 1.0, 1.0])[1]
    wild = ratio_with_error([2.0, 3.0, 1.0], [1.0, 1.0, 1.0])[1]
    assert 0.0 < calm < wild == pytest.approx(1.0 / math.sqrt(3))
    assert ratio_with_error([3.0], [2.0]) == (1.5, math.inf)


def test_figures_of_rounds_and_steps() -> None:
    speed, training = speed_figures(ROUNDS), training_figures([record(1, 0.25), record(2, 0.5)])
    assert speed is not None and training is not None
    assert (speed["plain_tokens_per_s"], speed["auto_tokens_per_s"], speed["ratio"]) == (50.0, 100.0, 2.0)
    assert (speed["identical"], speed["requests"], speed["acceptance_length"]) == (5, 6, 2.0)
    assert training["rewards"] == [(0.25, 0.05), (0.5, 0.05)]
    assert speed_figures([]) is None and training_figures([]) is None
    console = Console(file=io.StringIO(), width=100)
    console.print(demo_table({"model": "m", "seconds": 1.0, "speed": speed, "training": training}))
    for words in ("5 of 6", "2.00 ± 0.00", "0.50 ± 0.05 (16 samples)"):
        assert words in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (ROUNDS, "1 outputs differ"),
        ([one_round(1, 1, 100, 1.0, 2.0, 60), one_round(1, 1, 100, 2.0, 1.1, 60)], "auto is as fast as plain"),
        ([one_round(1, 1, 100, 2.0, 1.0, 60)] * 2, "auto is 2.00 times as fast"),
        ([one_round(1, 1, 100, 2.0, 1.0, 60)], "one round only"),
        ([], "nothing was measured"),
    ],
)
def test_the_conclusion_claims_nothing_within_the_error(rounds: list[Round], words: str) -> None:
    assert verdict(speed_figures(rounds)).startswith(words)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "interrupted"), (SpecActorError("x"), "failed")])
def test_what_was_measured_before_an_end_is_reported(
    error: BaseException, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(work: demo.Demo, seconds: float) -> None:
        work.rounds += ROUNDS[:1]
        raise error

    monkeypatch.setattr(demo, "_measure_speed", measure)
    report = demo.run_demo(demo.Demo("m", 1.0, tmp_path / "out", Console(file=io.StringIO())))
    assert report["status"] == status and report["speed"]["identical"] == 3 and report["training"] is None
    assert json.loads((tmp_path / "out" / demo.REPORT_FILE).read_text())["status"] == status


def test_the_answer_of_a_task_is_worth_most() -> None:
    tasks = [json.loads(line) for line in find_file(str(load_config("train_demo").data.path)).read_text().splitlines()]
    assert len(tasks) == load_config("train_demo").trainer.prompts_per_step
    for task in tasks:
        asked = task["prompt"].splitlines()[1].removesuffix(" ->")
        assert similarity(RewardSample("", f" {task['answer']}\nand more", task["answer"])) == 1.0
        assert 0.0 < similarity(RewardSample("", asked, task["answer"])) < 1.0
