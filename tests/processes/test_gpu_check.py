"""`scripts/gpu-check --dry-run` as a user runs it: every stage on the CPU, without packages a GPU machine may lack."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specactor_ray.benchmarks.gpu_check import command
from specactor_ray.benchmarks.gpu_check.settings import DRY_RUN, TINY, TINY_SAMPLED

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu-check"
MISSING = ("ray", "vllm", "deepspeed", "omegaconf", "rich", "typer", "greenlet")
HIDE = f"import sys\nfor name in {MISSING!r}:\n    sys.modules[name] = None\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Python without the packages that a machine with torch and transformers alone does not have."""
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(HIDE)
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(hiding)}


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested data."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_a_dry_run_completes_every_stage_and_writes_both_files(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [SCRIPT, "--dry-run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu_check_*.json")
    data = json.loads(path.read_text())
    stages = data["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(command.STAGES, "complete")
    assert data["status"] == "complete" and data["dry_run"] is True
    for title in ("the device", "a forward", "the keyed sampler", "tokens flipped", "the hf engine", "rollouts"):
        assert title in done.stdout
    check_figures({name: stage["figures"] for name, stage in stages.items()})
    check_hardware_file(yaml.safe_load(path.with_suffix(".yaml").read_text()))
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")], "temporary files are left"


def check_figures(figures: dict[str, Any]) -> None:
    """Every figure is there, finite and positive; in float32 every mode gives plain's tokens."""
    assert all(value is not None and math.isfinite(value) for value in numbers(figures))
    hardware = figures["hardware"]
    assert all(hardware[name] > 0 for name in ("copy_gb_per_s", "matmul_tflop_per_s", "launch_us", "to_host_us"))
    sampler = figures["sampler"]["points"]
    assert [point["rows"] for point in sampler] == list(DRY_RUN.sampler_rows)
    assert all(point[name]["ms"] > 0 for point in sampler for name in ("T=1", "T=0", "softmax"))
    ways = figures["flips"]["ways"]
    assert len(ways) == len(DRY_RUN.flips.batches) * len(DRY_RUN.flips.lengths)
    assert all(ways[0][temperature]["flips"] == 0 for temperature in ("1.0", "0.0")), "the reference, once more"
    steps = figures["engine"]["steps"]
    assert len(steps) == len(DRY_RUN.engine.rows) * len(DRY_RUN.engine.drafts)
    assert all(step[name] > 0 for step in steps for name in ("ms", "forward_ms", "sampling_ms", "python_ms"))
    runs = figures["end_to_end"]["runs"]
    grid = DRY_RUN.end_to_end
    assert len(runs) == len(grid.cells) * (1 + 2 * len(grid.accuracies))
    assert all(run["tokens_per_s"] > 0 and run["acceptance_length"] >= 1.0 for run in runs)
    exact = [run for run in runs if run["dtype"] == "float32"]
    assert all(run["different_requests"] == run["different_tokens"] == 0 for run in exact)
    assert all(run["tokens"] == run["batch"] * grid.tokens for run in runs)
    assert any(run["accepted_tokens"] > 0 for run in exact), "no draft was ever accepted, so nothing was compared"


def check_hardware_file(hardware: dict[str, Any]) -> None:
    assert hardware["kind"] == "specactor hardware" and hardware["name"].endswith("-measured")
    assert "--dry-run" in hardware["source"] and "from 1 and 2 layers to 6" in hardware["source"]
    assert hardware["measured"].keys() == {TINY.name, TINY_SAMPLED.name}
    grid = DRY_RUN.forwards
    for shape in hardware["measured"].values():
        assert shape.keys() == {"gpus", "eager"}, "a CPU has no graphs"
        measured = {tuple(point[:3]): point[3] for point in shape["eager"]}
        assert measured.keys() == {(r, p, c) for r in grid.rows for p in grid.positions for c in grid.contexts}
        assert all(isinstance(seconds, float) and 0.0 < seconds < 60.0 for seconds in measured.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_an_interrupted_run_keeps_the_finished_stages(
    number: signal.Signals, tmp_path: Path, environment: dict[str, str]
) -> None:
    path = tmp_path / "check.json"
    process = subprocess.Popen(
        [SCRIPT, "--dry-run", "--output", path], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 100
        while "forwards" not in (stages := json.loads(path.read_text())["stages"] if path.exists() else {}):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert stages["hardware"]["status"] == "complete"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == command.EXIT_INTERRUPTED, said
    data = json.loads(path.read_text())
    assert data["status"] == "interrupted"
    statuses = [stage["status"] for stage in data["stages"].values()]
    assert statuses[0] == "complete" and statuses.count("interrupted") <= 1 and "running" not in statuses
    assert data["stages"]["hardware"]["figures"]["copy_gb_per_s"] > 0


@pytest.mark.parametrize("existing", ["check.json", "check.yaml"])
def test_an_existing_file_is_never_overwritten(
    existing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / existing).write_text("mine")
    assert command.main(["--dry-run", "--output", str(tmp_path / "check.json")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and existing in message and "--output" in message
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--output", str(tmp_path / "check.json")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "no CUDA device" in message and "--dry-run" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stages", "hardware,flip"], "no stage 'flip'"),
        (["--minutes", "0"], "--minutes"),
        (["--output", "check.txt"], ".json"),
        (["--output", "/nowhere/check.json"], "cannot be written"),
    ],
)
def test_mistakes_end_with_2_and_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--dry-run", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and said in message
