"""What `scripts/gpu-check` rests on: a forward that is right, a budget that holds, figures that mean what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from specactor_ray.bench.gpu_check import kernels
from specactor_ray.bench.gpu_check.command import CheckReport, hardware_yaml, slug
from specactor_ray.bench.gpu_check.forwards import (
    StaticForward,
    flips,
    measure_flips,
    measure_forwards,
    random_model,
    spread_head,
)
from specactor_ray.bench.gpu_check.stage import DRY_RUN, LARGE, ON_GPU, SMALL, TINY, OutOfTime, Stage
from specactor_ray.core.errors import InputError
from specactor_ray.models import ragged_attention, ragged_model
from specactor_ray.models.ragged_model import RaggedModel
from tests.fakes.clocks import HandClock

HEAD = {"dry_run": True, "started": "2026-01-02T03:04:05+00:00", "torch": "2.11.0", "device": "NVIDIA H200"}


def stage_of(clock: HandClock | None = None, **settings: Any) -> Stage:
    """A stage for which every look at the clock takes a millisecond, unless another clock is given."""
    return Stage("stage", DRY_RUN._replace(**settings), now=(clock or HandClock(tick_s=0.001)).now)


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


def test_flips_are_counted_with_their_margins() -> None:
    reference = np.array([[[1, 2], [3, 4]], [[0.5, 0.25], [2.0, 0.125]]])
    assert flips(reference, np.array([[[1, 9], [3, 9]], [[0.5, 1.0], [2.0, 1.0]]])) == (500.0, 0.25)
    assert flips(reference, reference) == (0.0, None)


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
    assert list(rates) == [(b, n) for n in (1, 2, 4) for b in (1, 2, 8)]
    assert rates.pop((1, 1)) == 0.0, "the reference, once more"
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
    assert max(ON_GPU.flip_batches) >= ON_GPU.flip_rows


def test_what_fails_or_is_late_is_shown_and_the_rest_is_measured(tmp_path: Path) -> None:
    clock, lines = HandClock(), list[str]()
    report = CheckReport(tmp_path / "check.json", HEAD)

    def run(name: str, measure: Callable[[Stage], None]) -> dict[str, Any]:
        stage = Stage(name, DRY_RUN, 6.5, lines.append, clock.now)
        report.stages[name] = stage.entry
        stage.run(measure)
        report.save()
        entry: dict[str, Any] = json.loads(report.path.read_text())["stages"][name]
        return entry

    def fails(stage: Stage) -> None:
        stage.entry["figures"]["half"] = 1
        raise RuntimeError("no kernel image\nlong story\nat line 3")

    failed = run("hardware", fails)
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: no kernel image ... at line 3")
    assert failed["figures"] == {"half": 1} and "no kernel image" in failed["traceback"]

    def measures(stage: Stage) -> None:
        """Calls of 1 s: a first one and three that count."""

        def advance() -> None:
            clock.seconds += 1.0

        def measure(name: str) -> str:
            if name == "large":
                raise torch.OutOfMemoryError("of 80 GB")
            stage.point({"name": name}, s=stage.median_s(advance), nan=math.nan)
            return "measured"

        stage.each([("a",), ("large",), ("late",), ("later",)], measure)

    partial = run("triton", measures)
    assert partial["points"] == [{"name": "a", "s": 1.0, "nan": None}], "JSON has no NaN"
    assert partial["not_measured"] == ["large: out of memory", "late: no time was left", "later: no time was left"]
    assert partial["status"] == "partial" and "triton, late: no time was left" in lines
    assert run("flips", lambda stage: stage.point({"x": 1}, y=2))["status"] == "complete"
    with pytest.raises(OutOfTime):
        Stage("late", DRY_RUN, 0.0, now=clock.now).seconds(lambda: None)


@pytest.mark.parametrize("measure", [measure_forwards, measure_flips, kernels.measure_attention])
def test_a_stage_without_time_lists_what_is_missing(measure: Callable[[Stage], None]) -> None:
    stage = stage_of()
    stage.deadline = -1.0
    measure(stage)
    assert not stage.entry["points"] and stage.entry["not_measured"]
    assert all(line.endswith("no time was left") for line in stage.entry["not_measured"])


def test_attention_that_plans_for_every_length_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's, which plans by exact shape."""
    clock, planned, real = HandClock(), set[tuple[int, int]](), kernels.ragged_attention

    def plans(*args: Any, ragged_batch: Any, **more: Any) -> Any:
        shape = (len(ragged_batch.counts), int(ragged_batch.lengths.max()))
        clock.seconds += 0.001 if shape in planned else 0.4
        planned.add(shape)
        return real(*args, ragged_batch=ragged_batch, **more)

    monkeypatch.setattr(kernels, "ragged_attention", plans)
    stage = stage_of(clock)
    kernels.measure_attention(stage)
    assert [(point["rows"], point["queries"]) for point in stage.entry["points"]] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    for point in stage.entry["points"][::2]:
        assert point["new length ms"] == pytest.approx(400.0) and point["again ms"] == pytest.approx(1.0)
        assert point["layer ms"] == pytest.approx(1.0)


def test_attention_that_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = stage_of()
    kernels.measure_attention(sound)
    for point in sound.entry["points"]:
        assert point["row alone"] == point["one by one"] == 0.0, "bits on a CPU depend on a row's own keys alone"
        assert point["kernel"] == "own"
    real = kernels.ragged_attention

    def splits(*args: Any, ragged_batch: Any, **more: Any) -> Any:
        output, _ = real(*args, ragged_batch=ragged_batch, **more)
        return output * (1 + 1e-3 * ragged_batch.num_tokens), None

    monkeypatch.setattr(kernels, "ragged_attention", splits)
    stage = stage_of()
    kernels.measure_attention(stage)
    found = {(point["rows"], point["queries"]): point for point in stage.entry["points"]}
    assert found[1, 3]["row alone"] == 0.0 and found[1, 3]["one by one"] == pytest.approx(2e-3, rel=0.1)
    assert found[4, 1]["row alone"] == pytest.approx(3e-3, rel=0.1)


def test_a_sampler_without_kernels_is_timed_in_its_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    stage = stage_of()
    kernels.measure_triton(stage)
    assert stage.entry["not_measured"] == ["the kernels: triton is not installed"]
    assert stage.entry["points"][0].keys() == {"rows", "product ms", "host ms"}


def test_the_hardware_file_is_yaml_with_numbers_of_the_measured_shapes() -> None:
    shapes = {
        "qwen2.5-7b": {"graph": [[1, 1, 512, 4.1e-05]], "eager": [[1, 1, 512, 0.02]]},
        "qwen2.5-0.5b": {"graph": [], "eager": [[1, 2, 512, 0.03]]},
        "begun": {"graph": [], "eager": []},
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


def test_there_is_no_hardware_file_before_the_first_forward(tmp_path: Path) -> None:
    report = CheckReport(tmp_path / "check.json", HEAD)
    report.stages["forwards"] = {"figures": {"begun": {"graph": [], "eager": []}}}
    report.save()
    assert not report.yaml_path.exists()


@pytest.mark.parametrize("existing", ["check.json", "check.yaml"])
def test_an_existing_file_is_never_overwritten(existing: str, tmp_path: Path) -> None:
    (tmp_path / existing).write_text("mine")
    with pytest.raises(InputError, match=f"--output: .*{existing} exists"):
        CheckReport(tmp_path / "check.json", HEAD)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
