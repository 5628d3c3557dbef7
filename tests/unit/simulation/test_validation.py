"""The arithmetic of `specactor simulate validate`; tests/ray/test_validation.py runs it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specactor_ray.cli.main import app
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ConfigError
from specactor_ray.simulation.validation import Point, accuracy_of, median_round, variants_of

CONFIG = from_mapping({"drafters": [{"method": "ngram", "hosted": False}, {"method": "draft_model", "model": "m"}]})


def test_accuracy_is_that_of_tokens_behind_right_ones() -> None:
    """Tails of different lengths, right with 0.7 at each position."""
    rng = random.Random(0)
    drafted, accepted = [0] * 6, [0] * 6
    for _ in range(4000):
        length = rng.randrange(7)
        right = next((i for i in range(length) if rng.random() > 0.7), length)
        for position in range(length):
            drafted[position] += 1
            accepted[position] += position < right
    found = accuracy_of(CONFIG, {"drafted_by_position": drafted, "accepted_by_position": accepted})
    assert found.keys() == {"draft_model"}  # what lookups find is looked up
    assert found["draft_model"] == pytest.approx(0.7, abs=0.02)
    assert accuracy_of(CONFIG, {"drafted_by_position": [], "accepted_by_position": []}) == {"draft_model": 0.0}


def test_the_round_with_the_median_error_counts() -> None:
    points = [Point("hf", "plain", 1, 100.0, predicted, 1.0, 1.0, {}, {}) for predicted in (90.0, 150.0, 104.0)]
    assert median_round(points).predicted == 104.0
    assert median_round(points[:2]).predicted == 90.0


def test_every_mode_has_the_verifiers_own_cores() -> None:
    variants = list(variants_of(CONFIG, 4))
    assert [variant.label for variant in variants] == ["plain 1x1", "coupled 1x1", "decoupled 1x1 + 2"]
    assert {variant.config.target.max_batch for variant in variants} == {4}
    with pytest.raises(ConfigError, match=r"target\.max_batch"):
        list(variants_of(CONFIG, 0))


def test_an_interruption_shows_and_writes_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Iterator[Point]:
        yield Point("hf", "plain 1x1", 1, 100.0, 90.0, 1.0, 1.0, {}, {})
        raise KeyboardInterrupt

    monkeypatch.setattr("specactor_ray.simulation.validation.validate_simulator", interrupted)
    monkeypatch.setenv("COLUMNS", "120")
    report_file = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["simulate", "validate", "--json", str(report_file), "target.backend=hf"])
    assert done.exit_code == 130, done.output
    assert "plain 1x1" in done.stdout and "interrupted" in done.stdout
    report = json.loads(report_file.read_text())
    assert report["status"] == "interrupted" and report["median_error"] == pytest.approx(0.1)
