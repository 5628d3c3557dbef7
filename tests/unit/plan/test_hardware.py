"""Hardware: shapes of models, the order of costs, published points; errors in files are named with key and fix."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.hardware import (
    SHIPPED,
    DeviceSpec,
    RooflineCost,
    find_model,
    load_hardware,
    load_models,
    shipped_hardware,
)


def roofline(name: str) -> DeviceSpec:
    device = load_hardware(name)
    assert isinstance(device, DeviceSpec)
    return device


H100 = roofline("h100")


# ---- rooflines ----


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2.5-0.5b", 494_032_768),  # tied embeddings, biases
        ("qwen3-8b", 8_190_735_360),  # norms of queries and keys
        ("llama-3.3-70b", 70_553_706_496),
        ("qwen3-8b-eagle3", pytest.approx(0.4e9, rel=0.01)),
    ],
)
def test_parameters_are_those_of_the_checkpoint(name: str, published: Any) -> None:
    assert find_model(name).parameters == published


@given(
    model=st.sampled_from(sorted(load_models())),
    gpus=st.sampled_from([1, 2]),
    step=st.tuples(st.integers(1, 512), st.integers(0, 4096), st.integers(0, 2_000_000), st.integers(0, 20_000)),
    more=st.tuples(st.integers(0, 64), st.integers(0, 512), st.integers(0, 100_000), st.integers(0, 4096)),
)
def test_more_work_never_costs_less(model: str, gpus: int, step: tuple[int, ...], more: tuple[int, ...]) -> None:
    cost = RooflineCost(H100, find_model(model), gpus)

    def seconds(rows: int, drafts: int, context: int, prefill: int) -> float:
        return cost.seconds(rows, rows + drafts, context, prefill)

    assert 0.0 < seconds(*step) <= seconds(*(a + b for a, b in zip(step, more, strict=True))) * (1 + 1e-12)


def test_stairs_of_matrix_products() -> None:
    """Positions up to a tile of 64, from 256 on 128, cost their samplers and the traffic alone."""
    cost = H100.cost("qwen3-32b")
    seconds = [cost.seconds(1, positions, 0) for positions in range(1, 700)]
    steps = [after - before for before, after in itertools.pairwise(seconds)]
    flat = min(steps)
    assert [at + 1 for at, step in enumerate(steps) if step > 20 * flat] == [64, 128, 192, 256, 384, 512, 640]


def test_tensor_parallel_shares_the_work_and_pays_for_all_reduces() -> None:
    single, four = (H100.cost("qwen2.5-32b", gpus).seconds(1, 1, 0) for gpus in (1, 4))
    assert single / 4 < four < single / 2
    tiny_single, tiny_shared = (H100.cost("qwen2.5-0.5b", gpus).seconds(1, 1, 0) for gpus in (1, 2))
    assert tiny_shared > tiny_single


def test_cache_that_fits() -> None:
    cost = H100.cost("qwen2.5-7b")
    one = cost.cache_tokens(0.9)
    assert one == pytest.approx((0.9 * 80e9 - 15.2e9) / 57_344, rel=0.01)
    assert cost.cache_tokens(0.9, other_weights_bytes=57_344e3) == pytest.approx(one - 1000, abs=1)
    assert H100.cost("llama-3.3-70b").cache_tokens(0.9) == 0


# ---- published ----

CONTEXT = 1024
"""Tokens of context per request where a source names none."""
SGLANG = replace(H100, layer_overhead_us=21.0, position_us=0.01)
"""SGLang overlaps the host with the device; its kernels of a layer by its plain step of Llama-3.1-8B. Other figures as
fitted to vLLM."""


def draft_seconds(cost: RooflineCost, rows: int, window: int, context: int) -> float:
    """Seconds to draft `window` tokens for each row; `context`: tokens of all rows at the begin."""
    grown = context + rows * (window - 1) // 2  # on average over the steps
    return window * cost.seconds(rows, rows, grown) + cost.fusion_seconds(rows)


def gains_of_a_decoupled_drafter() -> dict[str, tuple[float, float]]:
    """Llama-3.3-70B on 8 GPUs with a 1B drafter, window 5 (sgl-project/sglang pull request 22520, math). A round takes
    max(V, w·D) after a full match, V + w·D after a miss. The time of the host is that of the plain step at batch 1."""
    target, drafter = SGLANG.cost("llama-3.3-70b", 8), SGLANG.cost("llama-3.2-1b")
    host_s = 1.0 / 64.847 - target.seconds(1, 1, CONTEXT)
    measured = ((1, 1.621, 1.806), (4, 1.392, 1.831), (8, 1.536, 1.914), (16, 1.569, 1.813), (32, 1.468, 1.555))
    found = {"plain step at batch 64, ms": (1e3 / 51.171, 1e3 * (target.seconds(64, 64, 64 * CONTEXT) + host_s))}
    for batch, accepted, gain in (*measured, (64, 1.516, 1.209)):
        verify_s = target.seconds(batch, 6 * batch, batch * CONTEXT) + host_s
        draft_s = draft_seconds(drafter, batch, 5, batch * CONTEXT)
        # The chance of a full match with which `accepted` of 5 tokens are right on average.
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(middle**i for i in range(1, 6)) < accepted else (low, middle)
        round_s = verify_s + (1.0 - low**5) * draft_s + low**5 * max(draft_s - verify_s, 0.0)
        plain_s = target.seconds(batch, batch, batch * CONTEXT) + host_s
        found[f"gain at batch {batch}"] = (gain, (1.0 + accepted) * plain_s / round_s)
    return found


def gains_of_a_head() -> dict[str, tuple[float, float]]:
    """Qwen3-8B with an EAGLE-3 head, window 3 (arXiv 2604.26779); 32 rows of 4,096 tokens are assumed."""
    rows, context, gpu = 32, 32 * 4096, roofline("gb200")
    target, head = gpu.cost("qwen3-8b"), gpu.cost("qwen3-8b-eagle3")
    round_s = target.seconds(rows, 4 * rows, context) + draft_seconds(head, rows, 3, context)
    speed = target.seconds(rows, rows, context) / round_s
    return {f"gain at {length} tokens a step": (gain, length * speed) for length, gain in ((2.47, 1.8), (2.05, 1.54))}


def published() -> dict[str, tuple[float, float]]:
    """The table of docs/design/cost-models.md: published and predicted figures."""
    large, ssd = H100.cost("qwen2.5-32b", 4), H100.cost("qwen3-32b", 4)
    rows = [large.seconds(count, count, count * CONTEXT) for count in (128, 256)]
    return {
        "plain step of Llama-3.1-8B, ms": (1e3 / 158.34, 1e3 * SGLANG.cost("llama-3.1-8b").seconds(1, 1, CONTEXT)),
        "256 against 128 positions": (1.4, rows[1] / rows[0]),
        "plain step of Qwen3-32B on 4 GPUs, ms": (1e3 / 97.4, 1e3 * ssd.seconds(1, 1, CONTEXT)),
        "verifying 7 positions with it, ms": (11.5, 1e3 * ssd.seconds(1, 7, CONTEXT)),
        **gains_of_a_decoupled_drafter(),
        **gains_of_a_head(),
    }


def test_published_points_are_met_within_15_percent() -> None:
    points = published()
    assert len(points) == 13
    assert {what: predicted for what, (_, predicted) in points.items()} == {
        what: pytest.approx(figure, rel=0.15) for what, (figure, _) in points.items()
    }


def calibration() -> Any:
    spec = importlib.util.spec_from_file_location("calibrate", Path(__file__).parents[3] / "scripts" / "calibrate.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["calibrate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_held_out_steps_of_three_models_are_predicted_by_shares_of_the_fit() -> None:
    """Concurrencies 2, 8, 32 and 128 were not fitted. One set of shares for two kinds of H100, three targets, heads and
    draft models."""
    calibrate = calibration()
    steps, devices = calibrate.measured(), {name: roofline(name) for name in ("h100", "h100_94gb")}
    held_out = [step for step in steps if calibrate.is_held_out(step)]
    assert len(steps) == 262 and len(held_out) == 125 and len({step.drafter for step in held_out}) == 6
    for found in (calibrate.errors_of(held_out, devices), calibrate.median_errors(steps, devices)):
        sizes = [abs(error) for _, error in found]
        assert len(sizes) > 120 and statistics.median(sizes) < 0.03 and max(sizes) < 0.13
    found, prompt = calibrate.fit([step for step in steps if not calibrate.is_held_out(step)])
    assert prompt == pytest.approx(calibrate.PROMPT, rel=0.2)
    device = devices["h100_94gb"]
    assert found == {name: pytest.approx(getattr(device, name), rel=0.05) for name in found}
    for name in ("h100", "h200", "h20", "gb200"):
        other = roofline(name)
        assert all(getattr(other, key) == getattr(device, key) for key in (*calibrate.SHARES, "compute_share"))


# ---- files ----


def test_shipped_hardware_loads() -> None:
    assert {"h100", "h200", "h20", "gb200"} <= set(shipped_hardware())
    for name in shipped_hardware():
        hardware = load_hardware(name)
        if isinstance(hardware, DeviceSpec):
            assert all(hardware.cost(model).seconds(1, 1, 100) > 0 for model in load_models())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": None}, "memory_gb"),
        ({"memory_bg": 1}, "Did you mean memory_gb?"),
        ({"compute_share": 70}, "compute_share: 70.0 is out of range"),
    ],
)
def test_wrong_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    data, path = yaml.safe_load((SHIPPED / "h100.yaml").read_text(encoding="utf-8")), tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**data, **change}), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_hardware(str(path))
    assert str(path) in str(refused.value) and message in str(refused.value) and "Fix: " in str(refused.value)


def test_measured_hardware_has_what_was_measured(tmp_path: Path) -> None:
    measured = load_hardware("smollm2_eagle_epyc")
    target: Any = measured.cost("smollm2-135m")
    assert target(4, 12, 4000, 0) == target(4, 4, 0, 8) == pytest.approx(0.038)
    for name, devices, message in (("eagel", 1, r"Did you mean eagle\?"), ("eagle", 2, r"on 2 device\(s\) was not")):
        with pytest.raises(ConfigError, match=message):
            measured.cost(name, devices)
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hardware .*summary\.json: .* is not sound"):
        load_hardware(str(tmp_path / "summary.json"))


def test_measured_hardware_is_of_one_kind(tmp_path: Path) -> None:
    """That of the target."""
    shipped = json.loads((SHIPPED / "smollm2_eagle_epyc.json").read_text(encoding="utf-8"))
    costs, path = shipped["costs"], tmp_path / "mine.json"
    (times,) = costs["verify"].values()
    costs["verify"], costs["drafters"]["eagle"]["seconds"] = {"1 H100": times}, {"1 L4": times}
    path.write_text(json.dumps(shipped), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"eagle on 1 device\(s\) was not measured"):
        load_hardware(str(path)).cost("eagle")
    costs["verify"]["1 A100"] = times
    path.write_text(json.dumps(shipped), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"target on H100, A100, .* Fix: name the summary.json of a run on one kind"):
        load_hardware(str(path))


def test_what_is_unknown_is_named() -> None:
    for name in ("h10", "x/h100", "nowhere.yaml"):
        with pytest.raises(
            ConfigError, match=rf"hardware {name}: there is no such file.* Fix: use one of a100, a10g, gb200, h100"
        ):
            load_hardware(name)
    with pytest.raises(ConfigError, match=r"Did you mean qwen2.5-7b\?"):
        H100.cost("qwen2.5-7")
    with pytest.raises(ConfigError, match="28 attention heads, which 8 GPUs cannot share"):
        H100.cost("qwen2.5-7b", 8)
    assert roofline("H100").cost("Qwen2.5-7B", 4).seconds(1, 1, 1) > 0
