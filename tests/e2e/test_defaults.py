"""The built-in defaults are a whole configuration: `specactor rollout data.path=prompts.txt` just runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.config import load_config
from specactor_ray.config.schema import ModeName

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


def test_a_rollout_without_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Name three rivers.\nWrite the numbers from 1 to 20.\n")
    done = subprocess.run(
        [sys.executable, "-m", "specactor_ray.cli.main", "rollout", "data.path=prompts.txt", "sampling.max_tokens=32"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    modes = [line for line in done.stderr.splitlines() if line.startswith("mode: ")]
    assert len(modes) == 1 and modes[0].startswith("mode: coupled (") and "drafters: suffix" in modes[0]
    (folder,) = (tmp_path / "runs").iterdir()
    config = load_config(folder / "config.yaml")
    cores = min(2, len(os.sched_getaffinity(0)))
    assert (config.mode, config.target.cores, config.drafters[0].method) == (ModeName.coupled, cores, "suffix")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["trajectories"]["finished"] == 2
    assert summary["config"]["mode"] == "coupled" and [row["kind"] for row in summary["actors"]] == ["verifier"]
