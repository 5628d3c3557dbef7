"""Hardware files: what is shipped loads, what is wrong is named with file, key and fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.errors import ConfigError, InputError, UserError
from specactor_ray.plan.costs import CostPoint, GridCost, cost_grids
from specactor_ray.simulation.hardware import (
    SHIPPED,
    MeasuredHardware,
    ProfiledHardware,
    RooflineHardware,
    load_hardware,
    load_models,
    shipped_hardware,
)

REPOSITORY = Path(__file__).parents[3]


def write(path: Path, data: Any) -> Path:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def h100() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((SHIPPED / "h100.yaml").read_text(encoding="utf-8"))
    return data


def measured(**changes: Any) -> dict[str, Any]:
    steps = [[r, p, c, 0.005 + 1e-5 * r * p + 1e-8 * r * c] for r in (1, 8) for p in (1, 4) for c in (512, 4096)]
    entry = {"gpus": 1, "graph": steps, "eager": steps} | changes
    return {
        "kind": "specactor hardware",
        "name": "h200-measured",
        "device": "NVIDIA H200",
        "source": "a test",
        "measured": {"qwen2.5-7b": entry},
    }


@pytest.mark.parametrize("name", shipped_hardware())
def test_shipped_hardware_loads(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    if isinstance(hardware, RooflineHardware):
        assert all(hardware.target_cost(model).seconds(1, 1, 100) > 0 for model in load_models())


def test_the_measured_gpu_is_met_where_it_was_measured() -> None:
    cost = load_hardware("h200-measured").target_cost("qwen2.5-7b")
    for rows, positions, context, expected in ((1, 1, 2048, 0.00624), (128, 1, 2048, 0.01067), (128, 9, 8192, 0.0449)):
        assert cost.seconds(rows, rows * positions, rows * context) == pytest.approx(expected, rel=0.05)


def test_shipped_files_are_found_in_the_repository() -> None:
    assert {"h100", "h200", "h20", "gb200"} <= set(shipped_hardware())
    assert SHIPPED.resolve() == REPOSITORY / "conf" / "simulation" / "hardware"


def test_every_figure_names_its_source() -> None:
    for path in SHIPPED.glob("*.yaml"):
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        for section in ("roofline", "models"):
            assert all(figure["source"] for figure in sections.get(section, {}).values())


def set_figure(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["roofline"]["memory_gb"].update(value=value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("name"), "name: is missing"),
        (lambda data: data.update(nam="x"), "nam: unknown key. Did you mean name?"),
        (lambda data: data.update(kind="x"), "kind: 'x' is not known"),
        (lambda data: data.update(measured={"m": {}}), "one of `roofline` and `measured`"),
        (lambda data: data.pop("roofline"), "one of `roofline` and `measured`"),
        (lambda data: data.update(roofline=3), "roofline: "),
        (
            lambda data: data["roofline"].pop("memory_gb"),
            "memory_gb.value: 0.0 is out of range",
        ),
        (lambda data: data["roofline"].update(memory_bg=1), "Did you mean memory_gb?"),
        (lambda data: data["roofline"]["memory_gb"].pop("source"), "roofline.memory_gb.source: is empty"),
        (lambda data: data["roofline"].update(memory_gb=80), "roofline.memory_gb: "),
        (lambda data: data["roofline"]["compute_share"].update(value=70), "70 is above 1"),
        (set_figure(-80), "-80.0 is out of range"),
        (set_figure(float("nan")), "nan is out of range"),
        (set_figure("many"), "roofline.memory_gb.value: 'many' is of the wrong type"),
        (set_figure(None), "roofline.memory_gb.value: "),
    ],
)
def test_wrong_files_are_refused(change: Callable[[dict[str, Any]], Any], says: str, tmp_path: Path) -> None:
    data = h100()
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


@pytest.mark.parametrize("name", ["h10", "x/h100", "nowhere.yaml"])
def test_unknown_hardware(name: str) -> None:
    with pytest.raises(UserError, match=rf"hardware {name}: there is no such file.* Fix: use one of gb200, h100"):
        load_hardware(name)
    with pytest.raises(UserError, match=r"Did you mean h100\?"):
        load_hardware("h10")


def test_unknown_models_and_numbers_of_gpus() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean qwen2.5-7b\?"):
        load_hardware("h100").target_cost("qwen2.5-7")
    with pytest.raises(ConfigError, match="28 attention heads, which 8 GPUs cannot share"):
        load_hardware("h100").target_cost("qwen2.5-7b", 8)
    assert load_hardware("H100").target_cost("Qwen2.5-7B", 4).seconds(1, 1, 1) > 0


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    good = yaml.safe_load((SHIPPED / "models.yaml").read_text(encoding="utf-8"))["models"]["qwen3-8b"]
    for change, says in [
        ({"layers": 0}, "models.mine.layers: 0 is out of range"),
        ({"layers": 1.5}, "layers: 1.5 is of the wrong type"),
        ({"layer": 1}, r"Did you mean layers\?"),
        ({"qk_norm": 2}, "qk_norm: 2 is of the wrong type"),
        ({"hidden": None}, "hidden: None is of the wrong type"),
        ({"experts_per_token": 2}, "more than there are experts"),
    ]:
        path = write(tmp_path / "models.yaml", {"kind": "specactor models", "models": {"mine": good | change}})
        with pytest.raises(ConfigError, match=says):
            load_models.__wrapped__(path)


def test_measured_steps_are_met_and_interpolated(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path / "h200-measured.yaml", measured()))
    assert isinstance(hardware, MeasuredHardware)
    cost = hardware.target_cost("Qwen2.5-7B")
    for rows, positions, context in [(1, 1, 512), (8, 4, 4096), (4, 2, 1000), (32, 4, 4096), (8, 16, 4096)]:
        expected = 0.005 + 1e-5 * rows * positions + 1e-8 * rows * context
        assert cost.seconds(rows, rows * positions, rows * context) == pytest.approx(expected)
    step_s = cost.seconds(8, 32, 8 * 4096)
    assert cost.seconds(8, 32, 8 * 4096, 320) == pytest.approx(step_s * 11)  # the price of its positions
    assert cost.seconds(0, 0, 0, 320) == pytest.approx(step_s * 10)
    assert hardware.draft_cost("qwen2.5-7b") is cost
    assert hardware.cache_tokens("qwen2.5-7b", 1, 0.9) == load_hardware("h200").cache_tokens("qwen2.5-7b", 1, 0.9)


def test_large_steps_that_did_not_fit_are_continued() -> None:
    def seconds(rows: int, positions: int, context: int) -> float:
        return 0.005 + 1e-5 * rows * positions + 1e-8 * rows * context

    points = {
        (r, p, c): seconds(r, p, c) for r in (1, 8, 64, 256) for p in (1, 4) for c in (512, 4096) if r * c < 100_000
    }
    cost = GridCost(points)
    assert cost.seconds(256, 1024, 256 * 4096) == pytest.approx(seconds(256, 4, 4096))
    assert cost.seconds(100, 100, 100 * 2048) == pytest.approx(seconds(100, 1, 2048))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 0}, r"measured.qwen2.5-7b.gpus: 0 is out of range"),
        ({"gpus": 1.5}, "gpus: 1.5 is of the wrong type"),
        ({"graph": [[1, 1, 512, -1.0]]}, r"graph.0: \[1, 1, 512, -1.0\] is not"),
        ({"graph": [[1, 1, 512]]}, "is not .rows, positions, context, seconds"),
        ({"graph": [[1, 1, 1, 1.0], [2, 2, 1, 1.0]]}, "the step of 1 rows, 2 positions and 1 tokens is missing"),
        ({"graph": None, "eager": None}, "no steps were measured"),
        ({"graphs": []}, r"Did you mean graph\?"),
    ],
)
def test_wrong_measurements_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_hardware(write(tmp_path / "m.yaml", measured(**changes)))


def test_what_was_not_measured(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path / "m.yaml", measured(graph=None)))  # only without a graph
    with pytest.raises(ConfigError, match=r"Did you mean qwen2.5-7b\?"):
        hardware.target_cost("qwen2.5-70b")
    with pytest.raises(ConfigError, match="on 2 GPU"):
        hardware.target_cost("qwen2.5-7b", 2)
    odd = load_hardware(write(tmp_path / "odd.yaml", measured() | {"device": "Abacus"}))
    with pytest.raises(ConfigError, match="the memory of its device is not known"):
        odd.cache_tokens("qwen2.5-7b", 1, 0.9)


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


def test_a_profile_is_a_cost_beyond_its_windows() -> None:
    def seconds(window: int, context: int, batch: int) -> float:
        return 0.01 + 0.001 * batch * (window + 1) + 1e-6 * context

    table = cost_grids(
        CostPoint(1, window, context, batch, seconds(window, context, batch))
        for window in (0, 4)
        for context in (128, 1024)
        for batch in (1, 4, 16)
    )
    cost = table[1]
    for window, context, batch in [(0, 128, 1), (4, 1024, 16), (2, 500, 8), (9, 1024, 16), (4, 4096, 16)]:
        predicted = cost.seconds(batch, batch * (window + 1), batch * context)
        assert predicted == pytest.approx(seconds(window, context, batch), rel=1e-6)

    hardware = ProfiledHardware("mine", "m", table, {"eagle": table})
    assert hardware.target_cost("m").seconds(4, 8, 4000) == cost.seconds(4, 8, 4000)
    assert hardware.draft_cost("eagle") is cost
    for refused, says in [
        (lambda: hardware.target_cost("n"), "this profile is of m, not n"),
        (lambda: hardware.target_cost("m", 2), "2 devices were not measured"),
        (lambda: hardware.draft_cost("eagel"), r"Did you mean eagle\?"),
        (lambda: hardware.cache_tokens("m", 1, 0.9), "the memory of its device is not known"),
    ]:
        with pytest.raises(ConfigError, match=says):
            refused()


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is no profile"):
        load_hardware(path)
