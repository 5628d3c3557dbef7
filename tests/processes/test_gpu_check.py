"""`scripts/gpu-check --dry-run` as a user runs it: every stage on the CPU, without packages a GPU machine may lack."""

from __future__ import annotations

import itertools
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

from specactor_ray.bench.gpu_check import command
from specactor_ray.bench.gpu_check.stage import DRY_RUN, TINY

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu-check"
MISSING = ("ray", "vllm", "deepspeed", "omegaconf", "greenlet")
HIDE = f"""
import sys
from importlib import metadata
for name in {MISSING!r}:
    sys.modules[name] = None
found = metadata.version
def version(name):
    if name.partition("-")[0] in {MISSING!r}:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Python without the packages that a machine with torch and transformers alone does not have."""
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(HIDE)
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(hiding), "CUDA_VISIBLE_DEVICES": ""}


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
        [SCRIPT, "--dry-run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu_check_*.json")
    data = json.loads(path.read_text())
    stages = data["stages"]
    expected = dict.fromkeys(command.STAGES, "complete") | {"triton": "partial"}
    assert {name: stage["status"] for name, stage in stages.items()} == expected
    assert data["status"] == "partial" and data["dry_run"] is True
    for name, what in command.STAGES.items():
        assert f"{name}: {what}" in done.stdout
    check_figures(stages)
    check_hardware_file(yaml.safe_load(path.with_suffix(".yaml").read_text()))
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")], "temporary files are left"


def check_figures(stages: dict[str, Any]) -> None:
    """Every point is there, its figures finite."""
    points = {name: stage["points"] for name, stage in stages.items()}
    assert all(math.isfinite(value) for value in numbers(stages))
    hardware = stages["hardware"]["figures"]
    assert all(hardware[name] > 0 for name in ("copy_gb_per_s", "matmul_tflop_per_s", "launch_us", "to_host_us"))
    assert [point["rows"] for point in points["triton"]] == list(DRY_RUN.sampler_rows)
    assert all(point["product ms"] > 0 and point["host ms"] > 0 for point in points["triton"])
    assert len(points["attention"]) == len(DRY_RUN.attention_cells)
    assert all(point["row alone"] == 0.0 and point["one by one"] < 1e-5 for point in points["attention"])
    assert len(points["forwards"]) == len(DRY_RUN.forward_contexts) * len(DRY_RUN.forward_rows)
    assert all(point[f"{count} new"] > 0 for point in points["forwards"] for count in DRY_RUN.forward_positions)
    assert len(points["flips"]) == len(DRY_RUN.flip_batches) * len(DRY_RUN.flip_lengths)
    assert points["flips"][0]["T=1 flips"] == points["flips"][0]["T=0 flips"] == 0, "the reference, once more"
    assert len(points["drafting"]) == len(DRY_RUN.drafting_rows)
    assert all(point["eager x1 ms"] > 0 for point in points["drafting"])


def check_hardware_file(hardware: dict[str, Any]) -> None:
    assert hardware["kind"] == "specactor hardware" and hardware["name"].endswith("-measured")
    assert "--dry-run" in hardware["source"] and hardware["measured"].keys() == {TINY.name}
    shape = hardware["measured"][TINY.name]
    assert shape.keys() == {"gpus", "eager"}, "a CPU has no graphs"
    measured = {tuple(point[:3]): point[3] for point in shape["eager"]}
    axes = (DRY_RUN.forward_rows, DRY_RUN.forward_positions, DRY_RUN.forward_contexts)
    assert measured.keys() == set(itertools.product(*axes))
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
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == command.EXIT_INTERRUPTED, said
    data = json.loads(path.read_text())
    assert data["status"] == "interrupted"
    statuses = [stage["status"] for stage in data["stages"].values()]
    assert statuses[0] == "complete" and statuses.count("interrupted") <= 1
    assert data["stages"]["hardware"]["figures"]["copy_gb_per_s"] > 0


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
        (["--output", "check.txt"], ".json"),
        (["--output", "/nowhere/check.json"], "cannot be written"),
    ],
)
def test_mistakes_end_with_2_and_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--dry-run", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and said in message


def test_usage_errors_end_with_2() -> None:
    assert command.main(["--dry-run", "--minutes", "0"]) == 2
