"""The plan search on scenarios: what it chooses is nearly the best of what was simulated."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specactor_ray.cli.main import app
from specactor_ray.config.schema import ModeName
from specactor_ray.simulation.planning import plan_scenario
from specactor_ray.simulation.scenario import load_scenario

FOLDER = Path(__file__).parents[3] / "conf" / "simulation"

# Drafters per verifier → simulated tokens/s/GPU of `decoupled` at the same number of requests per GPU.
PAPER = {"1/4": 915.9, "1/3": 963.2, "1/2": 986.6, "2/3": 995.2, "1": 983.1}
FOUR = {"1/4": 231.3, "1/3": 232.5, "1/2": 238.7, "2/3": 239.2, "1": 240.9}
SIXTY_FOUR = {"1/4": 2051.7, "1/3": 2089.0, "1/2": 2097.0, "2/3": 2090.3, "1": 2041.4}


@pytest.mark.parametrize(
    ("name", "devices", "requests", "simulated"),
    [
        ("qwen32b_256xh100", 256, 8192, PAPER),
        ("qwen32b_5xh100", 65, 13 * 4, FOUR),
        ("qwen32b_5xh100", 65, 13 * 64, SIXTY_FOUR),
    ],
)
def test_the_chosen_ratio_is_within_2_percent_of_the_best(
    name: str, devices: int, requests: int, simulated: dict[str, float]
) -> None:
    plan = plan_scenario(load_scenario(FOLDER / f"{name}.yaml"), devices, requests)
    chosen = plan.chosen
    assert chosen.mode is ModeName.decoupled and plan.predictions[-1].mode is ModeName.plain
    ratio = Fraction(chosen.drafters, chosen.verifiers)
    nearest = min(simulated, key=lambda one: abs(Fraction(one) - ratio))
    assert simulated[nearest] > 0.98 * max(simulated.values()), (ratio, nearest)


def test_the_command_plans_the_whole_cluster() -> None:
    path = FOLDER / "qwen3_8b_8xh100.yaml"
    done = CliRunner().invoke(app, ["simulate", "plan", "-c", str(path), "part=2", "workload.requests=64"])
    assert done.exit_code == 0, done.output
    assert "batch 128 on 16 device(s)" in done.stdout and "over the whole rollout" in done.stdout
    assert "decoupled draft_model, " in done.stdout and ", plain " in done.stdout
    assert "coupled layouts are not planned" in done.stdout
