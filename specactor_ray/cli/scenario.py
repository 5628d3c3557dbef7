"""`specactor simulate --config FILE`: the predicted speed of a scenario, per variant."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from specactor_ray.cli.options import finish
from specactor_ray.core.console import make_console, say, show_error
from specactor_ray.core.errors import EXIT_FAILED, InputError
from specactor_ray.core.files import make_folder, remove_if_empty, write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts

if TYPE_CHECKING:
    from specactor_ray.simulation.comparison import Compared, Sweep
    from specactor_ray.simulation.rollouts import Result

REPORT_FILE = "report.json"
_MOST_SHOWN = 6
"""Most runs that the progress bar names."""


@dataclass(frozen=True)
class ScenarioOptions:
    """Options of the command line."""

    config: Path
    overrides: Sequence[str] = ()
    compare: str | None = None
    """Names of variants, comma-separated."""
    oracle: bool = False
    sweep: str | None = None
    """`KEY=V1,V2,...`."""
    output: Path | None = None
    """Folder for the report, plots and traces."""
    report: Path | None = None
    """File for the report alone."""
    processes: int | None = None


def run_scenario(options: ScenarioOptions) -> None:
    """Simulate the variants, print their figures, write the requested files, and exit."""
    with signals_deferred():
        from specactor_ray.simulation.scenario import load_scenario

        # Mistakes in the file and in overrides are reported before Ray and numba are imported; a sweep may set missing
        # keys.
        load_scenario(options.config, options.overrides if options.sweep is None else ())
        from specactor_ray.simulation.comparison import (
            build_report,
            build_sweep_report,
            choose_variants,
            flattened,
            parse_sweep,
        )
        from specactor_ray.simulation.kernel import SimulationError

    names = parse_names(options.compare)
    sweep = parse_sweep(options.sweep) if options.sweep is not None else None
    first = [f"{sweep.key}={sweep.values[0]}"] if sweep is not None else []
    chosen = choose_variants(options.config, [*options.overrides, *first], names, options.oracle)
    for line in flattened(options.config, options.overrides, sweep, chosen):
        say(make_console(sys.stderr), f"note: {line}")
    made = make_folder(options.output, "--output", empty=True) if options.output is not None else []
    found: list[Compared] = []
    try:
        found = [one for one in _simulate(options, sweep, chosen) if one.results]
    except SimulationError as error:
        show_error(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        if not found:
            remove_if_empty(*made)
    console = make_console()
    if not found:
        say(console, "interrupted before the first variant had finished; nothing was written")
        finish("interrupted")
    if sweep is None:
        report = build_report(options.config, options.overrides, chosen, found[0].results, options.oracle)
        _show(report, console)
    else:
        report = build_sweep_report(sweep, options.config, options.overrides, chosen, found, options.oracle)
        _show_sweep(report, len(sweep.values), console)
    with signals_deferred():
        _write(options, report, found[0].results if sweep is None else (), console)
    finish(report["status"])


def plan_layout(config: Path, overrides: Sequence[str]) -> None:
    """Print the layout that the plan search chooses on the scenario's machines."""
    from specactor_ray.cli.plan_report import prediction_table
    from specactor_ray.simulation.planning import NOT_PLANNED, plan_scenario
    from specactor_ray.simulation.scenario import Arrival, load_scenario

    scenario = load_scenario(config, overrides)
    plan, console = plan_scenario(scenario), make_console()
    console.print(prediction_table(plan, shrinks=scenario.workload.arrival is Arrival.at_once))
    say(console, NOT_PLANNED)
    for line in (*plan.rejected, *plan.notes, plan.words()):
        say(console, line)


def parse_names(text: str | None) -> list[str] | None:
    """`plain,coupled` → the names; None, for all variants, from None. Raises InputError if there is no name."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--compare: {text!r} names no variant; give some, such as plain,decoupled")
    return names


def _simulate(options: ScenarioOptions, sweep: Sweep | None, names: Sequence[str]) -> list[Compared]:
    """All results, or those that were finished before an interruption."""
    from specactor_ray.simulation.comparison import compare_along

    with sigterm_interrupts(), PhaseProgress(make_console(sys.stderr), "simulating", 1.0) as progress:

        def show(shares: Mapping[str, float]) -> None:
            figures = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            if len(shares) > _MOST_SHOWN:
                figures = f"{sum(share == 1.0 for share in shares.values())} of {len(shares)} runs have ended"
            progress.update(sum(shares.values()) / len(shares), figures)

        overrides, processes = options.overrides, options.processes
        return compare_along(sweep, options.config, overrides, names, options.oracle, processes, show)


def _show(report: Mapping[str, Any], console: Console) -> None:
    from specactor_ray.cli.scenario_report import scenario_speed_table, scenario_work_table, verdict_lines

    if report["description"]:
        say(console, report["description"])
    say(console, report["workload"])
    console.print(scenario_speed_table(report))
    console.print(scenario_work_table(report))
    for line in verdict_lines(report):
        say(console, line)
    if report["part"] > 1:
        say(console, f"all figures are of 1/{report['part']} of the cluster")
    if report["status"] == "interrupted":
        say(console, f"interrupted: {len(report['results'])} finished and are shown")


def _show_sweep(report: Mapping[str, Any], values: int, console: Console) -> None:
    from specactor_ray.cli.scenario_report import sweep_table

    console.print(sweep_table(report))
    if len(report["points"]) < values or report["status"] == "interrupted":
        say(console, f"interrupted: {len(report['points'])} of {values} values have results")


def _write(options: ScenarioOptions, report: Mapping[str, Any], results: Sequence[Result], console: Console) -> None:
    """Write the report, plots and traces, and name the files."""
    from specactor_ray.cli.scenario_report import chrome_trace, trace_file, write_plots, write_sweep_plot

    written = []
    if options.report is not None:
        _write_json(options.report, report)
        written.append(options.report)
    folder = options.output
    if folder is not None:
        _write_json(folder / REPORT_FILE, report)
        written.append(folder / REPORT_FILE)
        plots = write_plots(folder, report["results"]) if "results" in report else write_sweep_plot(folder, report)
        written += [folder / name for name in plots]
        for result in results:
            if result.spans:
                path = folder / trace_file(result.variant)
                _write_json(path, chrome_trace(result.variant, [span._asdict() for span in result.spans]), indent=None)
                written.append(path)
        if not plots:
            say(console, "no plots: matplotlib is not installed (pip install matplotlib)")
    for path in written:
        say(console, f"written: {path.resolve()}")


def _write_json(path: Path, data: Mapping[str, Any], indent: int | None = 2) -> None:
    """Write a new file. Raises InputError if it exists or cannot be written."""
    try:
        write_json(path, data, indent, shared=True, new=True)
    except FileExistsError:
        raise InputError(f"{path} exists and is never overwritten; name another file") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None
