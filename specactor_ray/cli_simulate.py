"""`specactor simulate`: the product's own loops, dispatcher and controller on virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from specactor_ray.cli_scenario import ScenarioOptions, run_scenario
from specactor_ray.cli_validate import run_validation
from specactor_ray.errors import InputError

_OPTIONS: Mapping[str, Sequence[str]] = {
    "--published": (),
    "--validate": ("--config", "--batch", "--json"),
    "--config": ("--compare", "--oracle", "--sweep", "--output", "--processes", "--json"),
}
"""The jobs of this command, the first that is asked for, and the options of each."""


def simulate(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="--config: overrides, as in seed=1.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Scenario whose speed to predict.", show_default=False)
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="--config: variants, as in plain,decoupled. Default: all.", show_default=False)
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="--config: add a clairvoyant's decisions, the best ones step by step.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=V1,V2,...", help="--config: simulate at each of these values of a key.", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--output", help="--config: folder for the report, plots and traces; never overwritten."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes to run in. Default: one per core.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Report to write; never overwritten.")] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate", help="Measure this machine, simulate the same requests, and compare. --config: what to run."
        ),
    ] = False,
    batch: Annotated[str, typer.Option(help="--validate: batch sizes.")] = "1,4,16",
    published: Annotated[
        bool, typer.Option("--published", help="Only print the cost models against published measurements.")
    ] = False,
) -> None:
    """Run the product's loops, dispatcher and controller on virtual time.

    No Ray, no models, no waiting: one deterministic thread per run.

    A file of conf/simulation is a scenario: predict how fast it is, one row per variant. The hardware is modelled, the
    decisions are the product's own. --output adds plots and a timeline per variant, which ui.perfetto.dev opens.
    """
    given, overrides = given_options(context), overrides or []
    if config is None and overrides and "=" not in overrides[0]:  # simulate conf/simulation/two_cores.yaml
        config, overrides = Path(overrides[0]), overrides[1:]
        given.append("--config")
    refuse_misplaced(given, overrides)
    if processes is not None and processes < 1:
        raise InputError(f"--processes: {processes} is too small; use 1 or more")
    _refuse_output(output)
    if published:
        _show_published()
    elif validate:
        run_validation(config, overrides, batch, output)
    elif config is not None:
        run_scenario(ScenarioOptions(config, overrides, compare, oracle, sweep, folder, output, processes))
    else:
        raise InputError("name a scenario, such as --config conf/simulation/two_cores.yaml, or use --validate")


def given_options(context: typer.Context) -> list[str]:
    """Options that the command line names, as in `--oracle`."""
    given = [p for p in context.command.params if p.param_type_name == "option" and p.name is not None]
    return [
        max(one.opts, key=len)
        for one in given
        if getattr(context.get_parameter_source(one.name or ""), "name", "") == "COMMANDLINE"
    ]


def refuse_misplaced(given: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse options of another job than the one that is asked for.

    Raises:
        InputError: An option, or an override, goes with another job of this command.
    """
    job = next((name for name in _OPTIONS if name in given), None)
    for option in given:
        homes = [name for name, options in _OPTIONS.items() if option in options]
        if job is None and "--config" in homes:
            raise InputError(f"{option}: needs a scenario; add --config FILE")
        if job is None:
            raise InputError(f"{option}: needs {homes[0]}; add it, or leave {option} out")
        if option != job and job not in homes:
            raise InputError(f"{option}: does not go with {job}; leave it out")
    if overrides and job not in ("--validate", "--config"):
        raise InputError(f"{overrides[0]}: overrides are of a scenario; add --config FILE")


def _refuse_output(output: Path | None) -> None:
    if output is not None and output.exists():
        raise InputError(f"--json: {output} exists; name another file")
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"--json: there is no folder {output.parent}; make it first")


def _show_published() -> None:
    from specactor_ray.observability.console import make_console
    from specactor_ray.observability.simulation_report import show_published
    from specactor_ray.simulation.published import published_points

    show_published(make_console(), published_points())
