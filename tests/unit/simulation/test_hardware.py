"""Hardware: shapes of models, the order of costs, published points; errors in files are named with key and fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.errors import ConfigError, InputError, UserError
from specactor_ray.plan.costs import GridCost
from specactor_ray.simulation.hardware import (
    SHIPPED,
    MeasuredHardware,
    RooflineCost,
    RooflineHardware,
    find_model,
    load_hardware,
    load_models,
    shipped_hardware,
)
from tests.unit.simulation.published import PublishedPoint, crossover, published_points, ridge, roofline

H100 = roofline("h100")


def write(path: Path, data: Any) -> Path:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


# ---- rooflines ----


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.3-70b", 70_553_706_496),
        ("qwen3-8b-eagle3", pytest.approx(0.4e9, rel=0.01)),
        ("llama-3.3-70b-eagle3", pytest.approx(1.5e9, rel=0.1)),
    ],
)
def test_parameters_are_those_of_the_checkpoint(name: str, published: Any) -> None:
    assert find_model(name).parameters == published


@pytest.mark.parametrize(
    ("name", "cache"), [("qwen2.5-7b", 57_344), ("llama-3.3-70b", 327_680), ("qwen3-235b-a22b", 192_512)]
)
def test_cache_per_token(name: str, cache: int) -> None:
    assert find_model(name).kv_bytes_per_token == cache


@given(
    model=st.sampled_from(sorted(load_models())),
    gpus=st.sampled_from([1, 2]),
    step=st.tuples(st.integers(1, 512), st.integers(0, 4096), st.integers(0, 2_000_000), st.integers(0, 20_000)),
    more=st.tuples(st.integers(0, 64), st.integers(0, 512), st.integers(0, 100_000), st.integers(0, 4096)),
)
def test_more_work_never_costs_less(model: str, gpus: int, step: tuple[int, ...], more: tuple[int, ...]) -> None:
    cost = RooflineCost(H100.device, find_model(model), gpus)

    def seconds(rows: int, drafts: int, context: int, prefill: int) -> float:
        return cost.seconds(rows, rows + drafts, context, prefill)

    assert 0.0 < seconds(*step) <= seconds(*(a + b for a, b in zip(step, more, strict=True))) * (1 + 1e-12)


def test_a_step_of_few_positions_takes_as_long_as_reading_the_weights() -> None:
    cost = H100.cost("llama-3.1-8b")
    read_s = 2 * (8.03e9 - 0.53e9) / (0.80 * 3.35e12)  # the embedding is looked up, not read
    assert cost.seconds(1, 1, 0) == pytest.approx(read_s, rel=0.12)
    assert cost.seconds(8, 8, 0) == pytest.approx(cost.seconds(1, 1, 0), rel=0.01)


def test_linears_are_bound_by_compute_from_the_crossover_on() -> None:
    device = replace(H100.device, compute_share=1.0, bandwidth_share=1.0)
    assert crossover(device) == ridge(device) == pytest.approx(295.3, abs=0.1)
    cost = RooflineCost(device, find_model("qwen2.5-32b"))
    below, at, above = (cost.seconds(n, n, 0) for n in (195, 295, 395))
    assert at - below < 0.2 * (above - at)


def test_an_h20_has_no_compute_to_spare_for_drafts() -> None:
    """verl reports speculation up to 50% slower there at large batches."""

    def slower(name: str) -> float:
        cost = load_hardware(name).cost("qwen3-8b")
        return cost.seconds(128, 4 * 128, 128 * 2048) / cost.seconds(128, 128, 128 * 2048)

    assert slower("h20") > 2.5 > 1.5 > slower("h100")


def test_few_positions_touch_few_experts() -> None:
    cost = H100.cost("qwen3-235b-a22b", 8)
    one, eight, many = (cost.seconds(n, n, 0) for n in (1, 8, 512))
    assert eight > 2.0 * one  # a dense model would read the same weights
    assert many < 20 * one


def test_tensor_parallel_shares_the_work_and_pays_for_all_reduces() -> None:
    single, four = (H100.cost("qwen2.5-32b", gpus).seconds(1, 1, 0) for gpus in (1, 4))
    assert single / 4 < four < single / 2
    tiny_single, tiny_shared = (H100.cost("qwen2.5-0.5b", gpus).seconds(1, 1, 0) for gpus in (1, 2))
    assert tiny_shared > tiny_single


def test_heads_alone_fuse_states() -> None:
    """3 x 4096 x 4096 weights: 0.04 ms to read, which is also what 258 positions take."""
    head, model = H100.cost("qwen3-8b-eagle3"), H100.cost("qwen2.5-0.5b")
    assert head.fusion_seconds(0) == model.fusion_seconds(9) == 0.0
    assert head.fusion_seconds(1) == head.fusion_seconds(200) == pytest.approx(3.76e-5, rel=0.01)
    assert head.fusion_seconds(5000) > 15 * head.fusion_seconds(1)


def test_cache_that_fits() -> None:
    one = H100.cache_tokens("qwen2.5-7b", 1, 0.9)
    assert one == pytest.approx((0.9 * 80e9 - 15.2e9) / 57_344, rel=0.01)
    assert H100.cache_tokens("qwen2.5-7b", 1, 0.9, other_weights_bytes=57_344e3) == pytest.approx(one - 1000, abs=1)
    assert H100.cache_tokens("llama-3.3-70b", 1, 0.9) == 0
    per_gpu = H100.cost("llama-3.3-70b", 16).kv_bytes_per_token
    assert per_gpu == 327_680 / 8  # 8 key heads: the GPUs beyond 8 hold copies


@pytest.mark.parametrize("point", published_points(), ids=lambda point: point.name)
def test_published_points(point: PublishedPoint) -> None:
    assert point.within, f"{point.published} was published, {point.predicted:.3g} is predicted"
    assert point.source


# ---- measured steps ----


def measured_file(**changes: Any) -> dict[str, Any]:
    steps = [[r, p, c, 0.005 + 1e-5 * r * p + 1e-8 * r * c] for r in (1, 8) for p in (1, 4) for c in (512, 4096)]
    return {
        "kind": "specactor hardware",
        "name": "h200-measured",
        "device": "NVIDIA H200",
        "source": "a test",
        "measured": {"qwen2.5-7b": {"gpus": 1, "graph": steps, "eager": steps} | changes},
    }


def test_the_measured_gpu_is_met_where_it_was_measured() -> None:
    cost = load_hardware("h200-measured").cost("qwen2.5-7b")
    for rows, positions, context, expected in ((1, 1, 2048, 0.00624), (128, 1, 2048, 0.01067), (128, 9, 8192, 0.0449)):
        assert cost.seconds(rows, rows * positions, rows * context) == pytest.approx(expected, rel=0.05)


def test_measured_steps_are_met_and_interpolated(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path / "h200-measured.yaml", measured_file()))
    cost = hardware.cost("Qwen2.5-7B")
    for rows, positions, context in [(1, 1, 512), (8, 4, 4096), (4, 2, 1000), (32, 4, 4096), (8, 16, 4096)]:
        expected = 0.005 + 1e-5 * rows * positions + 1e-8 * rows * context
        assert cost.seconds(rows, rows * positions, rows * context) == pytest.approx(expected)
    step_s = cost.seconds(8, 32, 8 * 4096)
    assert cost.seconds(8, 32, 8 * 4096, 320) == pytest.approx(step_s * 11)  # the price of its positions
    assert cost.seconds(0, 0, 0, 320) == pytest.approx(step_s * 10)
    assert hardware.cache_tokens("qwen2.5-7b", 1, 0.9) == load_hardware("h200").cache_tokens("qwen2.5-7b", 1, 0.9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 0}, r"measured.qwen2.5-7b.gpus: 0 is out of range"),
        ({"gpus": 1.5}, "gpus: 1.5 is of the wrong type"),
        ({"graph": [[1, 1, 512, -1.0]]}, "measured.qwen2.5-7b: a step took no time"),
        ({"graph": [[1, 1, 512]]}, "not enough values .* full grid of .rows, positions, context, seconds"),
        ({"graph": [[1, 1, 512, "x"]]}, "measured.qwen2.5-7b: "),
        ({"graph": [3]}, "measured.qwen2.5-7b: "),
        ({"graph": [[1, 1, 1, 1.0], [2, 2, 1, 1.0]]}, "the step of 1 rows, 2 positions and 1 tokens is missing"),
        ({"graph": [], "eager": []}, "no steps were measured"),
        ({"graphs": []}, r"Did you mean graph\?"),
    ],
)
def test_wrong_measurements_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_hardware(write(tmp_path / "m.yaml", measured_file(**changes)))


def test_what_was_not_measured(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path / "m.yaml", measured_file(graph=[])))  # only without a graph
    odd = load_hardware(write(tmp_path / "odd.yaml", measured_file() | {"device": "Abacus"}))
    profile = load_hardware("smollm2_eagle_epyc")
    assert isinstance(profile, MeasuredHardware) and profile.cost("eagle") is profile.steps["eagle", 1]
    for refused, says in [
        (lambda: hardware.cost("qwen2.5-70b"), r"Did you mean qwen2.5-7b\?"),
        (lambda: hardware.cost("qwen2.5-7b", 2), r"on 2 device\(s\) was not measured"),
        (lambda: odd.cache_tokens("qwen2.5-7b", 1, 0.9), "the memory of its device is not known"),
        (lambda: profile.cost("eagel"), r"Did you mean eagle\?"),
    ]:
        with pytest.raises(ConfigError, match=says):
            refused()


AXIS = st.lists(st.integers(1, 50), min_size=1, max_size=3, unique=True)


@given(axes=st.tuples(AXIS, AXIS, AXIS), noise=st.randoms(use_true_random=False), data=st.data())
def test_more_work_never_costs_less_on_noisy_grids(
    axes: tuple[list[int], ...], noise: Any, data: st.DataObject
) -> None:
    rows, positions, contexts = axes
    grid = GridCost({(r, p, c): 0.1 + noise.random() for r in rows for p in positions for c in contexts})
    low = [data.draw(st.integers(1, 400)) for _ in range(3)]
    high = [value + data.draw(st.integers(0, 400)) for value in low]
    (r0, p0, c0), (r1, p1, c1) = low, high
    assert grid.seconds(r0, r0 * p0, r0 * c0) <= grid.seconds(r1, r1 * p1, r1 * c1) * (1 + 1e-9)


# ---- files ----


@pytest.mark.parametrize("name", shipped_hardware())
def test_shipped_hardware_loads(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name and {"h100", "h200", "h20", "gb200"} <= set(shipped_hardware())
    if isinstance(hardware, RooflineHardware):
        assert all(hardware.cost(model).seconds(1, 1, 100) > 0 for model in load_models())


def set_figure(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["roofline"].update(memory_gb=value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("name"), "name: is empty"),
        (lambda data: data.update(nam="x"), "nam: unknown key. Did you mean name?"),
        (lambda data: data.update(kind="x"), "kind: 'x' is not known"),
        (lambda data: data.update(measured={"m": {}}), "one of `roofline` and `measured`"),
        (lambda data: data.pop("roofline"), "one of `roofline` and `measured`"),
        (lambda data: data.update(roofline=3), "roofline: "),
        (lambda data: data["roofline"].pop("memory_gb"), "roofline.memory_gb: 0.0 is out of range"),
        (lambda data: data["roofline"].update(memory_bg=1), "Did you mean memory_gb?"),
        (lambda data: data["roofline"].update(compute_share=70), "roofline.compute_share: 70.0 is out of range"),
        (set_figure(-80), "roofline.memory_gb: -80.0 is out of range"),
        (set_figure(float("nan")), "nan is out of range"),
        (set_figure("many"), "roofline.memory_gb: 'many' is of the wrong type"),
        (set_figure(None), "roofline.memory_gb: "),
    ],
)
def test_wrong_files_are_refused(change: Callable[[dict[str, Any]], Any], says: str, tmp_path: Path) -> None:
    data = yaml.safe_load((SHIPPED / "h100.yaml").read_text(encoding="utf-8"))
    change(data)
    path = write(tmp_path / "mine.yaml", data)
    with pytest.raises(ConfigError) as refused:
        load_hardware(path)
    assert str(path) in str(refused.value) and says in str(refused.value) and "Fix: " in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"- 1", b"a: [", b"\x00", b"3", b"\xff\xfe\xff"])
def test_files_that_are_no_hardware(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        load_hardware(path)


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is no profile"):
        load_hardware(tmp_path / "profile.json")


@pytest.mark.parametrize("name", ["h10", "x/h100", "nowhere.yaml"])
def test_unknown_hardware(name: str) -> None:
    with pytest.raises(UserError, match=rf"hardware {name}: there is no such file.* Fix: use one of gb200, h100"):
        load_hardware(name)
    with pytest.raises(UserError, match=r"Did you mean h100\?"):
        load_hardware("h10")


def test_unknown_models_and_numbers_of_gpus() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean qwen2.5-7b\?"):
        H100.cost("qwen2.5-7")
    with pytest.raises(ConfigError, match="28 attention heads, which 8 GPUs cannot share"):
        H100.cost("qwen2.5-7b", 8)
    assert load_hardware("H100").cost("Qwen2.5-7B", 4).seconds(1, 1, 1) > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "models.mine.layers: 0 is out of range"),
        ({"layers": 1.5}, "layers: 1.5 is of the wrong type"),
        ({"layer": 1}, r"Did you mean layers\?"),
        ({"qk_norm": 2}, "qk_norm: 2 is of the wrong type"),
        ({"hidden": None}, "hidden: None is of the wrong type"),
        ({"experts_per_token": 2}, "more than there are experts"),
    ],
)
def test_wrong_models_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    good = yaml.safe_load((SHIPPED / "models.yaml").read_text(encoding="utf-8"))["models"]["qwen3-8b"]
    path = write(tmp_path / "models.yaml", {"kind": "specactor models", "models": {"mine": good | change}})
    with pytest.raises(ConfigError, match=says):
        load_models.__wrapped__(path)
