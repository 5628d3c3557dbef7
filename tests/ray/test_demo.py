"""`specactor demo` from end to end on a tiny model, in as little time as it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
REPOSITORY = Path(__file__).resolve().parents[2]


def test_both_halves_and_their_report(tmp_path: Path, tiny_model_dir: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COLUMNS"))}
    command = [sys.executable, "-m", "specactor_ray.cli", "demo", "--model", str(tiny_model_dir)]
    done = subprocess.run(
        [*command, "--minutes", "0.01", "--output", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=380,
        env={**clean, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    speed, training = report["speed"], report["training"]
    assert len(speed["rounds"]) == 2 and speed["identical"] == speed["requests"] == 6 and speed["error"] is not None
    assert training["steps"] == 2 and training["before"]["samples"] == training["after"]["samples"] == 24
    assert training["before"]["mean"] == training["rewards"][0]["mean"]
    for words in ("round 2: plain", "GRPO", "step 2/"):
        assert words in done.stderr
    for words in ("6 of 6", "the reward ", "specactor train --config out/training/config.yaml"):
        assert words in done.stdout
