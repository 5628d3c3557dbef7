"""The stages of `scripts/gpu-check` with tiny shapes on a CPU, and what their figures rest on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.bench.gpu_check import measurements, stage
from specactor_ray.bench.gpu_check.command import STAGES, gpu_check, run_check
from specactor_ray.bench.gpu_check.measurements import measure_attention
from specactor_ray.bench.gpu_check.stage import Stage
from specactor_ray.core.errors import InputError
from tests.fakes.clocks import HandClock
from tests.fakes.tiny_check import TINY_CHECK


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested data."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_a_check_completes_every_stage_and_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_ENOUGH_S", 0.0)
    path, names = tmp_path / "check.json", [name for name in STAGES if name != "triton"]  # which needs a GPU
    report = run_check(TINY_CHECK, names, path, math.inf)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    assert report["status"] == "complete", report
    assert report["stages"].keys() == {*names} and all(map(math.isfinite, numbers(report["stages"])))
    points = {name: stage["points"] for name, stage in report["stages"].items()}
    assert [(p["row alone"], p["one by one"], p["kernel"]) for p in points["attention"]] == [(0.0, 0.0, "own")] * 4
    assert [point["eager x1 ms"] > 0 for point in points["drafting"]] == [True, True]
    assert len(list(tmp_path.iterdir())) == 1, "temporary files are left"


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    path, late = tmp_path / "check.json", -1.0
    assert run_check(TINY_CHECK, ["hardware"], path, late)["status"] == "partial"
    with pytest.raises(InputError, match=r"--output: .*check\.json exists"):
        run_check(TINY_CHECK, ["hardware"], path, late)


@pytest.mark.parametrize(("file", "problem"), [("x.txt", "ends in .json"), ("x.json", "finds no CUDA device")])
def test_mistakes(file: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=problem):
        gpu_check(Path(file), 1.0, "hardware")


def test_missing_memory_time_and_failures_are_recorded_and_the_rest_is_measured() -> None:
    """Calls of 1 s: a first one and three that count."""
    clock, lines = HandClock(), list[str]()

    def advance() -> None:
        clock.seconds += 1.0

    def measures(stage: Stage) -> None:
        def measure(name: str) -> str:
            if name == "large":
                raise torch.OutOfMemoryError("of 80 GB")
            stage.point({"name": name}, s=stage.median_s(advance))
            return "measured"

        stage.each([("a",), ("large",), ("late",), ("later",)], measure)

    stage = Stage("stage", TINY_CHECK, 6.5, lines.append, clock.now)
    stage.run(measures)
    assert stage.entry["points"] == [{"name": "a", "s": 1.0}] and stage.entry["status"] == "partial"
    missing = ["large: out of memory", "late: no time was left", "later: no time was left"]
    assert stage.entry["not_measured"] == missing and "stage, late: no time was left" in lines

    def fails(stage: Stage) -> None:
        stage.entry["figures"]["half"] = 1
        raise RuntimeError("no kernel image\nlong story\nat line 3")

    stage.run(fails)
    assert (stage.entry["status"], stage.entry["error"]) == ("failed", "RuntimeError: no kernel image")
    assert stage.entry["figures"] == {"half": 1} and "at line 3" in stage.entry["traceback"]


def test_attention_that_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measurements.ragged_attention

    def splits(*args: Any, ragged_batch: Any, **more: Any) -> Any:
        output, _ = real(*args, ragged_batch=ragged_batch, **more)
        return output * (1 + 1e-3 * ragged_batch.num_tokens), None

    monkeypatch.setattr(measurements, "ragged_attention", splits)
    stage = Stage("stage", TINY_CHECK, now=HandClock(tick_s=0.001).now)
    measure_attention(stage)
    found = {(point["rows"], point["queries"]): point for point in stage.entry["points"]}
    assert found[1, 3]["row alone"] == 0.0 and found[1, 3]["one by one"] == pytest.approx(2e-3, rel=0.1)
    assert found[4, 1]["row alone"] == pytest.approx(3e-3, rel=0.1)
