"""`specactor simulate`: the package's own loops, dispatcher and controller on virtual time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specactor_ray.cli.options import finish, parse_numbers, progress_console, require_positive
from specactor_ray.core.console import make_console, say, show_error
from specactor_ray.core.errors import EXIT_FAILED, ConfigError, InputError
from specactor_ray.core.files import make_folder, remove_if_empty, write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts

if TYPE_CHECKING:
    from specactor_ray.config.schema import Config
    from specactor_ray.simulation.comparison import Sweep
    from specactor_ray.simulation.rollouts import Result

app = typer.Typer(
    help="Predict the speed of rollouts: the package's own loops and controller on virtual time.", no_args_is_help=True
)
ScenarioFile = Annotated[Path, typer.Option("--config", "-c", help="Scenario: a file or shipped name (two_cores).")]
ScenarioOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides for all variants, as in seed=1.", show_default=False),
]
_OF_SCENARIOS = ("description", "hardware", "machines", "workload")
VALIDATED: Mapping[str, Any] = {
    "target": {"cores": 1, "max_model_len": 1024},
    "drafters": [{"method": "ngram", "hosted": False}],
    "sampling": {"max_tokens": 96, "seed": 7},
    "data": {"path": "conf/prompts/demo.jsonl"},
}
"""Configuration of `validate` without --config: SmolLM2 and n-gram drafts on two cores."""


@app.command()
def run(
    config: ScenarioFile,
    overrides: ScenarioOverrides = None,
    compare: Annotated[
        str | None, typer.Option(help="Variants, as in plain,decoupled. Default: all.", show_default=False)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=V1,V2,...", help="Simulate at each of these values of a key.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the report, plots and timelines; never overwritten.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Default: one per core.", show_default=False)] = None,
) -> None:
    """Predict how fast the variants of a scenario are, such as one of conf/simulation.

    The hardware is modelled, the decisions are the package's own. --output adds plots and a timeline per variant, which
    ui.perfetto.dev opens.
    """
    overrides = overrides or []
    require_positive("--processes", processes)
    with signals_deferred():
        from specactor_ray.simulation.scenario import load_scenario

        # Reports mistakes before Ray and numba are imported; a sweep may set missing keys.
        load_scenario(config, overrides if sweep is None else ())
        from specactor_ray.simulation import comparison
        from specactor_ray.simulation.kernel import SimulationError

    axis = parse_sweep(sweep) if sweep is not None else None
    first = [f"{axis.key}={axis.values[0]}"] if axis is not None else []
    names = comparison.choose_variants(config, [*overrides, *first], parse_names(compare))
    for line in comparison.flattened(config, overrides, axis, names):
        say(make_console(sys.stderr), f"note: {line}")
    made = make_folder(output, "--output", empty=True) if output is not None else []
    results: list[Result] = []
    try:
        with sigterm_interrupts(), PhaseProgress(make_console(sys.stderr), "simulating", 1.0) as progress:
            total = len(names) * (len(axis.values) if axis is not None else 1)
            report, results = comparison.compare(
                *(config, overrides, names, axis, processes),
                lambda done: progress.update(done / total, f"{done:.1f} of {total} runs"),
            )
    except SimulationError as error:
        show_error(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        if not results:
            remove_if_empty(*made)
    console = make_console()
    if not results:
        say(console, "interrupted before the first variant had finished; nothing was written")
        finish("interrupted")
    _show(report, console)
    if output is not None:
        with signals_deferred():
            _write(output, report, results, console)
    finish(report["status"])


@app.command()
def plan(config: ScenarioFile, overrides: ScenarioOverrides = None) -> None:
    """Choose verifiers and drafters for a scenario by its cost models; nothing is simulated."""
    from specactor_ray.cli.plan_report import prediction_table
    from specactor_ray.simulation.planning import NOT_PLANNED, plan_scenario
    from specactor_ray.simulation.scenario import Arrival, load_scenario

    scenario = load_scenario(config, overrides or ())
    found, console = plan_scenario(scenario), make_console()
    console.print(prediction_table(found, shrinks=scenario.workload.arrival is Arrival.at_once))
    say(console, NOT_PLANNED)
    for line in (*found.rejected, *found.notes, found.words()):
        say(console, line)


@app.command()
def validate(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Configuration to run. Default: SmolLM2 on two cores.", show_default=False),
    ] = None,
    overrides: ScenarioOverrides = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    output: Annotated[Path | None, typer.Option("--json", help="Report to write; never overwritten.")] = None,
) -> None:
    """Measure the configured engine on this machine, simulate the same requests, and compare. Needs an idle machine."""
    settings, batches = _load(config, overrides or []), parse_numbers("--batch", batch)
    if output is not None and output.exists():
        raise InputError(f"--json: {output} exists; name another file")
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"--json: there is no folder {output.parent}; make it first")
    progress, console = progress_console(settings.run.log_level), make_console()
    from specactor_ray.cli.simulation_report import validation_table
    from specactor_ray.core.environment import hardware
    from specactor_ray.simulation.validation import Point, report_of, validate_simulator

    points: list[Point] = []
    status = "complete"
    with sigterm_interrupts():
        try:
            for point in validate_simulator(settings, batches, progress):
                points.append(point)
        except KeyboardInterrupt:
            status = "interrupted"
    if not points:
        say(console, "interrupted before anything was measured; nothing was written")
        finish(status)
    report, machine = {**report_of(points), "status": status}, hardware()
    console.print(validation_table(report["points"]))
    median, largest = report["median_error"], report["max_error"]
    say(console, f"error of tokens/s: median {median:.1%}, at most {largest:.1%}, over {len(report['points'])} points")
    say(console, f"on {machine['cores']} cores of {machine['cpu']} ({', '.join(machine['vector'])})")
    if output is not None:
        write_json(output, {**report, "hardware": machine}, shared=True)
        say(console, f"written: {output.resolve()}")
    if status == "interrupted":
        say(console, "interrupted: what had been measured is shown")
    finish(status)


def parse_names(text: str | None) -> list[str] | None:
    """`plain,coupled` → the names; None, for all variants, from None. Raises InputError if there is no name."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--compare: {text!r} names no variant; give some, such as plain,decoupled")
    return names


def parse_sweep(text: str) -> Sweep:
    """`KEY=V1,V2,...`. Raises InputError if there is no key, or no value."""
    from specactor_ray.simulation.comparison import Sweep

    key, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not key.strip() or not found:
        raise InputError(f"--sweep: {text!r} is not KEY=V1,V2,..., such as config.target.max_batch=16,64,256")
    return Sweep(key.strip(), list(dict.fromkeys(found)))


def _show(report: Mapping[str, Any], console: Console) -> None:
    from specactor_ray.cli.simulation_report import speed_lines, speed_table, sweep_table, work_table

    point = report["points"][0]
    if report["sweep"]:
        console.print(sweep_table(report))
    else:
        for line in filter(None, (point["description"], point["workload"])):
            say(console, line)
        console.print(speed_table(point))
        console.print(work_table(point))
        for line in speed_lines(point):
            say(console, line)
    if point["part"] > 1:
        say(console, f"all figures are of 1/{point['part']} of the cluster")
    if report["status"] == "interrupted":
        finished = sum(len(one["results"]) for one in report["points"])
        say(console, f"interrupted: {finished} finished and are shown")


def _write(folder: Path, report: Mapping[str, Any], results: Sequence[Result], console: Console) -> None:
    """Write the report, plots and timelines, and name the files."""
    from specactor_ray.cli.simulation_report import timeline, timeline_file, write_plot

    data = {"report.json": report}
    if not report["sweep"]:
        data |= {timeline_file(one.variant): timeline(one.variant, one.spans) for one in results if one.spans}
    for name, content in data.items():
        try:
            write_json(folder / name, content, 2 if content is report else None, shared=True, new=True)
        except OSError as error:
            raise InputError(f"{folder / name} cannot be written ({error.strerror})") from None
    plot = write_plot(folder, report)
    for written in [*data, *plot]:
        say(console, f"written: {(folder / written).resolve()}")
    if not plot:
        say(console, "no plot: matplotlib is not installed (pip install matplotlib)")


def _load(config: Path | None, overrides: Sequence[str]) -> Config:
    from specactor_ray.config.load import from_mapping, load_config
    from specactor_ray.rollout.planning import as_decoupled

    if config is None:
        return as_decoupled(from_mapping(VALIDATED, overrides))
    try:
        return as_decoupled(load_config(config, overrides))
    except ConfigError as error:
        if error.key not in _OF_SCENARIOS:
            raise
        fix = "leave --config out, or name one such as conf/local_cpu.yaml."
        raise ConfigError(str(config), "is a scenario; `validate` takes the configuration of a run.", fix) from None
