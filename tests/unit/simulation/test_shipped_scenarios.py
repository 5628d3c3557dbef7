"""The scenarios in conf/simulation: all of them can be built, and the smallest one runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.simulation.costs import build_world
from specactor_ray.simulation.scenario import load_scenario, variant_of
from tests.unit.simulation.scenarios import SMALL, compare, write_scenario

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
    found = compare(FOLDER / "ssd_qwen3_32b.yaml", ["workload.requests=10"], processes=1)
    plain, speculation, decoupled, branches = (one.tokens_per_s for one in found)
    assert plain == pytest.approx(97.4, rel=0.1) and speculation == pytest.approx(141.4, rel=0.1)
    assert branches == pytest.approx(210.9, rel=0.1) and branches > 1.1 * decoupled


def test_the_published_point_of_skyrl() -> None:
    """2.03x of plain with 3.32 tokens a step. The acceptance is fitted, the gain is not."""
    plain, inline, _ = compare(FOLDER / "skyrl_qwen3.5_9b.yaml", ["workload.max_tokens=512"], processes=1)
    assert inline.metrics.acceptance_length == pytest.approx(3.32, rel=0.02)
    assert plain.rollout_s / inline.rollout_s == pytest.approx(2.03, rel=0.1)


def test_a_step_waits_for_a_cheap_head_beside_long_steps() -> None:
    """Measured: an accepted length of 1.43 coupled, 1.19 decoupled without a wait, 1.41 with one of 8 ms."""
    names = ["coupled", "no_wait", "waits_8ms", "decoupled"]
    found = compare(FOLDER / "eagle_two_cores.yaml", ["workload.requests=6"], names=names, processes=1)
    lengths = [one.metrics.acceptance_length for one in found]
    assert lengths == pytest.approx([1.43, 1.19, 1.41, 1.41], rel=0.05)
    assert found[3].tokens_per_s > 1.04 * found[1].tokens_per_s


def test_the_smallest_one_runs() -> None:
    plain, coupled, decoupled = compare(FOLDER / "two_cores.yaml", processes=1)
    assert plain.tokens == coupled.tokens == decoupled.tokens
    assert plain.metrics.acceptance_length == 1.0 < coupled.metrics.acceptance_length
    assert (plain.devices, coupled.devices, decoupled.devices) == (2, 2, 2)


def test_a_hosted_head_drafts_between_the_steps_of_decoupled_verifiers(tmp_path: Path) -> None:
    text = SMALL.replace("skills:\n", "skills:\n  - {method: eagle, mean: 0.8}\n") + (
        "  head: [config.mode=decoupled, 'config.drafters=[{method: draft_model, model: qwen2.5-0.5b, gpus: 1},"
        " {method: eagle, model: qwen3-8b-eagle3, hosted: true}]']\n"
    )
    apart, head = compare(write_scenario(tmp_path, text), names=["decoupled", "head"], processes=1)
    assert (apart.tokens, apart.devices, apart.draft_devices) == (head.tokens, head.devices, head.draft_devices)
    assert head.metrics.acceptance_length > apart.metrics.acceptance_length
    drafting = [{span.actor.partition("-")[0] for span in one.spans if span.what == "draft"} for one in (apart, head)]
    assert drafting == [{"draft_model"}, {"draft_model", "verifier"}]
