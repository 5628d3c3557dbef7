"""`scripts/gpu-check` as a user runs it, without the packages that a machine with torch and transformers may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"
MISSING = ("ray", "vllm", "deepspeed", "omegaconf", "greenlet")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "finds no CUDA device here. Fix: "),
        (["--stages", "hardware,flip"], "no stage 'flip'"),
        (["--output", "check.txt"], "ends in .json"),
    ],
)
def test_mistakes_end_with_2_and_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING!r}))\n")
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(hiding), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [SCRIPT, *arguments],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert list(tmp_path.iterdir()) == [hiding]
