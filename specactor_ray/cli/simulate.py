"""`specactor simulate`: the product's own loops, dispatcher and controller on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from specactor_ray.cli.options import require_positive
from specactor_ray.cli.scenario import ScenarioOptions, plan_layout, run_scenario
from specactor_ray.cli.validate import run_validation
from specactor_ray.core.errors import InputError

_OF_SCENARIOS = ("--compare", "--oracle", "--sweep", "--output", "--processes", "--plan")
_OF_PLANS = ("--plan", "--config")


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
    plan: Annotated[
        bool,
        typer.Option("--plan", help="--config: choose verifiers and drafters by cost models; nothing is simulated."),
    ] = False,
    batch: Annotated[str, typer.Option(help="--validate: batch sizes.")] = "1,4,16",
) -> None:
    """Run the product's loops, dispatcher and controller on virtual time.

    No Ray, no models, no waiting: one deterministic thread per run.

    A file of conf/simulation is a scenario: predict how fast it is, one row per variant. The hardware is modelled, the
    decisions are the product's own. --output adds plots and a timeline per variant, which ui.perfetto.dev opens.
    """
    overrides = overrides or []
    if config is None and overrides and "=" not in overrides[0]:  # simulate conf/simulation/two_cores.yaml
        config, overrides = Path(overrides[0]), overrides[1:]
    given = _given_options(context)
    batch_given = [option for option in given if option == "--batch"]
    _refuse_output(output)
    if validate:
        _refuse([option for option in given if option in _OF_SCENARIOS], "does not go with --validate; leave it out")
        run_validation(config, overrides, batch, output)
    elif config is None:
        _refuse(batch_given, "needs --validate; add it, or leave it out")
        _refuse(given, "needs a scenario; add --config FILE")
        _refuse(overrides, "overrides are of a scenario; add --config FILE")
        raise InputError("name a scenario, such as conf/simulation/two_cores.yaml, or use --validate")
    elif plan:
        _refuse([option for option in given if option not in _OF_PLANS], "does not go with --plan; leave it out")
        plan_layout(config, overrides)
    else:
        _refuse(batch_given, "does not go with --config; leave it out")
        require_positive("--processes", processes)
        run_scenario(ScenarioOptions(config, overrides, compare, oracle, sweep, folder, output, processes))


def _given_options(context: typer.Context) -> list[str]:
    """Options given on the command line, such as `--oracle`."""
    options = [one for one in context.command.params if one.param_type_name == "option"]
    sources = {max(one.opts, key=len): context.get_parameter_source(one.name or "") for one in options}
    return [option for option, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]


def _refuse(given: Sequence[str], problem: str) -> None:
    """Raises InputError that names the first of these arguments, if there is one."""
    if given:
        raise InputError(f"{given[0]}: {problem}")


def _refuse_output(output: Path | None) -> None:
    if output is not None and output.exists():
        raise InputError(f"--json: {output} exists; name another file")
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"--json: there is no folder {output.parent}; make it first")
