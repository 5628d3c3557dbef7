"""Changes of acceptance that the policy has to notice, beside an oracle (`scripts/policy_streams.py`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_SPEC: Any = importlib.util.spec_from_file_location(
    "policy_streams", Path(__file__).parents[3] / "scripts" / "policy_streams.py"
)
streams = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(streams)


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "decoupled"])
@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("fall and return", 0.1),
        ("fall and return", 0.3),
        ("swap", 0.3),
        ("alternating", 0.3),
        ("slow drift", 0.1),
        ("untried better", 0.1),
        ("untried better", 0.3),
        ("steady 0.02", 0.3),
        ("steady 0.5", 0.1),
        ("steady 0.9", 0.3),
    ],
)
def test_little_is_lost_beside_an_oracle(name: str, slope: float, coupled: bool) -> None:
    """At most 5% where nothing changes and 15% in 100 steps after a change, and never 5% of plain decoding."""
    found = streams.measure(name, coupled, 16, slope, 1)
    assert (found["regret steady"] or 0.0) < 0.05
    assert found["regret after a change"] < 0.15
    assert found["worst 100 steps x plain"] > 0.95


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "decoupled"])
def test_the_better_model_gets_the_requests(coupled: bool) -> None:
    """Also again, after it was the worse one."""
    run = streams.run(streams.streams(coupled)["swap"], 16, 0.1, coupled)
    for end in (300, 600, 900):
        last = slice(end - 100, end)
        assert run.tokens[last].sum() / run.seconds[last].sum() > 1.5 * 16 / streams.V
