"""`specactor demo` from end to end on a tiny model, in as little time as it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).resolve().parents[2]


def test_both_halves_and_their_report(tmp_path: Path, tiny_model_dir: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COLUMNS"))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "specactor_ray.cli", *arguments]
        env = {**clean, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=800, env=env)

    done = run("demo", "--model", str(tiny_model_dir), "--minutes", "0.01", "--output", "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    speed, training = report["speed"], report["training"]
    assert len(speed["rounds"]) == 2 and speed["identical"] == speed["requests"] == 6 and speed["error"] is not None
    assert training["steps"] == 2 and training["before"]["samples"] == training["after"]["samples"] == 16
    assert training["before"]["mean"] == training["rewards"][0]["mean"]
    for words in ("round 2: plain", "GRPO", "step 2/", "the time is up after 2 of 12 steps"):
        assert words in done.stderr
    assert "6 of 6" in done.stdout and "the reward " in done.stdout
    train = next(line.strip() for line in done.stdout.splitlines() if "specactor train " in line)
    again = run(*train.replace("trainer.steps=60", "trainer.steps=3").split()[1:])
    assert again.returncode == 0 and "complete: 3 steps" in again.stdout, again.stderr
