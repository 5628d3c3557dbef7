"""Scenarios: those in conf/simulation can be built, published points are met, draft actors follow the load."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.simulation.comparison import describe
from specactor_ray.simulation.rollouts import Result
from specactor_ray.simulation.scenario import load_scenario, variant_of
from specactor_ray.simulation.world import build_world
from tests.unit.simulation.scenarios import SMALL, results_of, write_scenario

FOLDER = Path(__file__).parents[3] / "conf" / "simulation"
SCENARIOS = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_variant_has_costs_and_a_cache_for_its_requests(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.description and scenario.variants
    for name in scenario.variants:
        variant = variant_of(path, [], name)
        world = build_world(variant)
        assert world.target.seconds(4, 8, 4000) > world.target.seconds(4, 4, 400) > 0.0
        assert world.cache_tokens > variant.workload.prompt_tokens + variant.workload.max_tokens
        for drafter in variant.config.drafters if world.drafting else ():
            assert world.draft_time(drafter.method).forward.seconds(4, 4, 4000) > 0.0


def test_the_published_point_of_ssd() -> None:
    """arXiv 2603.03251: 97.4, 141.4 and 210.9 tokens/s. Plain steps and acceptance are fitted to the first two."""
    found = results_of(FOLDER / "ssd_qwen3_32b.yaml", ["workload.requests=10"])
    plain, speculation, decoupled, branches = (one.tokens_per_s for one in found)
    assert plain == pytest.approx(97.4, rel=0.1) and speculation == pytest.approx(141.4, rel=0.1)
    assert branches == pytest.approx(210.9, rel=0.1) and branches > 1.1 * decoupled


def test_the_published_point_of_skyrl() -> None:
    """2.03x of plain with 3.32 tokens a step. The acceptance is fitted, the gain is not."""
    plain, inline, _ = results_of(FOLDER / "skyrl_qwen3.5_9b.yaml", ["workload.max_tokens=512"])
    assert inline.metrics.acceptance_length == pytest.approx(3.32, rel=0.02)
    assert plain.rollout_s / inline.rollout_s == pytest.approx(2.03, rel=0.1)


def test_a_step_waits_for_a_cheap_head_beside_long_steps() -> None:
    """Measured: an accepted length of 1.43 coupled, 1.19 decoupled without a wait, 1.41 with one of 8 ms."""
    names = ["coupled", "decoupled", "waits_8ms"]
    found = results_of(FOLDER / "eagle_two_cores.yaml", ["workload.requests=6"], names=names)
    assert [one.metrics.acceptance_length for one in found] == pytest.approx([1.43, 1.19, 1.41], rel=0.05)
    assert found[2].tokens_per_s > 1.04 * found[1].tokens_per_s


def test_the_smallest_one_runs() -> None:
    plain, coupled, decoupled = results_of(FOLDER / "two_cores.yaml")
    assert plain.tokens == coupled.tokens == decoupled.tokens
    assert plain.metrics.acceptance_length == 1.0 < coupled.metrics.acceptance_length
    assert (plain.devices, coupled.devices, decoupled.devices) == (2, 2, 2)


def test_a_hosted_head_drafts_between_the_steps_of_decoupled_verifiers(tmp_path: Path) -> None:
    text = SMALL.replace("skills:\n", "skills:\n  - {method: eagle, mean: 0.8}\n") + (
        "  head: [config.mode=decoupled, 'config.drafters=[{method: draft_model, model: qwen2.5-0.5b, gpus: 1},"
        " {method: eagle, model: qwen3-8b-eagle3, hosted: true}]']\n"
    )
    apart, head = results_of(write_scenario(tmp_path, text), names=["decoupled", "head"])
    assert (apart.tokens, apart.devices, apart.draft_devices) == (head.tokens, head.devices, head.draft_devices)
    assert head.metrics.acceptance_length > apart.metrics.acceptance_length
    drafting = [{span.actor.partition("-")[0] for span in one.spans if span.what == "draft"} for one in (apart, head)]
    assert drafting == [{"draft_model"}, {"draft_model", "verifier"}]


DAYS = """
description: A day, drafters by load
hardware: h100
seed: 3
machines: {nodes: 1, gpus: 3, cpus: 32}
workload: {requests: 40, group: 1, prompt_tokens: 32, median_tokens: 40, sigma: 0.5, max_tokens: 120,
           arrival: daily, day_s: 40, night: 0.0}
skills:
  - {method: draft_model, mean: 0.8}
steps: {load_s: 0.5}
config:
  mode: decoupled
  cluster: {address: auto, health_interval_s: 0.5}
  target: {model: qwen2.5-32b, gpus: 1, replicas: 2, max_batch: 16}
  drafters: [{method: draft_model, model: qwen2.5-0.5b, gpus: 1, replicas: 0, max_replicas: 4}]
  speculation: {race: off}
  elastic: {up_s: 0.5, down_s: 0.5, devices_weight: 0.5}
variants:
  elastic: []
  fixed: [config.drafters.0.max_replicas=null, config.drafters.0.replicas=1]
"""


def held(result: Result) -> list[float]:
    """GPUs of draft actors, one number after the other."""
    return [gpus for _, gpus in result.draft_actors]


def test_draft_actors_come_and_go_by_load(tmp_path: Path) -> None:
    """There is room for one; those beyond it wait and hold up nothing."""
    path = write_scenario(tmp_path, DAYS)
    (elastic, fixed) = results_of(path)
    assert "at the rates of a day of 40 s" in describe(load_scenario(path))
    assert held(elastic)[:3] == [0, 1, 0] and held(fixed) == [1]
    assert elastic.tokens == fixed.tokens
    assert 0.0 < elastic.drafting_s < fixed.drafting_s
    assert elastic.metrics.accepted_tokens > 0
    assert elastic.devices == pytest.approx(2 + elastic.drafting_s / elastic.rollout_s) and fixed.devices == 3
    assert len(elastic.latency_s) == 40
