"""Evaluation during training: what is held out, what is refused before the start, and that evaluations are equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.config import Config, load_config
from specactor_ray.config.load import from_mapping
from specactor_ray.config.training_schema import RewardFunctionConfig
from specactor_ray.core.errors import UserError
from specactor_ray.runs.records import drop_repeated, read_records
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.figures import evaluation_figures
from specactor_ray.trainer.run import checked_tasks, prepared
from tests.tiny import tiny_target
from tests.unit.trainer.test_experience import FIRST, SECOND, SEED, Scripted, maker_of

GYM = "data.path=reasoning_gym:chain_sum"
ONE_DIGIT = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"


def settings(tmp_path: Path, *overrides: str) -> Config:
    """Training on the prompts 0 to 99, with other files to evaluate on."""
    long = "word " * 600
    files: dict[str, list[Any]] = {
        "train": [{"prompt": f"Say {number}.", "answer": number} for number in range(100)],
        "held": [{"prompt": f"Say {number}.", "answer": number} for number in range(97, 103)],
        "unanswered": [{"prompt": "Say 1.", "answer": 1}, {"prompt": "Say 2."}],
        "unlike": [{"question": "Say 1.", "answer": 1}],
        "long": [{"prompt": long, "answer": 1}] * 3,
        "some": [{"prompt": long, "answer": 1}, {"prompt": "Say 300.", "answer": 300}],
        "empty": [],
        "number": [1],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "torn.jsonl").write_text('{"prompt": ')
    base = ["mode=plain", f"run.dir={tmp_path / 'runs'}", "data.n=4", "target.kv_cache_gb=0.05"]
    base += [f"data.path={tmp_path / 'train.jsonl'}", f"target.model={tiny_target()}", "target.max_model_len=256"]
    return load_config(None, [*base, *(one.replace("TMP", str(tmp_path)) for one in overrides)])


def evaluated(tmp_path: Path, *overrides: str) -> tuple[list[Task], Any]:
    """Held-out tasks, and the stream of the training's."""
    config = resolve(prepared(settings(tmp_path, *overrides)), Machine(2)).config
    stream = checked_tasks(resolve(config, Machine(2)))
    return stream.held_out, stream


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("evaluation.path=TMP/none.jsonl", "^evaluation.path: there is no file .*none.jsonl"),
        ("evaluation.path=TMP/empty.jsonl", "^evaluation.path: .*empty.jsonl has no tasks"),
        ("evaluation.path=TMP/torn.jsonl", "^evaluation.path: .*torn.jsonl, line 1: not valid JSON"),
        ("evaluation.path=TMP/number.jsonl", "^evaluation.path: .*number.jsonl, line 1: expected an object"),
        ("evaluation.path=TMP/unlike.jsonl", "^evaluation.path: .*no key 'prompt' .*question"),
        ("evaluation.path=TMP/unanswered.jsonl", "^evaluation.path: .*line 2 has no 'answer' .*exact_match"),
        ("evaluation.path=TMP/long.jsonl", "^evaluation.path: none of the 3 prompts .*line 1, has .*max_model_len"),
        ("evaluation.path=reasoning_gym:nothing", "^evaluation.path: reasoning-gym has no task 'nothing'"),
        (
            "evaluation.path=reasoning_gym:chain_sum evaluation.options={terms:9}",
            "^evaluation.path: data.options: chain_sum refus",
        ),
        ("evaluation.path=TMP/held.jsonl evaluation.share=0.1", "^evaluation.path: .*evaluation.share"),
        ("evaluation.share=1.0", "^evaluation.share: 1.0 is out of range.*below 1"),
        (f"{GYM} data.limit=9 evaluation.share=0.000001", "^evaluation.share: .* holds out none of the 9 .* larger"),
        (f"{GYM} data.limit=9 evaluation.share=0.999999", "data: none of the 9 .*held out .evaluation.share"),
        ("evaluation.share=0.999", "^evaluation.share: 0.999 of the 100 prompts .* none to train on.* smaller"),
        ("evaluation.share=0.1 evaluation.temperature=0 evaluation.n=2", "^evaluation.n: 2 samples .*equal"),
        (f"{GYM} evaluation.path=TMP/held.jsonl", "^reward.functions: reasoning_gym .*held.jsonl"),
    ],
)
def test_what_is_refused_before_anything_starts(overrides: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        evaluated(tmp_path, *overrides.split(" "))


def test_prompts_that_are_trained_on_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So are those that do not fit; neither ends the run."""
    assert [task.answer for task in evaluated(tmp_path, "evaluation.path=TMP/held.jsonl")[0]] == [
        *("97", "98", "99", "100", "101", "102")
    ]
    assert "evaluation.path: 3 of 6 prompts are in data.path, too" in caplog.text
    caplog.clear()
    assert [task.index for task in evaluated(tmp_path, "evaluation.path=TMP/some.jsonl")[0]] == [1]
    assert "evaluation.path: 1 of 2 tasks are skipped (the first: " in caplog.text and "too" not in caplog.text
    assert len(evaluated(tmp_path, "evaluation.path=TMP/held.jsonl", "evaluation.limit=2")[0]) == 2
    assert evaluated(tmp_path)[0] == []


@pytest.mark.parametrize(
    "data", [("evaluation.limit=null",), (GYM, f"data.options={ONE_DIGIT}", "data.limit=600", "evaluation.limit=null")]
)
def test_a_held_out_share_is_never_trained_on(data: tuple[str, ...], tmp_path: Path) -> None:
    """Also where a generator makes the same prompt many times. Another seed holds out others."""
    sets = list[set[str]]()
    for seed in (1, 1, 2):
        tasks, stream = evaluated(tmp_path, *data, "evaluation.share=0.2", f"evaluation.seed={seed}")
        held = {str(task.prompt) for task in tasks}
        size = len({str(stream.source[index].prompt) for index in range(stream.size)})
        assert len(held) == len(tasks) and (0.1 * size < len(held) < 0.35 * size if GYM in data else len(held) == 20)
        trained = {str(task.prompt) for task in stream.take(stream.size)}
        assert not held & trained and len(held | trained) == size and stream.skipped == 0
        sets.append(held)
    assert sets[0] == sets[1] != sets[2]


def test_evaluations_are_equal_whatever_was_trained_between(tmp_path: Path) -> None:
    """Seeds and temperature are their own, so are tasks; those of the training go on where they were. Outputs without a
    reward are counted."""
    section = {"path": "held.jsonl", "n": 2, "temperature": 0.5, "seed": 3}
    sections = {"data": {"n": 2}, "trainer": {"prompts_per_step": 1}, "evaluation": section}
    config = from_mapping({"mode": "plain", **sections})
    config.reward.functions = [RewardFunctionConfig("tests.fakes.reward_functions:number_or_raises")]
    maker = maker_of(config, [Task(index, "a") for index in range(9)])
    maker.stream.held_out = [Task(0, "b"), Task(4, "c"), Task(5, "d")]
    rollouts = [Scripted("1 0", "x 1", "! x", seed=3) for _ in range(2)]
    found = [evaluation_figures(maker.evaluate(rollouts[0]), 1.0)]
    sampling, seeds = replace(config.sampling, seed=SEED), enumerate((FIRST, SECOND))
    steps = [maker.collect(Scripted("1 1", seed=seed), sampling, step) for step, seed in seeds]
    found.append(evaluation_figures(maker.evaluate(rollouts[1]), 1.0))
    assert found[0] == found[1] and rollouts[0].asked == rollouts[1].asked
    assert {one.temperature for one in rollouts[0].asked} == {0.5} and len(rollouts[0].asked) == 6
    assert [step.position for step in steps] == [(1, 0), (2, 0)]
    assert {name: found[0][name] for name in ("scored", "samples", "mean", "pass@1", "pass@2", "standard_error")} == {
        "scored": 3,
        "samples": 5,
        "mean": 2 / 3,
        "pass@1": 0.75,
        "pass@2": 1.0,
        "standard_error": 0.25,
    }
    (reason, count), *others = found[0]["failures"]["reward"].items()
    assert "no number" in reason and count == 2 and not others and found[0]["failures"]["rollout"] == {"lost": 1}


def test_a_resumed_run_repeats_whole_lines_only(tmp_path: Path) -> None:
    """After step 4, whose evaluation was not made: the last one is that of step 2."""
    for name in ("metrics", "evaluations", "completions"):
        rows = [{"step": step, "kind": kind} for step in (2, 4, 6) for kind in ("train", "evaluation")]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '[1]\n{"step": 2, "')
    drop_repeated(tmp_path, 4, 2)
    kept = read_records(tmp_path / "completions.jsonl")
    assert [(row["step"], row["kind"]) for row in kept] == [(2, "train"), (2, "evaluation"), (4, "train")]
    assert [row["step"] for row in read_records(tmp_path / "evaluations.jsonl")] == [2, 2]
    drop_repeated(tmp_path, 0, -1)
    assert not read_records(tmp_path / "completions.jsonl") and not read_records(tmp_path / "evaluations.jsonl")
