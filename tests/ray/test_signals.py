"""SIGTERM while a run starts: an orderly end, and nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[2]


def private_clusters() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("specactor-*"))


@pytest.mark.parametrize("delay_s", [1.0, 2.5, 4.0, 8.0])
def test_sigterm_during_the_start_ends_in_order(delay_s: float, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Count from 1 to 5.\n")
    before = private_clusters()
    overrides = [
        f"target.model={tiny_target()}",
        "target.kv_cache_gb=0.05",
        "drafters=[{method: ngram}]",
        f"data.path={tmp_path / 'prompts.txt'}",
        f"run.dir={tmp_path / 'runs'}",
        "cluster.num_cpus=2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "specactor_ray.cli", "rollout", *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "starting" in first
    time.sleep(delay_s)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "SIGTERM" in output and "Traceback" not in output
    assert private_clusters() <= before
    left = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] if (tmp_path / "runs").exists() else []
    assert not left or any(path.name == "summary.json" for path in left)
