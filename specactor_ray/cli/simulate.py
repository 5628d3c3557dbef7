"""`specactor simulate`: the package's own loops, dispatcher and controller on virtual time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specactor_ray.cli.options import split_items
from specactor_ray.core import plot
from specactor_ray.core.console import make_console, make_table, say, show_error
from specactor_ray.core.errors import EXIT_FAILED, InputError
from specactor_ray.core.files import make_folder, remove_if_empty, write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts

app = typer.Typer(
    help="Predict the speed of rollouts: the package's own loops and controller on virtual time.", no_args_is_help=True
)
_LEFT: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
ScenarioFile = Annotated[Path, typer.Option("--config", "-c", help="Scenario: a file or shipped name (two_cores).")]
MeasuredFile = Annotated[
    Path | None,
    typer.Option(
        metavar="BENCH.JSON",
        help="Take the skills' means from the last third of this report of specactor bench train.",
        show_default=False,
    ),
]
ScenarioOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides for all variants, as in seed=1.", show_default=False),
]


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
    output: Annotated[Path | None, typer.Option(help="Folder for the report and its plot; never overwritten.")] = None,
    processes: Annotated[int | None, typer.Option(help="Default: one per core.", min=1, show_default=False)] = None,
    acceptance: MeasuredFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Prompts and outputs of a quarter of the length.")] = False,
    per_dollar: Annotated[
        bool, typer.Option("--per-dollar", help="Table and plot of a sweep: tokens per dollar, not per device.")
    ] = False,
) -> None:
    """Predict how fast the variants of a scenario are, such as one of conf/simulation.

    The hardware is modelled, the decisions are the package's own. --output adds a plot.
    """
    overrides = overrides or []
    with signals_deferred():
        from specactor_ray.simulation.scenario import load_scenario, measured_skills

        # Reports mistakes before Ray and numba are imported; a sweep may set missing keys.
        scenario = load_scenario(config, overrides if sweep is None else ())
        measured = [] if acceptance is None else measured_skills(acceptance, scenario.skills)
        from specactor_ray.simulation import comparison
        from specactor_ray.simulation.kernel import SimulationError

    overrides = [*measured, *overrides]
    axis = parse_sweep(sweep, per_dollar)
    names = parse_names(compare)
    if quick:
        first = [f"{axis[0]}={axis[1][0]}"] if axis is not None else []
        overrides = [*comparison.quick_overrides(config, [*overrides, *first]), *overrides]
    made = make_folder(output, "--output", empty=True) if output is not None else []
    report: dict[str, Any] = {}
    try:
        with sigterm_interrupts(), PhaseProgress(make_console(sys.stderr), "simulating", 1.0) as progress:

            def show(done: float, total: int) -> None:
                progress.update(done / total, f"{int(done)} of {total} runs")

            report = comparison.compare(config, overrides, names, axis, processes, show, per_dollar)
    except SimulationError as error:
        show_error(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        if not report:
            remove_if_empty(*made)
    console = make_console()
    if measured:
        say(console, f"measured: {', '.join(measured)}")
    _show(report, console, per_dollar)
    if output is not None:
        with signals_deferred():
            _write(output, report, console, per_dollar)


def parse_names(text: str | None) -> list[str] | None:
    """`plain,coupled` → the names; None, for all variants, from None. Raises InputError if there is no name."""
    if text is None:
        return None
    names = split_items(text)
    if not names:
        raise InputError(f"--compare: {text!r} names no variant; give some, such as plain,decoupled")
    return names


def parse_sweep(text: str | None, per_dollar: bool = False) -> tuple[str, list[str]] | None:
    """Key and values of `KEY=V1,V2,...`; None from None. Raises InputError if there is no key, or no value, or no sweep
    to compare `per_dollar`."""
    if text is None:
        if per_dollar:
            raise InputError("--per-dollar is for --sweep; without it the table has tokens per device and per dollar")
        return None
    key, _, values = text.partition("=")
    found = split_items(values)
    if not key.strip() or not found:
        raise InputError(f"--sweep: {text!r} is not KEY=V1,V2,..., such as config.target.max_batch=16,64,256")
    return key.strip(), list(dict.fromkeys(found))


def _show(report: Mapping[str, Any], console: Console, per_dollar: bool) -> None:
    point = report["points"][0]
    if report["sweep"]:
        console.print(sweep_table(report, per_dollar))
    else:
        say(console, point["description"])
        console.print(speed_table(point))
        if (table := step_table(point)) is not None:
            console.print(table)
    if point["part"] > 1:
        say(console, f"all figures are of 1/{point['part']} of the cluster")


def _write(folder: Path, report: Mapping[str, Any], console: Console, per_dollar: bool) -> None:
    """Write the report and its plot, and name the files."""
    file = folder / "report.json"
    try:
        write_json(file, report, 2, new=True)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror})") from None
    say(console, f"report: {file.resolve()}")
    say(console, write_plot(folder, report, per_dollar))


# ---- tables and plots, from the plain data of reports ----


def speed_table(point: Mapping[str, Any]) -> Table:
    """Speed of each variant, and its ratio to the baseline."""
    device = point["device"]
    rows = (
        {
            "variant": result["variant"],
            f"{device}s": _count(result["devices"]),
            "drafting": _count(result["draft_devices"]),
            "rollout s": f"{result['rollout_s']:,.2f}",
            "tokens/s": f"{result['tokens_per_s']:,.0f}",
            f"tokens/s/{device}": f"{result['tokens_per_s_and_device']:,.1f}",
            "x": f"{point['ratios'][result['variant']]:.2f}" + "*" * (result["variant"] == point["baseline"]),
            **_dollars(point, result),
            "length": f"{result['acceptance_length']:.2f}",
        }
        for result in point["results"]
    )
    caption = (
        f"* baseline of x: tokens/s per {device}, drafting ones included.\n"
        "length: acceptance length, tokens per request and verify step."
    )
    if any(one["dollars_per_hour"] for one in point["results"]):
        caption += "\n$ x: tokens per dollar, relative to the baseline; prices are machines.N.price."
    return make_table(rows, "speed", text=("variant",), caption=caption, **_LEFT)


def _dollars(point: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
    """Columns of the price; none if no variant has one."""
    if not any(one["dollars_per_hour"] for one in point["results"]):
        return {}
    price = result["dollars_per_hour"]
    return {
        "$/h": "" if price is None else f"{price:,.2f}",
        "M tokens/$": _millions(result),
        "$ x": _times(point["dollar_ratios"][result["variant"]]),
    }


def step_table(point: Mapping[str, Any]) -> Table | None:
    """Parts of a training step of each variant, and its ratio to the baseline; None if the scenario has rollouts
    alone."""
    if not any(result["update_s"] for result in point["results"]):
        return None
    rows = (
        {
            "variant": result["variant"],
            **{f"{part} s": f"{result[f'{part}_s']:,.1f}" for part in ("rollout", "update", "sync", "step")},
            "rollout share": f"{result['rollout_s'] / result['step_s']:.0%}",
            "rollout x": f"{point['ratios'][result['variant']]:.2f}",
            "step x": f"{point['step_ratios'][result['variant']]:.2f}" + "*" * (result["variant"] == point["baseline"]),
        }
        for result in point["results"]
    )
    caption = f"* baseline of x: tokens per second and {point['device']}, of rollouts and of whole steps."
    return make_table(rows, "training step", text=("variant",), caption=caption, **_LEFT)


def sweep_table(report: Mapping[str, Any], per_dollar: bool = False) -> Table:
    """Tokens per second and device, or millions of tokens per dollar, of each variant at each value, and the ratio to
    the first."""
    first, key, rows = report["points"][0], report["sweep"], list[dict[str, str]]()
    ratios = "dollar_ratios" if per_dollar else "ratios"
    for point in report["points"]:
        rows.append({key: point["value"]})
        for result in point["results"]:
            name, speed = result["variant"], f"{result['tokens_per_s_and_device']:,.1f}"
            rows[-1][name] = _millions(result) if per_dollar else speed
            if name != first["baseline"]:
                rows[-1][f"{name}, x"] = _times(point[ratios][name])
    title = f"{'million tokens/$' if per_dollar else 'tokens/s/' + first['device']} over {key}"
    caption = f"x: relative to {first['baseline']}; drafting {first['device']}s are counted."
    return make_table(rows, title, text=(key,), caption=caption, **_LEFT)


def write_plot(folder: Path, report: Mapping[str, Any], per_dollar: bool = False) -> str:
    """Write `sweep.png`, the ratios at each value, or `running.png`, the unfinished requests over time. Returns a line
    for the user."""
    points, first = report["points"], report["points"][0]
    ratios, unit = ("dollar_ratios", "dollar") if per_dollar else ("ratios", first["device"])

    def sweep(axes: Any) -> None:
        for name in first[ratios]:
            axes.plot([point[ratios][name] for point in points], "o-", label=name, markersize=4)
        axes.set_xticks(range(len(points)), [point["value"] for point in points], fontsize=8)
        axes.set(xlabel=report["sweep"], ylabel=f"times {first['baseline']}, per {unit}")

    def running(axes: Any) -> None:
        for result in first["results"]:
            ended = sorted(result["ended_s"])
            axes.step([0.0, *ended], range(len(ended), -1, -1), where="post", label=result["variant"])
        axes.set(xlabel="seconds", ylabel="unfinished requests", xlim=(0, None), ylim=(0, None))

    file, panel = ("sweep.png", sweep) if report["sweep"] else ("running.png", running)
    return plot.write_plot(folder / file, panel, height=4.0)


def _millions(result: Mapping[str, Any]) -> str:
    tokens = result["tokens_per_dollar"]
    return "" if tokens is None else f"{tokens / 1e6:,.2f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _count(devices: float) -> str:
    return f"{devices:,.0f}" if devices == int(devices) else f"{devices:,.2f}"
