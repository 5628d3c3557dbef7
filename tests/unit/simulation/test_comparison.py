"""Variants side by side: the same in every process, interrupted, refused; their report and plots."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specactor_ray.cli.main import app
from specactor_ray.cli.simulate import speed_table, sweep_table, write_plot
from specactor_ray.core.errors import ConfigError, InputError, SpecActorError
from specactor_ray.simulation import comparison
from specactor_ray.simulation.comparison import compare
from tests.unit.simulation.scenarios import SMALL, results_of, write_scenario

NAMES = ["plain", "coupled", "decoupled"]
SCATTERED = [
    *("config.target.backend=vllm", "config.target.gpus=2", "config.target.tensor_parallel=2"),
    *("config.target.replicas=3", "machines.0.nodes=2", "machines.0.gpus=3"),
]
"""Enough GPUs for three verifiers, and two nodes, each with room for one."""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenario(tmp_path_factory.mktemp("scenario"))


@pytest.fixture(scope="module")
def found(scenario: Path) -> dict[str, Any]:
    return compare(scenario, processes=1)


def text_of(table: Any) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def simulate(*arguments: Any) -> Any:
    """Simulate in this process."""
    return CliRunner().invoke(app, ["simulate", "run", "--processes", "1", *map(str, arguments)])


def die(*job: Any) -> None:
    os._exit(3)


class TestComparing:
    def test_every_variant_ends_its_requests_in_the_order_of_the_names(
        self, scenario: Path, found: dict[str, Any]
    ) -> None:
        (point,) = found["points"]
        results = point["results"]
        assert [one["variant"] for one in results] == [one["mode"] for one in results] == NAMES
        assert [(one["devices"], one["draft_devices"]) for one in results] == [(3, 0), (2, 0), (3, 1)]
        assert len({one["tokens"] for one in results}) == 1 and all(len(one["ended_s"]) == 16 for one in results)
        speeds = {one["variant"]: one["tokens"] / one["rollout_s"] / one["devices"] for one in results}
        assert point["ratios"] == pytest.approx({name: speeds[name] / speeds["plain"] for name in NAMES})
        table = text_of(speed_table(point))
        assert "tokens/s/GPU" in table and "1.00*" in table
        rows = {words[0]: words[-1] for words in map(str.split, table.splitlines()) if words and words[0] in NAMES}
        assert rows == {one["variant"]: f"{one['acceptance_length']:.2f}" for one in results}

    @pytest.mark.usefixtures("forked")
    def test_processes_change_nothing_and_the_seed_decides(self, scenario: Path, found: dict[str, Any]) -> None:
        seen: list[float] = []
        apart = compare(scenario, processes=2, on_progress=lambda done, total: seen.append(done / total))
        assert apart["points"] == found["points"]
        assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0)
        (other,) = results_of(scenario, ["seed=4"], ["decoupled"])
        assert f"{other.digest:08x}" != found["points"][0]["results"][2]["digest"]

    @pytest.mark.usefixtures("forked")
    def test_an_interruption_leaves_no_process(self, scenario: Path) -> None:
        def interrupt(done: float, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compare(scenario, names=["plain", "coupled"], processes=2, on_progress=interrupt)
        assert not multiprocessing.active_children()

    @pytest.mark.usefixtures("forked")
    def test_an_error_or_the_end_of_one_process_ends_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_scenario(tmp_path, SMALL + "  long: [workload.max_tokens=200000]\n")
        with pytest.raises(ConfigError, match=r"workload\.max_tokens: .* 200,032 tokens, .* its context 100,000"):
            compare(path, names=["long", "plain"], processes=2)
        monkeypatch.setattr(comparison, "simulate_variant", die)
        with pytest.raises(SpecActorError, match=r"a process died .*--processes 1"):
            compare(path, names=["plain", "coupled"], processes=2)

    def test_variants_are_compared_at_every_value(self, scenario: Path, found: dict[str, Any], tmp_path: Path) -> None:
        sweep = ("config.target.max_batch", ["2", "4"])
        report = compare(scenario, names=["decoupled", "plain", "decoupled"], sweep=sweep, processes=1)
        (plain, _, decoupled), (small, whole) = found["points"][0]["results"], report["points"]
        assert whole["results"] == [decoupled, plain] and [small["value"], whole["value"]] == ["2", "4"]
        assert small["results"][1]["tokens"] == plain["tokens"]
        assert small["results"][1]["rollout_s"] > plain["rollout_s"]
        table = text_of(sweep_table(report))
        assert "tokens/s/GPU over config.target.max_batch" in table and "decoupled" in table
        assert write_plot(tmp_path, report) == f"plot: {tmp_path / 'sweep.png'}"


class TestCommand:
    def test_report_and_plot_are_written_and_named(self, scenario: Path, tmp_path: Path) -> None:
        folder, overrides = tmp_path / "new" / "out", ["seed=5", "part=4", "workload.requests=8"]
        done = simulate("-c", scenario, "--compare", "plain, decoupled", "--output", folder, "--quick", *overrides)
        assert done.exit_code == 0, done.output
        files = {path.name for path in folder.iterdir()}
        assert files == {"report.json", "running.png"}
        assert all(str(folder / name) in done.stdout for name in files)
        assert (folder / "running.png").read_bytes().startswith(b"\x89PNG")
        assert "of 1/4 of the cluster" in done.stdout and "Two verifiers and a drafter" in done.stdout
        report = json.loads((folder / "report.json").read_text())
        shorter = ["workload.prompt_tokens=8", "workload.median_tokens=10", "workload.max_tokens=30"]
        assert report["overrides"] == [*shorter, *overrides] and "python" in report["versions"]
        (point,) = report["points"]
        assert (point["seed"], point["part"]) == (5, 4)
        assert [one["variant"] for one in point["results"]] == ["plain", "decoupled"]

    def test_ctrl_c_writes_nothing(self, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*job: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(comparison, "simulate_variant", interrupt)
        done = simulate("--config", scenario, "--output", tmp_path / "new" / "out")
        assert done.exit_code and list(tmp_path.iterdir()) == []

    def test_plots_are_optional(self, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert write_plot(tmp_path, found) == "no plot: matplotlib is not installed (pip install matplotlib)"
        assert list(tmp_path.iterdir()) == []

    def test_a_run_that_cannot_end_is_no_traceback(self, scenario: Path) -> None:
        done = simulate("--config", scenario, "--compare", "coupled", *SCATTERED)
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
        assert "error: variant coupled: " in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--per-dollar"], "--per-dollar is for --sweep"),
            (
                ["--per-dollar", "--sweep", "config.target.replicas=1,2", "hardware=h20"],
                "machines.0.price: h20 has no price",
            ),
            (
                ["--per-dollar", "--sweep", "machines.0.price=0,1"],
                "machines.0.price: h100 has no price",
            ),
            (["--compare", "fast"], "no variant 'fast'. Fix: use some of: plain, coupled, decoupled."),
            (["--compare", ","], "--compare: ',' names no variant"),
            *((["--sweep", text], "is not KEY=V1,V2") for text in ("seed", "=1,2", "seed=,")),
            (["--output", "{folder}/full"], "full holds files, and none is overwritten; name another folder"),
            (["--output", "{folder}/full/x.json/out"], "cannot be written to"),
            (["workload.requsts=1"], "Did you mean workload.requests?"),
        ],
    )
    def test_bad_options_are_refused(self, scenario: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "x.json").touch()
        given = [one.format(folder=tmp_path) if "{folder}" in one else one for one in arguments]
        done = simulate("--config", scenario, *given)
        assert isinstance(done.exception, ConfigError | InputError)
        assert expected in str(done.exception)
