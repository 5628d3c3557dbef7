"""`scripts/chaos --short`: every kind of fault once, on a real cluster, and nothing differs and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import KINDS, Schedule

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


def command(*options: str) -> subprocess.Popen[str]:
    arguments = ["env", "--default-signal=INT"]  # which is ignored where the tests run in the background
    arguments += [sys.executable, "-m", "tests.chaos", "--short", *options]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_streams_under_every_kind_of_fault_equal_a_calm_run(tmp_path: Path) -> None:
    process = command("--seed", "1", "--json", str(tmp_path / "chaos.json"))
    output = process.communicate(timeout=1700)[0]
    assert process.returncode == 0, output
    (stage,) = json.loads((tmp_path / "chaos.json").read_text())["stages"]
    assert set(stage["by_kind"]) == set(KINDS)
    assert all(kind["recovered"] == kind["injected"] == 1 for kind in stage["by_kind"].values())
    for kind in ("kill verifier", "kill drafter", "lose node", "out of memory"):
        assert stage["by_kind"][kind]["detected"] == 1, kind
    assert stage["compared"] > 0 and stage["figures"]["incarnations"] > 6
    assert "nothing left over" in output


def test_a_schedule_is_a_function_of_its_seed_and_has_every_kind() -> None:
    assert Schedule.draw(3, 60, 0.25) == Schedule.draw(3, 60, 0.25) != Schedule.draw(4, 60, 0.25)
    assert set(Schedule.draw(3, 60, 0.25).kinds) == set(KINDS)
    assert len(Schedule.draw(3, 5, 0.25).kinds) == 5
