"""`specactor rollout` is killed in the midst of a stream and continued: every sample is there once, and is the one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specactor_ray.core.types import SamplingParams
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES = 24, 4


def command(folder: Path) -> subprocess.Popen[str]:
    overrides = [
        f"target.model={tiny_target()}",
        "target.dtype=float32",
        "target.kv_cache_gb=0.05",
        "target.max_batch=4",
        "drafters=[{method: ngram}]",
        f"data.path={folder / 'prompts.jsonl'}",
        f"data.n={SAMPLES}",
        "sampling.max_tokens=64",
        f"run.dir={folder / 'runs'}",
        "resume=auto",
    ]
    arguments = [sys.executable, "-m", "specactor_ray.cli.main", "rollout", *overrides]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_killed_rollout_is_continued(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in tiny_prompts(PROMPTS)))
    killed = command(tmp_path)
    deadline = time.monotonic() + 240
    lines = 0
    while lines < 5:
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[0]
        time.sleep(0.02)
        lines = sum(len(file.read_text().splitlines()) for file in tmp_path.glob("runs/*/trajectories.jsonl.partial"))
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    resumed = command(tmp_path)
    output = resumed.communicate(timeout=240)[0]
    assert resumed.returncode == 0, output
    assert f"of {PROMPTS * SAMPLES} trajectories are there" in output
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == len({(row["prompt_index"], row["sample_index"]) for row in rows}) == PROMPTS * SAMPLES
    assert json.loads((folder / "summary.json").read_text())["resumed"] >= lines
    tokens = {(row["prompt_index"], row["sample_index"]): tuple(row["token_ids"]) for row in rows}
    assert tokens == plain_tokens(
        tiny_target(), tiny_prompts(PROMPTS), SamplingParams(1.0, max_tokens=64, seed=0), SAMPLES
    )
