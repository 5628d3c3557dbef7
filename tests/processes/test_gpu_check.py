"""`scripts/gpu-check` as a user runs it, without the packages that a machine with torch and transformers may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
