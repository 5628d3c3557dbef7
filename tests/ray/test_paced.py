"""`specactor bench rollout --paced` over Ray with tiny models: the same tokens, no sooner than the device, beside the
simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specactor_ray.actors.paced import paced_times
from specactor_ray.cli.main import app
from specactor_ray.config.schema import PacedConfig
from tests.tiny import tiny_draft, tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_modes_on_paced_devices_beside_the_simulator(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in tiny_prompts(8)))
    drafter = f"{{method: draft_model, model: {tiny_draft()}, dtype: float32}}"
    arguments = ["--paced", "h100", "--stretch", "2", "--batch", "2", "--rounds", "1", "--output", "bench.json"]
    keys = [
        f"target.model={tiny_target()}",
        "target.dtype=float32",
        "target.kv_cache_gb=0.05",
        "sampling.max_tokens=24",
    ]
    keys += [f"drafters=[{drafter},{{method: ngram}}]", f"data.path={prompts}", "cluster.pin_cores=false"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner(env={"COLUMNS": None}).invoke(app, ["bench", "rollout", *arguments, *keys])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "bench.json").read_text())
    results = {one["variant"].split(" 1x4")[0]: one for one in report["results"]}
    assert list(results) == ["plain", "coupled draft_model", "coupled ngram", "decoupled draft_model", "fon"]
    assert [one["gpus"] for one in results.values()] == [4, 4, 4, 5, 5]
    step_s = paced_times(PacedConfig("h100", 2.0)).target(1, 1, 0, 0)
    for one in results.values():
        assert one["requests"] == one["identical"] == 4, "the prompts of a batch of two"
        steps, length = one["metrics"]["steps"], one["metrics"]["acceptance_length"]
        assert one["seconds"] >= steps * step_s and one["ms_per_step"]["forward"] >= 1e3 * step_s
        assert one["simulated"]["tokens_per_s"] > 0.0 and 1.0 <= length <= 9.0
        assert one["simulated"]["forward_ms"] == pytest.approx(1e3 * step_s, rel=0.3)
    plain, drafted = results["plain"]["simulated"], results["decoupled draft_model"]["simulated"]
    assert plain["acceptance_length"] == 1.0 < drafted["acceptance_length"]
    assert plain["tokens_per_s"] < drafted["tokens_per_s"]
    assert "paced devices (h100)" in done.output and "per GPU" in done.output
