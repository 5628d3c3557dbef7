"""Tasks, figures and conclusions of `specactor demo`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.bench import demo
from specactor_ray.bench.demo import pieces, plan_steps, similarity, training_figures
from specactor_ray.bench.rollout_modes import figures_of, merged, with_ratios
from specactor_ray.cli.demo import conclusion, show
from specactor_ray.config import load_config
from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout.prompts import read_jsonl
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.trainer.rewards import RewardSample
from specactor_ray.transport.messages import RequestStats
from tests.fakes.trajectories import trajectory

Round = tuple[dict[str, Any], dict[str, Any]]


def one_round(requests: int, identical: int, tokens: int, plain_s: float, auto_s: float, row_steps: int) -> Round:
    def measured(mode: str, seconds: float, row_steps: int, differing: int) -> dict[str, Any]:
        metrics = RolloutMetrics(row_steps=row_steps, committed_tokens=tokens)
        facts = {"variant": mode, "mode": mode, "batch": 1, "workload": "edits T=0", "differences": [{}] * differing}
        return facts | figures_of(requests, tokens, seconds, metrics)

    return measured("plain", plain_s, tokens, 0), measured("auto", auto_s, row_steps, requests - identical)


def record(step: int, reward: float | None) -> dict[str, Any]:
    train = {"reward_mean": reward, "reward_std": None if reward is None else 0.2, "sampled": 16}
    speed = {"acceptance_length": 1.0 + step / 10, "by_method": {"suffix": [10, 4]}, "rollout_share": 0.1 * step}
    return {"step": step, "train": train, "speed": speed}


ROUNDS = (one_round(3, 3, 300, 6.0, 3.0, 150), one_round(3, 2, 100, 2.0, 1.0, 50))
HELD_OUT = [[("x = 1", 0.5), ("y", 0.1)], [("x = 2", 1.0), ("x = 2", 1.0)]]


def report(rounds: Any = ROUNDS, **fields: Any) -> dict[str, Any]:
    results = with_ratios(merged([one for pair in rounds for one in pair]))
    return {"model": "m", "seconds": 1.0, "load": 4.0, "results": results, "training": None} | fields


def test_figures_of_steps() -> None:
    training = training_figures([record(1, 0.25), record(2, 0.5)], HELD_OUT)
    assert training is not None
    assert training["rewards"] == [(0.25, 0.05), (0.5, 0.05)] and training["acceptance_rate"] == 0.4
    assert training["rollout_share"] == pytest.approx(0.15)
    assert training["held_out"] == [(pytest.approx(0.3), pytest.approx(0.2)), (1.0, 0.0)]
    assert training_figures([]) is None


@pytest.mark.parametrize(("width", "terminal"), [(80, False), (100, True)])
def test_the_last_screen(width: int, terminal: bool) -> None:
    example = {"prompt": "Rename it.\n\ndef f():", "pieces": [("def", False), (" g():\n", True), ("pass", False)]}
    training = training_figures([record(1, 0.25), record(2, 0.5)], HELD_OUT)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    show(console, report(example=example, training=training))
    for words in (
        "plain 50.0 tokens/s auto 100.0 tokens/s auto / plain 2.00 (95%: 2.00 to 2.00) in 2 rounds",
        "acceptance length 2.00",
        "5 of 6",
        "0.25 ± 0.05 to 0.50 ± 0.05",
        "0.30 ± 0.20 to 1.00 ± 0.00",
        "40%; acc",
        "rollout takes 15% of",
    ):
        assert words in " ".join(out.getvalue().split())
    for words in ("'x = 1' 0.50 -> 'x = 2' 1.00", "\x1b[32m g():" if terminal else "def[ g():"):
        assert words in out.getvalue()
    table = out.getvalue().partition("demo: m")[2].partition("1 outputs differ")[0]
    assert "…" not in table and (terminal or max(map(len, table.splitlines())) <= width)


@pytest.mark.parametrize("steps", [[], [record(1, None)]])
def test_a_screen_without_training_or_rewards(steps: list[dict[str, Any]]) -> None:
    out = io.StringIO()
    show(Console(file=out, width=100), report(training=training_figures(steps), example=None))
    assert "auto / plain" in out.getvalue() and "reward" not in out.getvalue()


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (ROUNDS, "1 outputs differ"),
        ([one_round(1, 1, 100, 1.0, 2.0, 60), one_round(1, 1, 100, 2.0, 1.1, 60)], "too noisy to tell ("),
        ([one_round(1, 1, 100, 2.0, 1.0, 50)] * 5, "drafts pay (2.00 of plain decoding"),
    ],
)
def test_the_conclusion(rounds: list[Round], words: str) -> None:
    found = conclusion(report(rounds)).removeprefix("for edits at T=0, batch 1, auto: ")
    assert found.startswith(words)
    assert ("load average 4.0" in found) == ("noisy" in words) == ("--minutes 6" in found)


@pytest.mark.parametrize(
    ("step_s", "left_s", "steps"), [(5.0, 49.0, 10), (5.0, 50.0, 11), (1.0, 500.0, 12), (60.0, 9.0, 2), (5.0, -9.0, 2)]
)
def test_steps_fit_into_the_time(step_s: float, left_s: float, steps: int) -> None:
    assert plan_steps(step_s, left_s, 12) == steps
    assert steps in (2, 12) or (steps - 1) * step_s <= left_s < steps * step_s


def test_pieces_of_an_output() -> None:
    texts = {10: "def", 11: " g", 12: "():", 13: "é"}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(texts[one] for one in ids))
    stats = RequestStats(steps=2, drafted=4, accepted=2)
    output = trajectory((10, 11, 12, 13), text="def g():é", steps=(1, 3), stats=stats)
    assert pieces(output, tokenizer) == [("def", False), (" g():", True), ("é", False)]


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "interrupted"), (SpecActorError("x"), "failed")])
def test_what_was_measured_before_an_end_is_reported(
    error: BaseException, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(work: demo.Demo) -> None:
        work.bench.measured += ROUNDS[0]
        raise error

    monkeypatch.setattr(demo, "_run", run)
    found = demo.run_demo(demo.Demo("m", 1.0, tmp_path / "out", Console(file=io.StringIO())))
    assert found["status"] == status and found["results"][1]["identical"] == 3 and found["training"] is None
    assert json.loads((tmp_path / "out" / demo.REPORT_FILE).read_text())["status"] == status


def test_the_answer_of_a_task_is_worth_most() -> None:
    config = load_config("train_demo")
    tasks = [row for _, row in read_jsonl(str(config.data.path))]
    assert config.data.limit == config.trainer.prompts_per_step == len(tasks) / 2, "the others are held out"
    assert len({task["prompt"] for task in tasks}) == len(tasks)
    for task in tasks:
        asked = task["prompt"].splitlines()[1].removesuffix(" ->")
        assert similarity(RewardSample("", f" {task['answer']}\nand more", task["answer"])) == 1.0
        assert 0.0 < similarity(RewardSample("", asked, task["answer"])) < 1.0
