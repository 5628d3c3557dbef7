"""Definitions of metrics, and what is exported of counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specactor_ray.cluster import metrics as exporting
from specactor_ray.core.metrics import METRICS, controller_rows, row

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_lists_every_metric() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, metric in METRICS.items():
        line = f"| `{name.removeprefix('specactor_')}` | {', '.join(metric.labels)} | {metric.help} |"
        assert line in page, f"docs/metrics.md lacks: {line}"


def test_counters_are_exported_as_increments_also_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Mock()
    counter.return_value.set_default_tags.return_value = counter
    monkeypatch.setattr(exporting, "Counter", counter)
    exporter = exporting.RayMetrics()
    for value in (0.0, 3.0, 3.0, 10.0, 2.0):
        exporter._record(row("specactor_steps_total", value, actor="verifier-0"))
    exporter._record(row("specactor_steps_total", 5.0, actor="verifier-1"))
    assert [call.args[0] for call in counter.inc.call_args_list] == [3.0, 7.0, 2.0, 5.0]


def test_a_failed_export_raises_nothing_and_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A health check exports, and must not fail by it."""
    monkeypatch.setattr(exporting, "INTERVAL_S", 0.0)
    monkeypatch.setattr(exporting.ray, "is_initialized", lambda: True)
    tried = []

    def broken() -> Any:
        tried.append(1)
        raise KeyError("steps")

    exporter = exporting.RayMetrics()
    for _ in range(2):
        exporter.export(broken, "r")
    assert len(tried) == 1


def test_phases_without_an_actor_are_zero() -> None:
    status = [{"kind": "drafter", "method": "ngram", "phase": "ready"}] * 2
    rows = list(controller_rows(status, {"ngram": 3}, ["pending", "ready"]))[2:]
    assert [(one.name, one.labels.get("phase"), one.value) for one in rows] == [
        ("specactor_actors", "pending", 0.0),
        ("specactor_actors", "ready", 2.0),
        ("specactor_drafters_wanted", None, 3.0),
    ]
