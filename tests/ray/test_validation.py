"""`specactor simulate validate` on tiny models: what is measured and what is simulated are the same requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specactor_ray.cli.main import app
from specactor_ray.simulation import validation
from tests.tiny import tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_the_same_requests_are_measured_and_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "ROUNDS", 1)
    monkeypatch.setattr(validation, "CONTEXTS", (16, 32))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in tiny_prompts(4)))
    settings = [
        "target.backend=hf",
        f"target.model={tiny_target()}",
        "target.dtype=float32",
        "target.kv_cache_gb=0.05",
        "target.max_model_len=null",
        f"data.path={tmp_path / 'p.jsonl'}",
        "sampling.max_tokens=48",
        "speculation.verify=all",
    ]
    report_file = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["simulate", "validate", "--batch", "2", "--json", str(report_file), *settings])
    assert done.exit_code == 0, done.output
    assert "simulated against measured" in done.stdout and "median" in done.stdout
    report = json.loads(report_file.read_text())
    assert [point["variant"].split()[0] for point in report["points"]] == ["plain", "coupled", "decoupled"]
    plain, coupled, _decoupled = report["points"]
    assert plain["measured_length"] == plain["predicted_length"] == 1.0
    assert coupled["predicted_length"] == pytest.approx(coupled["measured_length"], rel=0.15)
    for point in report["points"]:
        assert point["measured"] > 0.0 and point["predicted"] > 0.0
        assert point["error"] == pytest.approx(point["predicted"] / point["measured"] - 1.0)
        assert point["measured_ms"].keys() == point["predicted_ms"].keys() == {"forward", "waiting", "protocol"}
    assert report["median_error"] <= report["max_error"]
