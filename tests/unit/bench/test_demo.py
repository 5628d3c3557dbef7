"""Tasks, figures and conclusions of `specactor demo`."""

from __future__ import annotations

import io
import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.bench import demo
from specactor_ray.bench.demo import answer, pieces, plan_steps, similarity, training_figures
from specactor_ray.bench.rollout_modes import figures_of, merged, with_ratios
from specactor_ray.cli.demo import conclusions, show
from specactor_ray.config import load_config
from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout.prompts import read_jsonl
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.trainer.rewards import RewardSample
from specactor_ray.transport.messages import RequestStats
from tests.fakes.trajectories import trajectory

Round = tuple[dict[str, Any], dict[str, Any]]
works = count()


def one_round(requests: int, identical: int, tokens: int, plain_s: float, auto_s: float, row_steps: int) -> Round:
    def measured(mode: str, seconds: float, row_steps: int, differing: int) -> dict[str, Any]:
        metrics = RolloutMetrics(row_steps=row_steps, committed_tokens=tokens)
        facts = {"variant": mode, "mode": mode, "batch": 1, "workload": "edits T=0", "differences": [{}] * differing}
        facts |= {"work": next(works), "best_length": None}
        return facts | figures_of(requests, tokens, seconds, metrics)

    return measured("plain", plain_s, tokens, 0), measured("auto", auto_s, row_steps, requests - identical)


def record(step: int, reward: float | None) -> dict[str, Any]:
    train = {"reward_mean": reward, "reward_std": None if reward is None else 0.2, "sampled": 16}
    speed = {"acceptance_length": 1.0 + step / 10, "by_method": {"suffix": [10, 4]}, "rollout_share": 0.1 * step}
    return {"step": step, "train": train, "speed": speed}


ROUNDS = (one_round(3, 3, 300, 6.0, 3.0, 150), one_round(3, 2, 100, 2.0, 1.0, 50))
TASKS = [{"prompt": "a = 1 -> b = 1\na = 2 ->", "answer": "b = 2"}, {"prompt": "c ->", "answer": "d"}]
ANSWERS = [
    [answer(task, text) for task, text in zip([TASKS[0], *TASKS], texts, strict=True)]
    for texts in (("a = 2\nand more", "b = 2", "\x1b"), ("b = 2", "b = 2", "d"))
]


def report(rounds: Any = ROUNDS, **fields: Any) -> dict[str, Any]:
    results = with_ratios(merged([one for pair in rounds for one in pair]))
    facts = {"model": "m", "minutes": 1.0, "seconds": 62.0, "load": 4.0, "cores": 2, "training": None, "example": None}
    return facts | {"results": results} | fields


def test_figures_of_steps() -> None:
    training = training_figures([record(1, 0.25), record(2, 0.5)], ANSWERS)
    assert training is not None
    assert training["rewards"] == [(0.25, 0.05), (0.5, 0.05)] and training["acceptance_rate"] == 0.4
    assert training["rollout_share"] == pytest.approx(0.15)
    assert training["held_out"] == [(pytest.approx(0.6), pytest.approx(0.3055, abs=1e-3)), (1.0, 0.0)]
    assert training["gain"] == (pytest.approx(0.4), pytest.approx(0.3055, abs=1e-3))
    assert training_figures([record(1, 0.25)], ANSWERS[:1])["gain"] is None  # type: ignore[index]
    assert training_figures([]) is None


@pytest.mark.parametrize(
    ("width", "colours", "no_color", "marked"),
    [(80, None, False, "def« g():"), (100, "standard", False, "\x1b[32m g():"), (80, "standard", True, "def« g():")],
)
def test_the_last_screen(width: int, colours: Any, no_color: bool, marked: str) -> None:
    example = {"prompt": "Rename it.\n\ndef f():", "pieces": [("def", False), (" g():\n", True), ("pass", False)]}
    training = training_figures([record(1, 0.25), record(2, 0.5)], ANSWERS)
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colours is not None, color_system=colours, no_color=no_color
    )
    show(console, report(example=example, training=training))
    for words in (
        "plain 50.0 tokens/s auto 100.0 tokens/s auto / plain 2.00 (95%: 2.00 to 2.00) in 2 rounds",
        "acceptance length 2.00",
        "5 of 6",
        "4.0 on 2 cores",
        "0.25 ± 0.05 to 0.50 ± 0.05",
        "0.60 ± 0.31 to 1.00 ± 0.00",
        "right answers to them 1 to 3 of 3",
        "40%; acc",
        "rollout takes 15% of",
    ):
        assert words in " ".join(out.getvalue().split())
    lines = [
        "  a = 1 -> b = 1; a = 2 ->",
        "    expected  b = 2",
        "    before    a = 2  (wrong)",
        "    after     b = 2  (right)",
        "  c ->",
        "    expected  d",
        "    before    \\x1b  (wrong)",
        "    after     d  (right)",
    ]
    assert "\n".join(lines) in out.getvalue() and marked in out.getvalue()
    table = out.getvalue().partition("demo: m")[2].partition("±: standard")[0]
    assert "…" not in table and (colours or max(map(len, table.splitlines())) <= width)


@pytest.mark.parametrize("steps", [[], [record(1, None)]])
def test_a_screen_without_training_or_rewards(steps: list[dict[str, Any]]) -> None:
    out = io.StringIO()
    show(Console(file=out, width=100), report(training=training_figures(steps)))
    assert "auto / plain" in out.getvalue() and "reward" not in out.getvalue()


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (ROUNDS, "1 outputs differ"),
        ([one_round(1, 1, 100, 1.0, 2.0, 60), one_round(1, 1, 100, 2.0, 1.1, 60)], "not conclusive: "),
        ([one_round(1, 1, 100, 2.0, 1.0, 50)] * 5, "drafts pay: 2.00 times as fast as plain decoding"),
    ],
)
def test_the_conclusion(rounds: list[Round], words: str) -> None:
    first, *others = conclusions(report(rounds))
    assert first.removeprefix("for edits at T=0, batch 1, auto: ").startswith(words)
    same = ["All outputs are token for token those of plain decoding"]
    more = "The load average was 4.0 on 2 cores; scripts/demo --minutes 6 --skip-training has time for more rounds"
    assert others == {"1": [], "n": [*same, more], "d": same}[words[0]]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((0.3, 0.1), "training: answers came closer to the right ones: reward +0.30 ± 0.10 on"),
        ((0.1, 0.1), "training: no change that shows: reward +0.10 ± 0.10"),
        ((-0.1, 0.1), "training: no change that shows: reward -0.10 ± 0.10"),
        ((-0.3, 0.1), "training: answers came further from the right ones: reward -0.30 ± 0.10"),
    ],
)
def test_the_conclusion_of_the_training(gain: tuple[float, float], words: str) -> None:
    assert [*conclusions(report(training={"gain": gain, "steps": 2}))][-1].startswith(words)


@pytest.mark.parametrize(
    ("done", "step_s", "left_s", "steps"),
    [
        (1, 5.0, 52.0, 9),
        (1, 5.0, 52.5, 10),
        (4, 5.0, 22.5, 7),
        (4, 5.0, 12.4, 4),
        (4, 5.0, -9.0, 4),
        (1, 1.0, 500.0, 12),
        (1, 60.0, 9.0, 2),
        (1, 5.0, -9.0, 2),
    ],
)
def test_steps_fit_into_the_time(done: int, step_s: float, left_s: float, steps: int) -> None:
    assert plan_steps(done, step_s, left_s, 12) == steps
    assert steps in (2, 12, done) or (steps - done + 1.5) * step_s <= left_s < (steps - done + 2.5) * step_s


def test_the_conclusion_says_that_it_took_longer() -> None:
    assert [*conclusions(report(seconds=64.0))][-1].startswith("It took 64 s in place of 60 s: ")


@pytest.mark.parametrize(
    ("speeds", "ago_s", "rounds", "stopped"),
    [
        ([19.0, 20.0, 21.0] * 4, 0.0, 5, "enough for this interval"),
        ([10.0, 20.0, 40.0, 10.0, 20.0, 40.0], 1e5, 3, "then the time was over"),
        ([10.0, 20.0, 40.0, 10.0, 20.0, 40.0, *[20.0] * 900], 0.0, 900, "enough for this interval"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_rounds_until_they_suffice(
    speeds: list[float], ago_s: float, rounds: int, stopped: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_EXAMPLE", -1)
    out = io.StringIO()
    work = demo.Demo("m", 1000.0, Path("out"), Console(file=out, width=200), trains)
    work.began -= ago_s
    given = iter(speeds)
    for number, workload in enumerate(demo._rounds(work)):
        assert len(workload.prompts) == 2
        work.bench.measured += one_round(2, 2, 100, 10.0, 100.0 / next(given), 50 + number % 2)
    assert work.bench.stopped == stopped
    assert (len(work.bench.measured) == 2 * rounds) if rounds < 9 else (10 < len(work.bench.measured) < 2 * rounds)
    line = out.getvalue().splitlines()[2]
    assert "round 3: plain 10.0, auto " in line and "tokens/s; auto / plain until now " in line and "(95%: " in line
    assert f"{rounds} rounds, {stopped})" in work.results[1]["verdict"] or rounds > 9


@pytest.mark.parametrize("tokens", [(0, 0, 0), (0, 100, 0)])
def test_rounds_without_tokens_end_with_the_time(tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_EXAMPLE", -1)
    work = demo.Demo("m", 1000.0, Path("out"), Console(file=io.StringIO()))
    work.began -= 1e5
    for _, number in zip(demo._rounds(work), [*tokens, *tokens], strict=False):
        work.bench.measured += one_round(2, 2, number, 10.0, 10.0, number)
    assert len(work.bench.measured) == 6 and work.bench.stopped == "then the time was over"
    assert next(conclusions(report() | {"results": work.results}))


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
