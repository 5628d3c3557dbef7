"""The harness of `scripts/bench_*.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.bench.micro import cell

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
from specactor_ray.bench.micro import run_figures
run_figures({"quick": {"answer": lambda: 42.0}, "slow": {"never": lambda: 1 / 0}})
"""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (12345.6, "12,346"), (None, "-"), ("text", "text"), ({"a": 1.5, "b": 2}, "a 1.5, b 2")],
)
def test_cells_have_three_digits(value: Any, shown: str) -> None:
    assert cell(value) == shown


def test_groups_of_figures_are_shown_and_written_once(tmp_path: Path) -> None:
    (tmp_path / "figures.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def run(*arguments: str) -> Any:
        command = [sys.executable, "figures.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    done = run("quick", "--json", "out.json")
    assert done.returncode == 0 and "answer" in done.stdout and "42" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text()) == [{"figure": "answer", "value": 42.0}]
    for arguments, problem in (
        (("quick", "--json", "out.json"), "--json: out.json exists and is never overwritten"),
        (("medium",), "medium: no such group; there are quick, slow"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {problem}") and done.stderr.count("\n") == 1
