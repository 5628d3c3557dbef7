"""`specactor demo` from end to end on a tiny model, in as little time as it takes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.config import load_config
from specactor_ray.runs.training import open_run
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve
from specactor_ray.trainer.run import checked_tasks, prepared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).resolve().parents[2]


def test_both_halves_and_their_report(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COLUMNS"))}
    program = [sys.executable, "-m", "specactor_ray.cli.main", "demo", "--model", str(tiny_model_dir)]
    done = subprocess.run(
        [*program, "--minutes", "0.01", "--output", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        env={**clean, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (plain, auto), training = report["results"], report["training"]
    assert [len(one["rounds"]) for one in (plain, auto)] == [3, 3]
    assert plain["identical"] == auto["identical"] == auto["requests"] == 6
    assert auto["interval"][0] <= auto["ratio"] <= auto["interval"][1] <= auto["metrics"]["acceptance_length"] + 1e-4
    assert training["steps"] == len(training["rewards"]) == 2 and training["samples"] == 16
    assert [len(outputs) for outputs in training["answers"]] == [16, 16] and report["example"]["pieces"]
    for words in (
        "round 3: plain",
        "GRPO",
        ": 2 steps in the time left",
        "step 2/2: reward",
        "training: 100%, step 2/2",
    ):
        assert words in done.stderr
    assert done.stderr.count("starting Ray\n") == 1
    assert "6 of 6" in done.stdout and "in 2 steps of 16 samples" in done.stdout and "-0.0" not in done.stdout
    train = next(line for line in done.stdout.splitlines() if "specactor train " in line)
    _, command, option, file, *overrides = shlex.split(train)
    assert (command, option) == ("train", "--config")
    monkeypatch.chdir(tmp_path)
    resolved = resolve(prepared(load_config(Path(file), overrides)), Machine.here(), trains=True)
    with contextlib.closing(open_run(resolved.config, checked_tasks(resolved).size)) as run:
        assert run.state.step == 2 and run.checkpoint is not None, "the printed command continues this run"
