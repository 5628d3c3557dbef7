"""`scripts/gpu-check` as a user runs it, without the packages that a machine with torch and transformers may lack."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_check import command
from gpu_check.stage import Stage
from tests.fakes.tiny_check import TINY_CHECK

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"
MISSING = ("ray", "vllm", "deepspeed", "omegaconf", "greenlet")


def test_a_mistake_ends_with_2_and_one_line(tmp_path: Path) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING!r}))\n")
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(hiding), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [SCRIPT, "--stages", "hardware,flip"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and "no stage 'flip'" in done.stderr
    assert list(tmp_path.iterdir()) == [hiding]


def dies(stage: Stage, n: int) -> None:
    stage.point({"n": n}, ms=1.0)
    stage.changed("a figure")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_loses_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STAGES", {"first": lambda stage: stage.apart(dies, 1)})
    report = command.run_check(TINY_CHECK, ["first"], tmp_path / "check.json", math.inf)
    first = report["stages"]["first"]
    assert (first["status"], first["points"]) == ("failed", [{"n": 1, "ms": 1.0}]) and "died" in first["error"]
    assert json.loads((tmp_path / "check.json").read_text()) == report
