"""What `scripts/gpu-check` rests on: a forward that is right, budgets and limits that hold, figures that mean what they
say."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from specactor_ray.bench.gpu_check import attention, triton_kernels, vllm
from specactor_ray.bench.gpu_check.drafting import measure_drafting
from specactor_ray.bench.gpu_check.flips import compare, measure_flips
from specactor_ray.bench.gpu_check.forwards import StaticForward, measure_forwards
from specactor_ray.bench.gpu_check.hardware import measure_hardware
from specactor_ray.bench.gpu_check.models import ragged_model as made_model
from specactor_ray.bench.gpu_check.models import random_model, spread_head
from specactor_ray.bench.gpu_check.report import Report, hardware_yaml, slug, tables
from specactor_ray.bench.gpu_check.rollouts import CellRequests, OracleProposer, measure_engine
from specactor_ray.bench.gpu_check.settings import DRY_RUN, LARGE, ON_GPU, SMALL, TINY, Cell
from specactor_ray.bench.gpu_check.stages import OutOfTime, Stage, StageFunction, TooSlow, run_stages
from specactor_ray.core.console import make_console
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models import ragged_attention, ragged_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.target.hf import HfEngine
from tests.by_name import ByName
from tests.fakes.clocks import HandClock

HEAD = {"dry_run": True, "started": "2026-01-02T03:04:05+00:00", "torch": "2.11.0", "device": "NVIDIA H200"}
REPOSITORY = Path(__file__).parents[3]


class Passing(HandClock):
    """Seconds pass when the test says so."""

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def stage_of(clock: HandClock | None = None, settings: Any = DRY_RUN, limit_s: float = math.inf) -> Stage:
    """A stage for which every look at the clock takes a millisecond, unless another clock is given."""
    return Stage("stage", settings._replace(limit_s=limit_s), math.inf, now=(clock or HandClock(tick_s=0.001)).now)


@pytest.mark.parametrize("parts", [(12,), (8, 1, 3), (1, 1, 10), (5, 7)])
def test_the_static_forward_computes_what_transformers_computes(parts: tuple[int, ...]) -> None:
    shape = TINY._replace(num_attention_heads=4, num_key_value_heads=2)
    model = random_model(shape, "float32", "cpu")
    with torch.no_grad():
        for layer in model.model.layers:  # transformers begins with norms of 1
            layer.input_layernorm.weight.uniform_(0.5, 1.5)
    tokens = torch.randint(TINY.vocab_size, (3, sum(parts)), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens, use_cache=False).logits
    forward, logits, begin = StaticForward(RaggedModel(model, 1 << 20), 3, 16), [], 0
    for count in parts:
        logits.append(forward.forward(tokens[:, begin : begin + count], begin)())
        begin += count
    torch.testing.assert_close(torch.cat(logits, dim=1).clone(), expected, atol=2e-3, rtol=1e-3)


def test_bf16_flips_are_counted_with_their_margins() -> None:
    stage = stage_of(settings=DRY_RUN._replace(dtype="bfloat16"))
    measure_flips(stage)
    points = stage.entry["points"]
    assert [(point["batch"], point["length"]) for point in points] == [(b, n) for n in (1, 2, 4) for b in (1, 2, 8)]
    assert points[0]["T=1 flips"] == points[0]["T=0 flips"] == 0.0, "the reference, once more"
    reference = np.array([[[1, 2], [3, 4]], [[0.5, 0.25], [2.0, 0.125]]])
    assert compare(reference, np.array([[[1, 9], [3, 9]], [[0.5, 1.0], [2.0, 1.0]]])) == (500.0, 0.25)
    assert compare(reference, reference) == (0.0, None)


def test_flips_are_those_of_the_products_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose outputs depend on the number of queries."""
    attend = ragged_attention.attention_for

    def noisy(*args: Any) -> Callable[..., torch.Tensor]:
        return lambda batch, layer, query, rules: attend(*args)(batch, layer, query, rules) * (1 + 0.2 * len(query))

    monkeypatch.setattr(ragged_attention, "attention_for", noisy)
    monkeypatch.setattr(ragged_model, "_CHECK_TOLERANCE", math.inf)
    stage = stage_of()
    measure_flips(stage)
    rates = {(point["batch"], point["length"]): point["T=1 flips"] for point in stage.entry["points"]}
    assert rates.pop((1, 1)) == 0.0
    assert max(rates.values()) > 0.0


def test_logits_are_spread_like_those_of_a_trained_model() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(20_000, 64, generator=generator), torch.randn(32, 64, generator=generator)
    spread_head(weight, hidden @ weight.T)
    logits = hidden @ weight.T
    logprobs = logits.log_softmax(-1)
    assert 0.4 < float(-(logprobs.exp() * logprobs).sum(-1).mean()) < 1.8, "nats"
    assert float(logits.quantile(0.84, dim=-1).mean()) == pytest.approx(3.0, rel=0.1)
    assert 12 < float(logits.amax(dim=-1).mean()) < 40


def test_shapes_are_those_of_the_published_models() -> None:
    assert (SMALL.head_dim, LARGE.head_dim) == (64, 128)
    assert LARGE.cache_bytes(1, 2) == 57_344
    assert all(ON_GPU.flip_tokens % length == 0 for length in ON_GPU.flip_lengths)
    assert max(ON_GPU.flip_batches) >= ON_GPU.flip_rows and ON_GPU.ways[0] == "plain"


def test_an_oracle_is_right_as_often_as_it_is_told() -> None:
    output = list(range(4000))
    for accuracy in (0.0, 0.3, 0.9, 1.0):
        oracle = ByName(OracleProposer({"r": output}, accuracy, 5000))
        oracle.open("r", (1, 2), (), SamplingParams(max_tokens=4000), 4000)
        assert oracle.extend() == ["r"] and oracle.extend() == []
        base, tail = oracle.tail("r")
        right = sum(mine == theirs for mine, theirs in zip(tail, output, strict=True))
        assert base == 0 and right / 4000 == pytest.approx(accuracy, abs=0.03)
    again = ByName(OracleProposer({"r": output}, 0.3, 5000))
    again.open("r", (1, 2), range(100), SamplingParams(max_tokens=4000), 50)
    again.extend()
    first = ByName(OracleProposer({"r": output}, 0.3, 5000))
    first.open("r", (1, 2), (), SamplingParams(max_tokens=4000), 150)
    first.extend()
    assert again.tail("r") == (100, first.tail("r")[1][100:150]), "a position is right or wrong however it is reached"


def test_an_oracle_follows_commits_to_the_end_of_the_output() -> None:
    oracle = ByName(OracleProposer({"r": [5, 6, 7]}, 1.0, 100))
    assert not oracle.commit("r", 0, [5]), "not open"
    oracle.open("r", (1,), (), SamplingParams(), 2)
    oracle.extend()
    assert oracle.tail("r") == (0, (5, 6))
    assert oracle.commit("r", 0, [5]) and oracle.extend() == ["r"] and oracle.tail("r") == (1, (6, 7))
    assert not oracle.commit("r", 3, [9]), "a gap"
    assert oracle.commit("r", 1, [8]) and oracle.extend() == ["r"]
    assert oracle.tail("r") == (2, (7,)), "after another token the guess is that of the position"
    oracle.close("r")
    assert oracle.extend() == []


# ---- budgets and limits ----


def test_what_fails_is_late_or_slow_is_shown_and_the_rest_is_measured(tmp_path: Path) -> None:
    clock = Passing()

    def fails(stage: Stage) -> None:
        stage.entry["figures"]["half"] = 1
        raise RuntimeError("no kernel image\nlong story\nat line 3")

    def measures(stage: Stage) -> None:
        """Steps of 1 s: three of each figure and a first one."""

        def measure(name: str, seconds: float) -> str:
            stage.point({"name": name}, s=stage.median_s(lambda: clock.advance(seconds)))
            return "measured"

        stage.each([("a", 1.0), ("slow", 3.2), ("b", 1.0)], measure)
        stage.each([("c", 1.0), ("d", 1.0), ("e", 1.0)], measure)

    def too_large(stage: Stage) -> None:
        def measure(name: str) -> str:
            raise torch.OutOfMemoryError("of 80 GB")

        stage.each([("a",)], measure)

    def cannot(stage: Stage) -> None:
        stage.entry["not_measured"].append("triton is not installed")

    def is_finite(stage: Stage) -> None:
        stage.point({"x": 1}, y=math.nan)

    lines: list[str] = []
    report = Report(tmp_path / "check.json", HEAD)
    stages = {"hardware": (0.0, fails), "triton": (23.0, measures), "attention": (1.0, too_large),
              "flips": (1.0, cannot), "engine": (1.0, is_finite)}  # fmt: skip
    run_stages(stages, DRY_RUN._replace(limit_s=2.0), report.stages, lines.append, clock.now() + 26.0, clock.now)
    report.close()
    data = json.loads((tmp_path / "check.json").read_text())
    entries = data["stages"]
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "hardware": "failed",
        "triton": "partial",
        "attention": "skipped",
        "flips": "skipped",
        "engine": "complete",
    }
    assert data["status"] == "failed"
    assert entries["hardware"]["error"] == "RuntimeError: no kernel image ... at line 3"
    assert entries["hardware"]["figures"] == {"half": 1} and "is_finite" not in entries["hardware"]["traceback"]
    assert [point["name"] for point in entries["triton"]["points"]] == ["a", "b", "c", "d"]
    assert entries["triton"]["not_measured"] == [
        "slow, 3.2: a step took 3.2 s, slower than its limit of 2 s: 0 of 20 steps measured",
        "e, 1.0: no time was left",
    ]
    assert entries["attention"]["not_measured"] == ["a: out of memory"]
    assert entries["engine"]["points"] == [{"x": 1, "y": None}], "JSON has no NaN"
    assert "triton, slow, 3.2: a step took 3.2 s, slower than its limit of 2 s: 0 of 20 steps measured" in lines
    shown = io.StringIO()
    console = make_console(shown)
    for part in tables(report.stages):
        console.print(part)
    for text in ("not measured: triton is not installed", "slower than its limit", "half: 1", "skipped", "partial"):
        assert text in shown.getvalue()


@pytest.mark.parametrize(
    "measure", [measure_hardware, triton_kernels.measure_triton, attention.measure_attention, measure_forwards,
                measure_flips, measure_engine]
)  # fmt: skip
def test_a_slow_device_is_shown_by_every_stage(measure: StageFunction) -> None:
    """Every look at the clock takes 3 s, so each step takes as long."""
    stage = stage_of(HandClock(tick_s=3.0), limit_s=2.0)
    measure(stage)
    assert not stage.entry["points"] and stage.entry["not_measured"]
    slow = [line for line in stage.entry["not_measured"] if not line.startswith("the kernels")]
    assert all("a step took 3 s, slower than its limit of 2 s: 0 of" in line for line in slow)


@pytest.mark.parametrize("measure", [measure_forwards, measure_flips, measure_engine])
def test_a_stage_without_time_lists_what_is_missing(measure: StageFunction) -> None:
    stage = stage_of()
    stage.deadline = -1.0
    measure(stage)
    assert not stage.entry["points"] and stage.entry["not_measured"]
    assert all(line.endswith("no time was left") for line in stage.entry["not_measured"])


def test_slow_steps_after_quick_ones_are_counted() -> None:
    clock = Passing()
    seconds = iter([9.0, 0.01, 0.01, 5.0])  # the first may compile
    with pytest.raises(TooSlow, match=r"took 5 s.*limit of 2 s: 2 of 20 steps measured"):
        stage_of(clock, limit_s=2.0).median_s(lambda: clock.advance(next(seconds)))


def test_a_stage_gives_the_time_it_did_not_need_to_those_after_it() -> None:
    clock, shares = Passing(), []

    def takes_10(stage: Stage) -> None:
        shares.append(stage.deadline - clock.now())
        clock.seconds += 10.0

    stages = {"a": (1.0, takes_10), "b": (2.0, takes_10), "c": (1.0, takes_10)}
    run_stages(stages, DRY_RUN, {}, lambda line: None, 100.0, clock.now)
    assert shares == pytest.approx([25.0, 60.0, 80.0])
    with pytest.raises(OutOfTime):
        Stage("a", DRY_RUN, clock.now() - 1, now=clock.now).seconds(lambda: None)


def test_what_is_not_counted_takes_no_time_of_a_share_but_ends_with_all_stages() -> None:
    clock = Passing()
    stage = Stage("a", DRY_RUN, clock.now() + 1.0, now=clock.now, end=clock.now() + 15.0)
    with stage.uncounted():
        clock.advance(10.0)
    stage.seconds(lambda: clock.advance(0.5))
    with stage.uncounted():
        clock.advance(10.0)
    with pytest.raises(OutOfTime):
        stage.seconds(lambda: None)


# ---- stages ----


def test_attention_that_plans_for_every_length_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's, which plans by exact shape."""
    clock, planned, real = Passing(), set[tuple[int, int]](), attention.ragged_attention

    def plans(*args: Any, ragged_batch: Any, **more: Any) -> Any:
        shape = (len(ragged_batch.counts), int(ragged_batch.lengths.max()))
        clock.advance(0.001 if shape in planned else 0.4)
        planned.add(shape)
        return real(*args, ragged_batch=ragged_batch, **more)

    monkeypatch.setattr(attention, "ragged_attention", plans)
    stage = stage_of(clock)
    attention.measure_attention(stage)
    assert [(point["rows"], point["queries"]) for point in stage.entry["points"]] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    for point in stage.entry["points"][::2]:
        assert point["new length ms"] == pytest.approx(400.0) and point["again ms"] == pytest.approx(1.0)
        assert point["layer ms"] == pytest.approx(1.0)


def test_attention_that_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = stage_of()
    attention.measure_attention(sound)
    for point in sound.entry["points"]:
        assert point["row alone"] == point["one by one"] == 0.0, "bits on a CPU depend on a row's own keys alone"
        assert point["kernel"] == "own"
    real = attention.ragged_attention

    def splits(*args: Any, ragged_batch: Any, **more: Any) -> Any:
        output, _ = real(*args, ragged_batch=ragged_batch, **more)
        return output * (1 + 1e-3 * ragged_batch.num_tokens), None

    monkeypatch.setattr(attention, "ragged_attention", splits)
    stage = stage_of()
    attention.measure_attention(stage)
    found = {(point["rows"], point["queries"]): point for point in stage.entry["points"]}
    assert found[1, 3]["row alone"] == 0.0 and found[1, 3]["one by one"] == pytest.approx(2e-3, rel=0.1)
    assert found[4, 1]["row alone"] == pytest.approx(3e-3, rel=0.1)


def test_ways_of_drafting_are_compared_over_what_both_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster one drafts more in the same time."""
    stage, calls = stage_of(), itertools.cycle([1, 1, 2, 2, 4, 4])

    def median(call: Callable[[], object]) -> float:
        for _ in range(next(calls)):
            call()
        return 1.0

    monkeypatch.setattr(stage, "median_s", median)
    measure_drafting(stage)
    assert len(stage.entry["points"]) == 2
    assert not any(point[f"{way} differ %"] for point in stage.entry["points"] for way in ("eager", "steps"))


def test_batches_decode_alike_in_every_way_and_leave_the_engine_free() -> None:
    stage, cell = stage_of(), Cell(TINY, "float32", 4)
    engine = HfEngine(made_model(TINY, "float32", "cpu", 4 * 300), max_batch=4)
    batch = CellRequests(stage, engine, cell, {"engine": "hf"})
    for way in ("plain", "k=2", "auto"):
        assert "tokens/s" in batch.run(way)
    plain, fixed, auto = stage.entry["points"]
    assert [point["way"] for point in stage.entry["points"]] == ["plain", "k=2", "auto"]
    assert plain["shape"] == "dry-run" and plain["engine"] == "hf"
    assert plain["acc. length"] == 1.0 < fixed["acc. length"] <= 3.0
    assert plain["differ"] == fixed["differ"] == auto["differ"] == 0
    stage.settings = DRY_RUN._replace(limit_s=-1.0)
    with pytest.raises(TooSlow, match="0 of 48 steps measured"):
        batch.run("k=2")
    assert not engine.has_work(), "the next way finds it free"


def test_stages_whose_package_is_missing_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> str:
        raise ConfigError("target.backend", "vllm is not installed.", "pip install vllm")

    monkeypatch.setattr(vllm, "require_vllm", missing)
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None)
    entries: dict[str, Any] = {}
    stages = {"triton": (1.0, triton_kernels.measure_triton), "vllm": (1.0, vllm.measure_vllm)}
    run_stages(stages, DRY_RUN, entries, lambda line: None, math.inf, lambda: 0.0)
    assert entries["vllm"]["status"] == "skipped" and "vllm is not installed" in entries["vllm"]["not_measured"][0]
    assert entries["triton"]["status"] == "partial"
    assert entries["triton"]["not_measured"] == ["the kernels: triton is not installed"]
    assert entries["triton"]["points"][0].keys() == {"rows", "product ms", "torch ms"}


# ---- the files ----


def test_the_hardware_file_is_yaml_with_numbers() -> None:
    shapes = {
        "qwen2.5-7b": {"graph": [[1, 1, 512, 4.1e-05]], "eager": [[1, 1, 512, 0.02]]},
        "qwen2.5-0.5b": {"graph": [], "eager": [[1, 2, 512, 0.03]]},
    }
    hardware = yaml.safe_load(hardware_yaml({**HEAD, "dry_run": False}, shapes))
    assert hardware == {
        "kind": "specactor hardware",
        "name": "h200-measured",
        "device": "NVIDIA H200",
        "source": "scripts/gpu-check, 2026-01-02, torch 2.11.0",
        "measured": {
            "qwen2.5-7b": {"gpus": 1, "graph": [[1, 1, 512, 4.1e-05]], "eager": [[1, 1, 512, 0.02]]},
            "qwen2.5-0.5b": {"gpus": 1, "eager": [[1, 2, 512, 0.03]]},
        },
    }
    assert slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_shapes_without_a_figure_are_left_out_of_the_hardware_file(tmp_path: Path) -> None:
    report = Report(tmp_path / "check.json", HEAD)
    shapes = {"begun": {"graph": [], "eager": []}}
    report.stages["forwards"] = {"figures": shapes}
    report.save()
    assert not report.yaml_path.exists()
    shapes["measured"] = {"graph": [], "eager": [[1, 1, 8, 0.5]]}
    report.save()
    assert yaml.safe_load(report.yaml_path.read_text())["measured"].keys() == {"measured"}


def test_a_report_refuses_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "check.yaml").touch()
    with pytest.raises(InputError, match=r"check\.yaml exists"):
        Report(tmp_path / "check.json", HEAD)


@pytest.mark.parametrize(
    ("missing", "code", "said"),
    [(("ray", "vllm", "omegaconf", "greenlet"), 0, ""), (("typer",), 2, "typer is missing. Fix: ")],
)
def test_it_needs_few_packages(missing: tuple[str, ...], code: int, said: str) -> None:
    modules = sorted((REPOSITORY / "specactor_ray/benchmarks/gpu_check").glob("[a-z]*.py"))
    imports = "; ".join(f"import specactor_ray.bench.gpu_check.{path.stem}" for path in modules)
    started = "import runpy; runpy.run_module('specactor_ray.bench.gpu_check', None, '__main__')"
    run = started if code else imports
    program = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); {run}"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stderr
    assert done.stderr.count("\n") == bool(code), done.stderr
