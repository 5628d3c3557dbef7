"""Whole training steps of scenarios, and skills that a training measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specactor_ray.cli.main import app
from specactor_ray.plan.hardware import find_model
from specactor_ray.simulation.comparison import compare
from specactor_ray.simulation.scenario import load_scenario, measured_skills
from specactor_ray.simulation.training import flops_per_token, training_seconds
from tests.refused import refused
from tests.unit.simulation.scenarios import write_scenario

UPDATE = ["training.utilisation=0.5", "training.forwards=2", "training.fixed_s=3", "training.sync_gb_s=10"]


def test_the_seconds_of_a_step_by_hand(tmp_path: Path) -> None:
    """7.07e9 weights in matrix products, 8 + 4 FLOPs of each per token, H100s of 989 TFLOP/s; 15.2 GB of weights."""
    scenario = load_scenario(write_scenario(tmp_path), UPDATE)
    update_s, sync_s = training_seconds(scenario, 10_000, {0: 3})
    tokens = 10_000 + 16 * 32
    assert update_s == pytest.approx(3 + 12 * 7.07e9 * tokens / (3 * 989e12 * 0.5), rel=1e-3)
    assert sync_s == pytest.approx(15.23 / 10, rel=1e-3)
    model = find_model("qwen2.5-7b")
    assert [flops_per_token(model, *one) / flops_per_token(model, 0, False) for one in ((0, True), (1, True))] == [
        pytest.approx(8 / 6),
        pytest.approx(10 / 6),
    ]
    assert training_seconds(load_scenario(write_scenario(tmp_path)), 10_000, {0: 3}) == (0.0, 0.0)


def test_steps_are_compared_with_the_update_of_the_same_tokens_per_gpu(tmp_path: Path) -> None:
    """Rollouts are those without a training; the ratio of steps follows from seconds (Amdahl)."""
    path, names = write_scenario(tmp_path), ["plain", "decoupled"]
    (alone,), (point,) = (compare(path, items, names, processes=1)["points"] for items in ([], UPDATE))
    assert alone["step_ratios"] == alone["ratios"] == point["ratios"]
    plain, decoupled = point["results"]
    assert plain["rollout_s"] == alone["results"][0]["rollout_s"]
    assert plain["update_s"] == decoupled["update_s"] > 3 and plain["devices"] == decoupled["devices"] == 3
    shared = plain["update_s"] + plain["sync_s"]
    expected = (plain["rollout_s"] + shared) / (decoupled["rollout_s"] + shared)
    assert point["step_ratios"]["decoupled"] == pytest.approx(expected)
    assert decoupled["step_s"] == pytest.approx(decoupled["rollout_s"] + shared)


@pytest.mark.parametrize(
    "items",
    [
        ["workload.arrival=continuous"],
        ["config.target.gpus=0", "config.target.cores=2", "config.target.backend=hf", "machines.0.gpus=0"],
    ],
)
def test_what_has_no_steps_or_no_flops_is_refused_before_the_rollout(tmp_path: Path, items: list[str]) -> None:
    with refused("training.utilisation"):
        training_seconds(load_scenario(write_scenario(tmp_path), [*UPDATE, "config.mode=plain", *items]), 0, {0: 1})
    with refused("training.utilisation"):
        compare(write_scenario(tmp_path), [*UPDATE, "workload.arrival=continuous"], ["plain"], processes=1)


def report(folder: Path, **third: Any) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps({"thirds": [{"judged": {"suffix": [9, 0]}, "supplied": [0, 9]}, third]}))
    return path


def test_measured_acceptance_sets_the_means_of_skills(tmp_path: Path) -> None:
    """The last third counts; coverage is known only where one method drafted."""
    scenario = load_scenario(write_scenario(tmp_path), ["skills=[{method: draft_model}, {method: suffix}]"])
    one = report(tmp_path, judged={"suffix": [200, 90], "eagle": [0, 0]}, supplied=[30.0, 40.0])
    assert measured_skills(one, scenario.skills) == ["skills.1.mean=0.4500", "skills.1.coverage=0.7500"]
    two = report(tmp_path, judged={"suffix": [200, 90], "draft_model": [100, 70]}, supplied=[40.0, 40.0])
    assert measured_skills(two, scenario.skills) == ["skills.0.mean=0.7000", "skills.1.mean=0.4500"]


def test_the_command_simulates_with_what_was_measured(tmp_path: Path) -> None:
    """What the command line sets comes first."""
    measured = report(tmp_path, judged={"draft_model": [100, 20]}, supplied=[40.0, 40.0])
    command = ["simulate", "run", "-c", str(write_scenario(tmp_path)), "--processes", "1", "--compare", "plain,coupled"]
    lengths = []
    for more in ([], ["skills.0.mean=0.9"]):
        done = CliRunner(env={"COLUMNS": None}).invoke(app, [*command, "--acceptance", str(measured), *UPDATE, *more])
        assert done.exit_code == 0, done.output
        assert "measured: skills.0.mean=0.2000" in done.stdout and "rollout share" in done.stdout
        rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["coupled"]]
        lengths.append(float(rows[0][-1]))
        assert float(rows[1][4]) == pytest.approx(sum(map(float, rows[1][1:4])), abs=0.2)
    assert lengths[0] < 1.4 < 2.0 < lengths[1]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"thirds": []}', '{"thirds": [{"by_method": {}}]}', '{"thirds": [{"judged": {"suffix": 3}}]}'],
)
def test_a_file_without_acceptance_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    skills = load_scenario(write_scenario(tmp_path)).skills
    with refused("--acceptance", "bench train"):
        measured_skills(path, skills)
    with refused("--acceptance", "cannot be read"):
        measured_skills(tmp_path / "none.json", skills)
    with refused("--acceptance", "suffix", "draft_model"):
        measured_skills(report(tmp_path, judged={"suffix": [9, 3]}, supplied=[1, 2]), skills)
