"""Step costs from data sheets: shapes of models, the order of costs, and published points."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.simulation.hardware import RooflineHardware, find_model, load_hardware, load_models
from specactor_ray.simulation.roofline import Figure, RooflineCost
from tests.unit.simulation.published import (
    TOLERANCE,
    PublishedPoint,
    crossover,
    draft_seconds,
    published_points,
    ridge,
    roofline,
)


def h100() -> RooflineHardware:
    return roofline("h100")


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
    ],
)
def test_parameters_are_those_of_the_checkpoint(name: str, published: int) -> None:
    assert find_model(name).parameters == published


def test_eagle_heads_are_small() -> None:
    assert find_model("qwen3-8b-eagle3").parameters == pytest.approx(0.4e9, rel=0.01)
    assert find_model("llama-3.3-70b-eagle3").parameters == pytest.approx(1.5e9, rel=0.1)


@pytest.mark.parametrize(
    ("name", "cache"), [("qwen2.5-7b", 57_344), ("llama-3.3-70b", 327_680), ("qwen3-235b-a22b", 192_512)]
)
def test_cache_per_token(name: str, cache: int) -> None:
    assert find_model(name).kv_bytes_per_token == cache


@given(
    model=st.sampled_from(sorted(load_models())),
    gpus=st.sampled_from([1, 2]),
    graph=st.booleans(),
    rows=st.integers(1, 512),
    drafts=st.integers(0, 4096),
    context=st.integers(0, 2_000_000),
    prefill=st.integers(0, 20_000),
    more=st.tuples(st.integers(0, 64), st.integers(0, 512), st.integers(0, 100_000), st.integers(0, 4096)),
)
def test_more_work_never_costs_less(
    model: str,
    gpus: int,
    graph: bool,
    rows: int,
    drafts: int,
    context: int,
    prefill: int,
    more: tuple[int, int, int, int],
) -> None:
    cost = RooflineCost(h100().device, find_model(model), gpus, graph)
    less = cost.seconds(rows, rows + drafts, context, prefill)
    rows, drafts, context, prefill = (a + b for a, b in zip((rows, drafts, context, prefill), more, strict=True))
    assert 0.0 < less <= cost.seconds(rows, rows + drafts, context, prefill) * (1 + 1e-12)


def test_a_step_of_few_positions_takes_as_long_as_reading_the_weights() -> None:
    cost = h100().target_cost("llama-3.1-8b")
    read_s = 2 * (8.03e9 - 0.53e9) / (0.80 * 3.35e12)  # the embedding is looked up, not read
    assert cost.seconds(1, 1, 0) == pytest.approx(read_s, rel=0.12)
    assert cost.seconds(8, 8, 0) == pytest.approx(cost.seconds(1, 1, 0), rel=0.01)


def test_linears_are_bound_by_compute_from_the_crossover_on() -> None:
    device = replace(h100().device, compute_share=Figure(1.0, "-"), bandwidth_share=Figure(1.0, "-"))
    assert crossover(device) == ridge(device) == pytest.approx(295.3, abs=0.1)
    cost = RooflineCost(device, find_model("qwen2.5-32b"))
    below, at, above = (cost.seconds(n, n, 0) for n in (195, 295, 395))
    assert at - below < 0.2 * (above - at)


def test_an_h20_has_no_compute_to_spare_for_drafts() -> None:
    """verl reports speculation up to 50% slower there at large batches."""

    def slower(name: str) -> float:
        cost = load_hardware(name).target_cost("qwen3-8b")
        return cost.seconds(128, 4 * 128, 128 * 2048) / cost.seconds(128, 128, 128 * 2048)

    assert slower("h20") > 2.5 > 1.5 > slower("h100")


def test_few_positions_touch_few_experts() -> None:
    cost = h100().target_cost("qwen3-235b-a22b", 8)
    one, eight, many = (cost.seconds(n, n, 0) for n in (1, 8, 512))
    assert eight > 2.0 * one  # a dense model would read the same weights
    assert many < 20 * one


def test_tensor_parallel_shares_the_work_and_pays_for_all_reduces() -> None:
    single, four = (h100().target_cost("qwen2.5-32b", gpus).seconds(1, 1, 0) for gpus in (1, 4))
    assert single / 4 < four < single / 2
    tiny_single, tiny_shared = (h100().target_cost("qwen2.5-0.5b", gpus).seconds(1, 1, 0) for gpus in (1, 2))
    assert tiny_shared > tiny_single


def test_without_a_graph_launches_bound_the_step() -> None:
    graph, eager = (h100().target_cost("qwen2.5-0.5b", graph=graph) for graph in (True, False))
    assert eager.seconds(1, 1, 0) > 1.5 * graph.seconds(1, 1, 0)
    assert eager.seconds(1, 1, 0, 20_000) == pytest.approx(graph.seconds(1, 1, 0, 20_000), rel=0.01)


def test_drafting_is_one_step_per_token() -> None:
    cost = h100().target_cost("llama-3.2-1b")
    assert draft_seconds(cost, 4, 5, 4000) == pytest.approx(5 * cost.seconds(4, 4, 4000), rel=0.01)
    assert draft_seconds(cost, 4, 0, 4000) == draft_seconds(cost, 0, 5, 0) == cost.seconds(0, 0, 0) == 0.0
    head, target = h100().target_cost("qwen3-8b-eagle3"), h100().target_cost("qwen3-8b")
    assert draft_seconds(head, 4, 1, 4000) < target.seconds(4, 4, 4000) / 5


def test_heads_alone_fuse_states() -> None:
    """3 x 4096 x 4096 weights: 0.04 ms to read, which is also what 258 positions take."""
    head, model = h100().target_cost("qwen3-8b-eagle3"), h100().target_cost("qwen2.5-0.5b")
    assert head.fusion_seconds(0) == model.fusion_seconds(9) == 0.0
    assert head.fusion_seconds(1) == head.fusion_seconds(200) == pytest.approx(3.76e-5, rel=0.01)
    assert head.fusion_seconds(5000) > 15 * head.fusion_seconds(1)


def test_host_time_is_added_to_every_step() -> None:
    bare, slow = (h100().target_cost("qwen3-8b", host_s=host_s) for host_s in (0.0, 0.003))
    assert slow.seconds(1, 1, 0) - bare.seconds(1, 1, 0) == pytest.approx(0.003)


def test_cache_that_fits() -> None:
    hardware = h100()
    one = hardware.cache_tokens("qwen2.5-7b", 1, 0.9)
    assert one == pytest.approx((0.9 * 80e9 - 15.2e9) / 57_344, rel=0.01)
    assert hardware.cache_tokens("qwen2.5-7b", 1, 0.9, other_weights_bytes=57_344e3) == pytest.approx(one - 1000, abs=1)
    assert hardware.cache_tokens("llama-3.3-70b", 1, 0.9) == 0
    per_gpu = hardware.target_cost("llama-3.3-70b", 16).kv_bytes_per_token
    assert per_gpu == 327_680 / 8  # 8 key heads: the GPUs beyond 8 hold copies
    assert hardware.target_cost("llama-3.3-70b", 8).weight_bytes == pytest.approx(17.6e9, rel=0.01)


@pytest.mark.parametrize("point", published_points(), ids=lambda point: point.name)
def test_published_points(point: PublishedPoint) -> None:
    assert point.within, f"{point.published} was published, {point.predicted:.3g} is predicted"
    assert point.source


def test_points_beyond_the_tolerance_are_found() -> None:
    assert PublishedPoint("x", 1.0, 1.0 + TOLERANCE + 0.01, "s").difference > TOLERANCE
    assert not PublishedPoint("x", 1.0, 0.8, "s").within
