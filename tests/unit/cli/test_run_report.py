"""`specactor report`: runs that ended, run, or were killed, from their files alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specactor_ray.cli import training_plot
from specactor_ray.cli.main import app
from specactor_ray.cli.report import sparkline
from specactor_ray.cli.run_files import read_run
from specactor_ray.cli.training_plot import moving_mean
from specactor_ray.core.errors import InputError
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.runs.folder import RunLease


def record(step: int, reward: float | None = None, step_s: float = 10.0, **changed: Any) -> dict[str, Any]:
    """A step of 100 tokens at 50 a second."""
    return {
        "step": step,
        "train": {"reward_mean": step / 100 if reward is None else reward, "length_mean": 20.0, "skipped": 0.0},
        "speed": {
            "tokens": 100,
            "generated_tokens": 100,
            "tokens_per_s": 50.0,
            "acceptance_length": 2.0,
            "by_method": {"suffix": [80, 60], "eagle": [20, 5]},
        },
        "seconds": {"rollout": 2.0, "update": 6.0, "sync": 1.0, "step": step_s},
        "timeline": {"rollout": [0.5, 2.5], "update": [2.5, 8.5], "sync": [8.5, 9.5]},
        "failures": {"reward": {}, "rollout": {}},
        **changed,
    }


def evaluation(step: int, mean: float | None) -> dict[str, Any]:
    return {"step": step, "mean": mean, "pass@1": mean, "pass@10": mean and mean + 0.1, "standard_error": 0.02}


def training(folder: Path, steps: int = 30, end: str = "", **changed: Any) -> Path:
    """Files of a training without a summary; `end`: what its metrics end with."""
    folder.mkdir(parents=True)
    rows = [record(step, **changed) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    judged = [evaluation(0, 0.25), evaluation(10, 0.5), evaluation(20, 0.4)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    (folder / "config.yaml").write_text("trainer: {steps: 60}\ncheckpoint: {dir: null}\n")
    return folder


def write_weights(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "weights" / "config.json").write_text("{}")


def run_report(*arguments: object) -> Any:
    # Without the width of the terminal in which the tests run.
    return CliRunner(env={"COLUMNS": None}).invoke(app, ["report", *map(str, arguments)])


def test_a_killed_training_has_table_curve_timeline_plot_and_its_best_checkpoint(tmp_path: Path) -> None:
    folder = training(tmp_path / "my runs" / "r", end='{"step": 31, "tra')
    store = CheckpointStore(folder / "checkpoints", 3, True)
    for step, mean in ((10, 0.5), (20, 0.4), (30, 0.6)):
        store.save(TrainState(step, evaluation=mean), write_weights)
    (folder / "checkpoints" / "step-000030" / "weights" / "config.json").unlink()  # a damaged one is no best one
    done = run_report("r", "--run-dir", folder.parent)
    assert done.exit_code == 0, done.output
    table = done.stdout.partition("reward by step")[0]
    lines = {line.strip().partition("  ")[0]: line for line in table.splitlines()}
    assert "30 of 60, killed" in lines["steps"]
    assert "0.010 first, 0.300 last, 0.300 best (step 30)" in lines["reward"]
    assert "0.250 first (step 0), 0.400 last (step 20), 0.500 best (step 10)" in lines["evaluation"]
    assert "0.600 best (step 10)" in lines["evaluation, pass@10"]
    assert "suffix 75.0% of 2,400, eagle 25.0% of 600" in lines["drafts right"]
    assert "50.0" in lines["tokens/s"] and "2.00" in lines["acceptance length"] and "20%" in lines["rollout"]
    assert "update 180 (60%), rollout 60 (20%), sync 30 (10%)" in lines["seconds"]
    assert "▁" in done.stdout and "0.010 to 0.300" in done.stdout
    assert f"target.model='{folder}/checkpoints/step-000010/weights' data.path=" in done.stdout
    plot = folder / "training.png"
    assert f"plot: {plot}" in done.stdout and plot.read_bytes().startswith(b"\x89PNG")


def test_the_timeline_is_that_of_the_slowest_step_or_of_the_one_that_is_named(tmp_path: Path) -> None:
    folder = training(tmp_path / "r", steps=3)
    rows = [record(1), record(2, step_s=30.0), record(3, timeline={"rollout": [0.0, 4.0], "update": [4.0, 8.0]})]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "new" / "p.png"
    assert "step 2\n" in run_report(folder, "--output", output).stdout.replace(" \n", "\n").replace("  ", "")
    assert output.exists() and not (folder / "training.png").exists()
    bars = run_report(folder, "--step", 3).stdout.splitlines()
    begins = {line.split()[0]: line.index("=") for line in bars if "====" in line}
    assert begins["update"] - begins["rollout"] == 24 and sum(line.count("=") for line in bars) == 48
    for arguments in ((folder, "--step", 9), (folder, training(tmp_path / "s"), "--step", 1)):
        assert isinstance(run_report(*arguments).exception, InputError)


def test_a_run_in_use_is_running_and_one_with_a_summary_has_its_figures(tmp_path: Path) -> None:
    """The summary also has records that the disk refused."""
    folder = training(tmp_path / "r")
    lease = RunLease(folder)
    assert read_run(folder).status == "running"
    lease.release()
    assert read_run(folder).status == "killed"
    found = read_run(folder, {"status": "complete", "results": {"last_reward": 0.9}})
    assert (found.status, found.results["last_reward"], found.results["first_reward"]) == ("complete", 0.9, 0.01)
    (folder / "summary.json").write_text('{"status": "interrupted"}')
    assert read_run(folder).status == "interrupted"


def test_several_trainings_are_drawn_over_each_other(tmp_path: Path) -> None:
    first, second = training(tmp_path / "$a^{$"), training(tmp_path / "b", reward=0.7)
    done = run_report(first, second, first)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if "killed" in line]
    assert [(row[0], row[2], row[5]) for row in rows] == [("$a^{$", "30", "0.300"), ("b", "30", "0.700")]
    assert (first / "trainings.png").exists() and not (first / "training.png").exists()


def test_panels_have_names_units_and_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []

    def draw(file: Path, *panels: Any, **options: Any) -> str:
        drawn[:] = [Figure().subplots() for _ in panels]
        for axes, panel in zip(drawn, panels, strict=True):
            panel(axes)
        return ""

    monkeypatch.setattr(training_plot, "write_plot", draw)
    runs = [read_run(training(tmp_path / name)) for name in "ab"]
    training_plot.plot_training(runs[0], runs[0].step(7), tmp_path / "p.png")
    assert all(axes.get_title() and axes.get_xlabel() for axes in drawn)
    rewards, acceptance, lengths, _, seconds, timeline = drawn
    dots, mean = rewards.lines[:2]
    assert list(dots.get_ydata()) == [step / 100 for step in range(1, 31)] and "mean of 5 steps" in mean.get_label()
    assert [list(line.get_ydata()) for line in rewards.lines[2:]] == [[0.25, 0.5, 0.4]]
    assert {line.get_label(): set(line.get_ydata()) for line in acceptance.lines} == {"suffix": {0.75}, "eagle": {0.25}}
    assert set(lengths.lines[0].get_ydata()) == {20.0} and set(seconds.lines[0].get_ydata()) == {10.0}
    assert seconds.get_legend_handles_labels()[1] == ["rollout", "update", "sync", "whole step"]
    assert [round(bar.get_width(), 3) for bar in timeline.patches] == [1.0, 6.0, 2.0], "the first phase on top"
    training_plot.plot_trainings(runs, tmp_path / "p.png")
    assert all(axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in drawn)
    assert all({"a", "b"} <= {label[0] for label in axes.get_legend_handles_labels()[1]} for axes in drawn)


def test_a_single_step_and_steps_without_figures_are_drawn(tmp_path: Path) -> None:
    empty = {"reward_mean": None, "length_mean": None}
    folder = training(tmp_path / "r", steps=1, train=empty, timeline={})
    (folder / "evaluations.jsonl").unlink()
    done = run_report(folder)
    assert done.exit_code == 0, done.output
    assert "- first, - last, - best (step -)" in done.stdout and "evaluation" not in done.stdout
    assert (folder / "training.png").exists()


def test_without_matplotlib_or_room_the_tables_stand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = training(tmp_path / "r")
    (folder / "training.png").mkdir()
    done = run_report(folder)
    assert (
        done.exit_code == 0 and f"no plot: {folder / 'training.png'} cannot be written (Is a directory)" in done.stdout
    )
    assert not list(folder.glob(".training*"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run_report(folder)
    assert done.exit_code == 0 and "no plot: matplotlib is not installed (pip install matplotlib)" in done.stdout
    assert "30 of 60" in done.stdout


def rollout(folder: Path) -> Path:
    folder.mkdir()
    metrics = RolloutMetrics(drafted_by_position=[], accepted_by_position=[]).to_dict()
    summary = {
        "run": folder.name,
        "status": "complete",
        "config": {"mode": "plain"},
        "metrics": metrics,
        "resumed": 0,
        "tokens": 1234,
        "discarded_tokens": 0,
        "seconds": 10.0,
        "tokens_per_s": 123.4,
        "fallbacks": [],
        "drafters": [],
        "actors": [],
        "trajectories": {"finished": 8, "failed": 1, "total": 9, "tokens": 1234, "failures": {"too long": 1}},
        "output": str(folder / "trajectories.jsonl"),
        "drafts": "drafts: none",
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_rollouts_have_their_table_or_the_number_of_their_trajectories(tmp_path: Path) -> None:
    unfinished = tmp_path / "u"
    unfinished.mkdir()
    (unfinished / "trajectories.jsonl.partial").write_bytes(b'{}\n{}\n{"\xc3')  # cut within a character
    done = run_report(rollout(tmp_path / "r"), unfinished)
    assert done.exit_code == 0, done.output
    assert "rollout r (complete)" in done.stdout and "8 finished, 1 failed, 9 in all" in done.stdout
    assert "1 failed: too long" in done.stdout
    assert "rollout u (killed): 2 trajectories, and no summary yet" in done.stdout


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        ({}, "trainning", "Did you mean training?"),
        ({}, "zzz", "The newest of 1 runs there: training."),
        ({}, "x" * 400, "cannot be read (File name too long)"),
        ({}, "~nosuch/x", "~nosuch/x: there is no home folder for its ~"),
        ({"notes.txt": ""}, "r", "is no folder of a training or of a rollout. Fix: name a folder with metrics.jsonl"),
        ({"config.yaml": ""}, "r", "has no results: no step of it has ended"),
        ({"summary.json": '{"status": "failed", "error": "no GPU"}'}, "r", "no step of it has ended (no GPU)"),
        ({"summary.json": "{"}, "r", "summary.json is damaged"),
        ({"summary.json": '{"status": "complete", "trajectories": 3}'}, "r", "summary.json is not that of a rollout"),
        ({"metrics.jsonl": "{}\nx\n"}, "r", "metrics.jsonl, line 1, is damaged (KeyError"),
        ({"metrics.jsonl": json.dumps(record(1)) + "\nx\n"}, "r", "metrics.jsonl, line 2, is damaged (JSONDecodeError"),
        ({"metrics.jsonl": json.dumps(record(1)) + "\n[]\n"}, "r", "line 2, is damaged (TypeError"),
        ({"metrics.jsonl": json.dumps(record(1, reward="high")) + "\n"}, "r", "line 1, is damaged (TypeError"),  # type: ignore[arg-type]
        ({"metrics.jsonl": json.dumps(record(1)) + "\n", "evaluations.jsonl": '{"step": 1}\n'}, "r", "(KeyError"),
    ],
)
def test_what_is_no_run_or_damaged_is_refused_in_a_line(
    tmp_path: Path, files: dict[str, str], name: str, expected: str
) -> None:
    (tmp_path / "training").mkdir()
    if files:
        (tmp_path / "r").mkdir()
    for file, text in files.items():
        (tmp_path / "r" / file).write_text(text)
    error = run_report(name, "--run-dir", tmp_path, "--output", tmp_path / "new" / "p.png").exception
    assert isinstance(error, InputError) and expected in str(error) and "\n" not in str(error)
    assert not (tmp_path / "new").exists()
    error = run_report(name, "--run-dir", tmp_path, "--output", "x" * 400).exception
    assert isinstance(error, InputError) and "--output: x" in str(error)


def test_half_a_character_at_the_end_of_a_killed_run_and_a_home_in_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    half = json.dumps({"text": "\u00e9"}, ensure_ascii=False).encode()[:-3]
    (tmp_path / "runs" / "r" / "metrics.jsonl").write_bytes(json.dumps(record(1)).encode() + b"\n" + half)
    done = run_report("r", "--run-dir=~/runs", "--output=~/x.png")
    assert done.exit_code == 0 and (tmp_path / "x.png").is_file(), done.output


def test_curves_of_any_length_keep_their_ends() -> None:
    assert sparkline([0.0, 1.0]) == "▁█" and sparkline([3.0] * 4) == "▁▁▁▁"
    for count in (59, 60, 61, 1000):
        line = sparkline([float(number) for number in range(count)])
        assert len(line) == min(count, 60) and (line[0], line[-1]) == ("▁", "█") and list(line) == sorted(line)
    assert moving_mean([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [1.5, 2.0, 3.0, 4.0, 4.5]
    assert moving_mean([1.0, 2.0], 5) == [1.5, 1.5]
