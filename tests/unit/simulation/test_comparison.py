"""Variants side by side: the same in every process, interrupted, refused; their report, plots and traces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from specactor_ray.cli.main import app
from specactor_ray.cli.scenario_report import (
    chrome_trace,
    phase_seconds,
    running_over_time,
    scenario_speed_table,
    scenario_work_table,
    sweep_table,
    trace_file,
    verdict_lines,
    write_plots,
    write_sweep_plot,
)
from specactor_ray.core.errors import ConfigError, InputError, SpecActorError
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.simulation.comparison import (
    Sweep,
    build_report,
    build_sweep_report,
    check_requests,
    compare_along,
    parse_sweep,
    simulate_variant,
)
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result, SimulatedRollouts
from specactor_ray.simulation.scenario import load_scenario
from specactor_ray.simulation.workload import RecordedRequest, Recording
from specactor_ray.simulation.world import World
from tests.unit.simulation.scenarios import SMALL, compare, write_scenario

NAMES = ["plain", "coupled", "decoupled"]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenario(tmp_path_factory.mktemp("scenario"))


@pytest.fixture(scope="module")
def results(scenario: Path) -> list[Result]:
    return compare(scenario, processes=1)


def die(*arguments: Any) -> None:
    os._exit(3)


def text_of(table: Table) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


SCATTERED = ", ".join(
    [
        "config.target.backend=vllm",
        "config.target.gpus=2",
        "config.target.tensor_parallel=2",
        "machines.nodes=5",
        "machines.gpus=1",
    ]
)
"""Enough GPUs, and no node with two of them."""


def report_of(scenario: Path, results: Sequence[Result], oracle: bool = False) -> dict[str, Any]:
    return build_report(scenario, [], NAMES, results, oracle)


def interrupt_after(count: int) -> Callable[[Mapping[str, float]], None]:
    """Raise KeyboardInterrupt once `count` variants are done."""

    def show(shares: Mapping[str, float]) -> None:
        if sum(share == 1.0 for share in shares.values()) >= count:
            raise KeyboardInterrupt

    return show


class TestComparing:
    def test_every_variant_ends_its_requests_and_the_order_is_that_of_the_names(
        self, scenario: Path, results: list[Result]
    ) -> None:
        assert [result.variant for result in results] == [result.mode for result in results] == NAMES
        assert [(result.devices, result.draft_devices) for result in results] == [(3, 0), (2, 0), (3, 1)]
        assert len({result.tokens for result in results}) == 1
        assert all(len(result.steps[0].ended_s) == 16 for result in results)
        turned = compare(scenario, names=["coupled", "plain", "coupled"], processes=1)
        assert [result.variant for result in turned] == ["coupled", "plain"]

    def test_processes_change_nothing(self, scenario: Path, results: list[Result]) -> None:
        seen: list[float] = []
        apart = compare(scenario, processes=2, on_progress=lambda shares: seen.append(sum(shares.values())))
        assert [result.digest for result in apart] == [result.digest for result in results]
        assert apart == results
        assert seen == sorted(seen)
        assert seen[-1] == 3.0

    def test_the_seed_decides(self, scenario: Path, results: list[Result]) -> None:
        (other,) = compare(scenario, ["seed=4"], ["decoupled"])
        assert other.digest != results[2].digest
        assert other.rollout_s != results[2].rollout_s

    @pytest.mark.parametrize("processes", [1, 2])
    def test_an_interruption_leaves_what_is_finished(self, scenario: Path, processes: int) -> None:
        finished = compare(scenario, processes=processes, on_progress=interrupt_after(1))
        assert len(finished) == 1
        assert finished[0].variant in NAMES[:processes]
        assert len(finished[0].steps[0].ended_s) == 16

    def test_an_interruption_before_the_first_result_leaves_none(self, scenario: Path) -> None:
        assert compare(scenario, processes=1, on_progress=interrupt_after(0)) == []

    @pytest.mark.parametrize("processes", [1, 2])
    def test_what_is_wrong_with_one_variant_ends_all(self, tmp_path: Path, processes: int) -> None:
        text = SMALL + f"  recorded: [workload.trajectories={tmp_path / 'none.jsonl'}]\n"
        path = write_scenario(tmp_path, text)
        with pytest.raises(InputError, match=r"workload\.trajectories: .*none\.jsonl cannot be read"):
            compare(path, names=["recorded", "plain"], processes=processes)

    def test_a_run_that_cannot_start_says_which(self, tmp_path: Path) -> None:
        path = write_scenario(tmp_path, SMALL + f"  crowded: [{SCATTERED}]\n")
        with pytest.raises(SimulationError, match="variant crowded: "):
            compare(path, names=["crowded", "plain"], processes=1)

    def test_a_process_that_dies_is_an_error(self, scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specactor_ray.simulation.jobs._run_job", die)
        with pytest.raises(SpecActorError, match=r"the process (plain|coupled) died with exit code 3"):
            compare(scenario, names=["plain", "coupled"], processes=2)

    def test_the_oracle_is_the_fastest_variant_by_a_clairvoyant(self, scenario: Path) -> None:
        found = compare(scenario, names=["plain", "coupled"], oracle=True, processes=1)
        assert [(result.variant, result.mode) for result in found[:2]] == [("plain", "plain"), ("coupled", "coupled")]
        limit = found[2]
        assert (limit.variant, limit.mode) == ("oracle", "coupled")
        assert limit == replace(simulate_variant(scenario, [], "coupled", clairvoyant=True), variant="oracle")
        assert limit.digest != found[1].digest and limit.tokens == found[1].tokens
        report = build_report(scenario, [], ["plain", "coupled"], found, oracle=True)
        assert report["status"] == "complete"
        assert report["of_oracle"]["oracle"] == 1.0
        assert report["of_oracle"]["plain"] == pytest.approx(1 / report["ratios"]["oracle"])
        assert "of oracle" in text_of(scenario_speed_table(report))

    def test_a_variant_cannot_have_the_name_of_the_oracle(self, tmp_path: Path) -> None:
        path = write_scenario(tmp_path, SMALL + "  oracle:\n")
        with pytest.raises(ConfigError, match=r"variants\.oracle"):
            compare(path, oracle=True)


class TestSweeps:
    SWEEP = Sweep("config.target.max_batch", ["2", "4"])

    def test_variants_are_compared_at_every_value(self, scenario: Path, results: list[Result], tmp_path: Path) -> None:
        names = ["plain", "decoupled"]
        found = compare_along(self.SWEEP, scenario, names=names)
        assert [one.value for one in found] == ["2", "4"]
        assert list(found[1].results) == [results[0], results[2]]
        assert found[0].results[0].tokens == results[0].tokens
        assert found[0].results[0].rollout_s > results[0].rollout_s
        report = build_sweep_report(self.SWEEP, scenario, [], names, found, oracle=False)
        assert report["status"] == "complete" and [point["value"] for point in report["points"]] == ["2", "4"]
        table = text_of(sweep_table(report))
        assert "tokens/s/GPU over config.target.max_batch" in table and "decoupled" in table
        assert write_sweep_plot(tmp_path, report) == ["sweep.png"]
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")

    def test_an_interruption_leaves_the_values_that_are_finished(self, scenario: Path) -> None:
        found = compare_along(
            self.SWEEP, scenario, names=["plain", "coupled"], processes=1, on_progress=interrupt_after(3)
        )
        assert [len(one.results) for one in found] == [2, 1]
        report = build_sweep_report(self.SWEEP, scenario, [], ["plain", "coupled"], found, oracle=False)
        assert report["status"] == "interrupted"
        assert "-" in text_of(sweep_table(report))

    @pytest.mark.parametrize("text", ["seed", "seed=", "=1,2", "seed=,"])
    def test_what_is_no_sweep_is_refused(self, text: str) -> None:
        with pytest.raises(InputError, match=r"--sweep: .* is not KEY=V1,V2"):
            parse_sweep(text)

    def test_the_command_writes_a_sweep(self, scenario: Path, tmp_path: Path) -> None:
        arguments = ["--config", str(scenario), "--compare", "plain", "--sweep", "seed=1,2"]
        done = CliRunner().invoke(app, ["simulate", *arguments, "--output", str(tmp_path / "out")])
        assert done.exit_code == 0, done.output
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "sweep.png"}
        assert json.loads((tmp_path / "out" / "report.json").read_text())["sweep"] == "seed"


class TestRequests:
    RECORDING = Recording([RecordedRequest("a", (1, 2), (3, 999), 4, {})], 1000)

    def test_requests_that_fit_are_served(self, scenario: Path) -> None:
        check_requests(load_scenario(scenario), World(cache_tokens=152, max_model_len=152), None)
        check_requests(load_scenario(scenario), World(cache_tokens=6, vocab_size=1000), self.RECORDING)

    def test_a_cache_that_holds_no_request_is_refused(self, scenario: Path) -> None:
        with pytest.raises(ConfigError, match=r"workload\.max_tokens: .* 152 .* holds 151\. Fix: .*cache_share"):
            check_requests(load_scenario(scenario), World(cache_tokens=151), None)
        with pytest.raises(ConfigError, match=r"workload\.trajectories: .* 6 tokens, .* holds 5"):
            check_requests(load_scenario(scenario), World(cache_tokens=5), self.RECORDING)

    def test_requests_longer_than_the_models_context_are_refused(self, scenario: Path) -> None:
        with pytest.raises(ConfigError, match=r"workload\.max_tokens: .* the model's context 151"):
            check_requests(load_scenario(scenario), World(max_model_len=151), None)

    def test_a_recording_of_another_vocabulary_is_refused(self, scenario: Path) -> None:
        with pytest.raises(InputError, match=r"holds token 999, .* has 999 tokens; set config\.target\.model"):
            check_requests(load_scenario(scenario), World(vocab_size=999), self.RECORDING)


class TestFigures:
    def test_streams_of_drafters_and_their_memory(self, scenario: Path, results: list[Result]) -> None:
        plain, _, decoupled = results
        assert (plain.peak_streams, plain.peak_stream_tokens, plain.peak_stream_bytes) == (0, 0, 0.0)
        assert 8 <= decoupled.peak_streams <= 16
        branches = 16 * 16 * 16
        assert decoupled.peak_streams * 32 < decoupled.peak_stream_tokens <= decoupled.tokens + 16 * 32 + branches

        world = World(stream_bytes_per_token=1e6)
        measured = SimulatedRollouts("decoupled", load_scenario(scenario), world).run()
        assert measured.peak_stream_bytes == measured.peak_stream_tokens * 1e6 > 0

    def test_ratios_are_per_device_and_need_the_baseline(self, scenario: Path, results: list[Result]) -> None:
        report = report_of(scenario, results)
        speeds = {one["variant"]: one["tokens"] / one["rollout_s"] / one["devices"] for one in report["results"]}
        assert report["ratios"] == pytest.approx({name: speeds[name] / speeds["plain"] for name in NAMES})
        partial = report_of(scenario, results[1:])
        assert (partial["status"], partial["ratios"]) == ("interrupted", {})
        assert "1.00*" not in text_of(scenario_speed_table(partial))

    def test_tables(self, scenario: Path, results: list[Result]) -> None:
        report = report_of(scenario, results)
        speed, work = text_of(scenario_speed_table(report)), text_of(scenario_work_table(report))
        assert "tokens/s/GPU" in speed and "1.00*" in speed
        assert "RL step s" not in speed and "of oracle" not in speed
        rows = {line.split()[0]: line.split() for line in work.splitlines() if line.split()[:1] and "%" in line}
        assert list(rows) == NAMES
        shares = [float(cell.rstrip("%")) for cell in rows["decoupled"] if cell.endswith("%")]
        assert sum(shares) == pytest.approx(100, abs=0.3)

    def test_rl_steps_have_updates_and_syncs(self, scenario: Path) -> None:
        overrides = ["steps.steps=2", "steps.update_tokens_per_s=500"]
        found = compare(scenario, overrides, ["decoupled"])
        report = build_report(scenario, overrides, ["decoupled"], found, False)
        (result,) = report["results"]
        assert "RL step s" in text_of(scenario_speed_table(report))
        phases = phase_seconds(result)
        assert phases["update"] > 3.0 and phases["sync"] > 0.0
        assert sum(phases.values()) == pytest.approx(sum(result["step_s"]))
        times, counts = running_over_time(result["steps"])
        assert (counts[0], counts[16], counts[17], counts[-1]) == (16, 0, 16, 0)
        assert times == sorted(times) and times[17] == pytest.approx(result["step_s"][0])

    def test_plots_are_optional(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert write_plots(tmp_path, []) == []
        assert list(tmp_path.iterdir()) == []


class TestTraces:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_trace_has_a_row_per_actor_and_no_overlap(self, results: list[Result], name: str) -> None:
        result = results[NAMES.index(name)]
        trace = chrome_trace(name, [span._asdict() for span in result.spans])
        assert trace == json.loads(json.dumps(trace))
        check_trace(trace)
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert len(spans) == len(result.spans)
        assert {event["name"] for event in spans} == ({"verify"} if name == "plain" else {"verify", "draft"})
        processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
        assert processes == (["verifiers", "drafters"] if name == "decoupled" else ["verifiers"])

    def test_rounding_makes_no_overlap_and_rows_are_in_natural_order(self) -> None:
        spans = [
            {"actor": "verifier-10", "what": "verify", "begin": 0.0, "end": 1.0000000006, "rows": 1, "positions": 2},
            {"actor": "verifier-10", "what": "verify", "begin": 1.0000000004, "end": 2.0, "rows": 1, "positions": 2},
            {"actor": "verifier-2", "what": "verify", "begin": 0.5, "end": 0.5, "rows": 1, "positions": 2},
        ]
        trace = chrome_trace("v", spans)
        check_trace(trace)
        names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
        assert names == ["verifier-2", "verifier-10"]

    def test_names_of_variants_make_no_folders(self) -> None:
        assert trace_file("a/b c-1.5") == "trace-a_b_c-1.5.json"


def check_trace(trace: Mapping[str, Any]) -> None:
    """Sorted complete events of known rows; those of one row do not overlap."""
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    assert all(event["dur"] >= 0.0 and event["args"]["positions"] >= 0 for event in spans)
    assert {(event["pid"], event["tid"]) for event in spans} == rows
    for row in rows:
        for before, after in pairwise(event for event in spans if (event["pid"], event["tid"]) == row):
            assert round(1e3 * (before["ts"] + before["dur"])) <= round(1e3 * after["ts"])


class TestCommand:
    def test_same_seed_same_table_and_report(self, scenario: Path, tmp_path: Path) -> None:
        arguments = ["simulate", "--config", str(scenario), "--processes", "1", "--json"]
        first, second = (CliRunner().invoke(app, [*arguments, str(tmp_path / name)]) for name in ("a.json", "b.json"))
        assert first.exit_code == second.exit_code == 0, first.output
        assert first.stdout.replace("a.json", "b.json") == second.stdout
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()

    def test_report_plots_and_traces_are_written_and_named(self, scenario: Path, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "out"
        arguments = ["--config", str(scenario), "--compare", "plain, decoupled", "--output", str(folder)]
        done = CliRunner().invoke(app, ["simulate", *arguments, "seed=5", "part=4", "workload.requests=8"])
        assert done.exit_code == 0, done.output
        files = {path.name for path in folder.iterdir()}
        assert files == {"report.json", "running.png", "phases.png", "trace-plain.json", "trace-decoupled.json"}
        assert all(str(folder / name) in done.stdout for name in files)
        assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in files if name.endswith(".png"))
        assert "of 1/4 of the cluster" in done.stdout and "Two verifiers and a drafter" in done.stdout
        report = json.loads((folder / "report.json").read_text())
        assert (report["seed"], report["part"], report["status"]) == (5, 4, "complete")
        assert report["overrides"] == ["seed=5", "part=4", "workload.requests=8"]
        assert [one["variant"] for one in report["results"]] == report["variants"] == ["plain", "decoupled"]
        assert report["scenario"] == str(scenario) and "python" in report["versions"]
        check_trace(json.loads((folder / "trace-decoupled.json").read_text()))

    def test_ctrl_c_prints_and_writes_what_is_finished(
        self, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def update(self: PhaseProgress, done: float, figures: str) -> None:
            if done > 0.5:
                raise KeyboardInterrupt

        monkeypatch.setattr(PhaseProgress, "update", update)
        arguments = ["--config", str(scenario), "--processes", "1", "--output", str(tmp_path / "out")]
        done = CliRunner().invoke(app, ["simulate", *arguments])
        assert done.exit_code == 130, done.output
        assert "interrupted: 1 finished" in done.stdout
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["status"] == "interrupted" and [one["variant"] for one in report["results"]] == ["plain"]

    def test_ctrl_c_before_the_first_result_leaves_nothing(
        self, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def update(self: PhaseProgress, done: float, figures: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(PhaseProgress, "update", update)
        arguments = ["--config", str(scenario), "--processes", "1", "--output", str(tmp_path / "new" / "out")]
        done = CliRunner().invoke(app, ["simulate", *arguments])
        assert done.exit_code == 130, done.output
        assert "nothing was written" in done.stdout
        assert list(tmp_path.iterdir()) == []

    def test_a_run_that_cannot_end_is_no_traceback(self, scenario: Path) -> None:
        done = CliRunner().invoke(
            app, ["simulate", "--config", str(scenario), "--compare", "coupled", *SCATTERED.split(", ")]
        )
        assert done.exit_code == 1
        assert isinstance(done.exception, SystemExit)
        assert "error: variant coupled: " in done.stderr

    def test_overrides_that_make_variants_alike_are_told(self, scenario: Path) -> None:
        arguments = ["--compare", "plain,coupled", "config.mode=plain", "workload.requests=2"]
        done = CliRunner().invoke(app, ["simulate", "--config", str(scenario), *arguments])
        assert done.exit_code == 0, done.output
        assert (
            "note: config.mode is the same in all variants now; coupled would have config.mode=coupled" in done.stderr
        )
        assert "workload.requests is the same" not in done.stderr
        assert "2 requests, " in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--batch", "1,4"], "--batch: does not go with --config; leave it out"),
            (["--validate", "--oracle"], "--oracle: does not go with --validate"),
            (["--plan", "--oracle"], "--oracle: does not go with --plan"),
            (["--processes", "0"], "--processes: 0 is too small"),
            (["--compare", "fast"], "no variant 'fast'. Fix: use some of: plain, coupled, decoupled."),
            (["--compare", ","], "--compare: ',' names no variant"),
            (["--json", "{folder}/full/x.json"], "x.json exists; name another file"),
            (["--output", "{folder}/full"], "full holds files, and none is overwritten; name another folder"),
            (["--output", "{folder}/full/x.json/out"], "cannot be written to"),
            (["workload.requsts=1"], "Did you mean workload.requests?"),
            (["workload.requests=-1"], "workload.requests: -1 is out of range"),
        ],
    )
    def test_bad_options_are_refused(self, scenario: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "x.json").touch()
        given = [one.format(folder=tmp_path) if "{folder}" in one else one for one in arguments]
        done = CliRunner().invoke(app, ["simulate", "--config", str(scenario), *given])
        assert isinstance(done.exception, ConfigError | InputError)
        assert expected in str(done.exception)

    def test_a_file_without_the_option_is_the_scenario(self, scenario: Path) -> None:
        done = CliRunner().invoke(app, ["simulate", str(scenario), "workload.requests=-1"])
        assert "workload.requests: -1 is out of range" in str(done.exception)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--compare", "plain"], "--compare: needs a scenario; add --config FILE"),
            (["--oracle"], "--oracle: needs a scenario"),
            (["--output", "out"], "--output: needs a scenario"),
            (["--batch", "1,4"], "--batch: needs --validate"),
            (["seed=1"], "seed=1: overrides are of a scenario; add --config FILE"),
            (["--json", "no/such/folder/x.json", "x.yaml"], "--json: there is no folder no/such/folder"),
            ([], "name a scenario"),
        ],
    )
    def test_options_of_scenarios_need_one(self, arguments: list[str], expected: str) -> None:
        done = CliRunner().invoke(app, ["simulate", *arguments])
        assert isinstance(done.exception, InputError)
        assert expected in str(done.exception)


class TestVerdict:
    @staticmethod
    def report(**ratios: float) -> dict[str, Any]:
        results = [
            {
                "variant": name,
                "devices": 4,
                "draft_devices": 1 if name == "decoupled" else 0,
                "acceptance_length": 1.0 if name == "plain" else 1.25,
            }
            for name in ratios
        ]
        variants = [name for name in ratios if name != "oracle"]
        return {"results": results, "ratios": ratios, "baseline": "plain", "device": "core", "variants": variants}

    def test_names_the_fastest_and_why_drafting_on_devices_of_its_own_loses(self) -> None:
        lines = list(verdict_lines(self.report(plain=1.0, coupled=1.2, decoupled=0.9)))
        assert lines == [
            "coupled is the fastest per core: 1.20 times plain.",
            "decoupled makes 0.90 of plain: 25% of its cores draft. Those that verify are 1.20 times as fast as those "
            "of plain, and break even at 1.33.",
        ]

    def test_plain_may_win(self) -> None:
        lines = list(verdict_lines(self.report(plain=1.0, coupled=0.8, oracle=1.5)))
        assert lines[0] == "plain is the fastest per core."
        assert lines[1].startswith("coupled makes 0.80 of plain: 1.25 tokens per request and step do not make up")

    def test_one_variant_is_no_comparison(self) -> None:
        assert not list(verdict_lines(self.report(plain=1.0)))
