"""`specactor bench`: the modes compared on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specactor_ray.cli.options import (
    ConfigFile,
    Overrides,
    finish,
    load_settings,
    parse_numbers,
    split_items,
)
from specactor_ray.cli.report import (
    difference_lines,
    draft_table,
    paced_table,
    reason_lines,
    speed_table,
    time_table,
)
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError

_PACED = "paced_32b"
"""Shipped configuration of `--paced`."""
bench = typer.Typer(help="Measure.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Keeps `rollout` a command of the group `bench`."""


@bench.command("rollout")
def bench_rollout(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="What to compare: plain; auto, as in rollout; coupled and (draft actors) decoupled with each method; "
            "fon with all. Default: plain,auto,coupled,decoupled; with --paced (several methods) fon in place of auto.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompts; may be repeated. Default: data.path.", show_default=False)
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="As in 0,1. Default: sampling.temperature.", show_default=False)
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes, as in 1,4,16. Default: target.max_batch.", show_default=False)
    ] = None,
    paced: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Forwards last as long as those of large models on this device, such as h100, and the simulator's "
            "figures are beside the measured ones. Default of --config: paced_32b.",
            show_default=False,
        ),
    ] = None,
    stretch: Annotated[
        float | None,
        typer.Option(help="Factor of all durations of --paced. Default: paced.stretch.", min=1, show_default=False),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Measurements of each variant, by turns; 1 gives no interval.", min=1)
    ] = 5,
    output: Annotated[
        Path | None, typer.Option(help="Report. Default: bench.json in a new run folder.", show_default=False)
    ] = None,
) -> None:
    """Compare the modes on the same prompts, seeds and cores, and conclude whether drafts pay; exit code 1 if any token
    differs from plain decoding."""
    items = [*(overrides or ()), "target.record_margins=true"]
    if paced is not None:
        config_file = config_file or Path(_PACED)
        items.append(f"paced.device={paced}")
    if stretch is not None:
        items.append(f"paced.stretch={stretch}")
    settings, progress = load_settings(config_file, items)
    if settings.paced.device is not None:
        races = ",fon" if len(settings.drafters) > 1 else ""
        modes, batch = modes or f"plain,coupled,decoupled{races}", batch or "1,4,16"
    elif stretch is not None:
        raise InputError("--stretch is for --paced, such as --paced h100")
    chosen = parse_modes(modes or "plain,auto,coupled,decoupled")
    batches = [settings.target.max_batch] if batch is None else parse_numbers("--batch", batch, int, 1)
    heats = parse_numbers("--temperatures", temperatures, float, 0) if temperatures else []
    from specactor_ray.bench.rollout_modes import all_identical, plan_workloads, run_bench

    workloads = plan_workloads(settings, prompts or (), heats)
    report = run_bench(settings, chosen, batches, workloads, output, progress, rounds)
    _show(report)
    finish(report["status"], all_identical(report))


@bench.command("train")
def bench_train(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    plain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Override for the plain rollout only, as in target.replicas=2; may be repeated.",
            show_default=False,
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE",
            help="A further rollout of each step, with this override, as in frozen:drafters.0.online.where=off; a name "
            "may be repeated.",
            show_default=False,
        ),
    ] = None,
    plain_every: Annotated[
        int, typer.Option(help="Steps from one plain rollout to the next, which give the pairs; 0: none.", min=0)
    ] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Report. Default: bench.json in the run's folder.", show_default=False)
    ] = None,
) -> None:
    """Train, and roll out every step twice, without drafts and with: the seconds of rollouts and of whole steps in
    pairs, and acceptance by epoch. Exit code 1 if any token differs from plain decoding."""
    settings, progress = load_settings(config_file, overrides)
    others = parse_also(also or ())
    from specactor_ray.bench.train import run_bench
    from specactor_ray.cli.bench_train_report import history_table, training_pairs_table, write_plot

    report = run_bench(settings, output, progress, plain or (), others, plain_every)
    console = make_console()
    if report["steps"]:
        if others:
            console.print(history_table(report["epochs"], report["drafted"]))
        for name, title in (("epochs", "by epoch"), ("thirds", "by third of the run")):
            console.print(training_pairs_table(report[name], title))
        for found in filter(None, (report["thirds"][-1][name] for name in ("rollout", "step"))):
            say(console, f"last third: {found['verdict']}")
        say(console, write_plot(report))
    say(console, f"{report['status']}: {len(report['steps'])} steps; report: {Path(report['output']).resolve()}")
    finish(report["status"], report["status"] == "complete" and not any(one["differences"] for one in report["steps"]))


def _show(report: Mapping[str, Any]) -> None:
    console, results = make_console(), report["results"]
    if not results:
        say(console, "interrupted before the first variant was measured; no report was written")
        return
    tables = speed_table(results), draft_table(results), time_table(results), paced_table(report)
    for table in filter(None, tables):
        console.print(table)
    if report["status"] == "interrupted":
        say(console, f"interrupted: the {len(results)} variants above were measured")
    for result in results:
        for line in reason_lines(result["failures"]):
            say(console, f"{result['variant']}, batch {result['batch']}, {result['workload']}:{line}")
    for line in difference_lines(results):
        say(console, line)
    for line in filter(None, (result["verdict"] for result in results)):
        say(console, line)
    say(console, f"report: {Path(report['output']).resolve()}")


def parse_also(items: Sequence[str]) -> dict[str, list[str]]:
    """`frozen:drafters.0.online.where=off` → overrides by name. Raises InputError for an item of another form."""
    found: dict[str, list[str]] = {}
    for item in items:
        name, _, override = item.partition(":")
        if not name.strip() or "=" in name or "=" not in override:
            form = "NAME:KEY=VALUE, as in frozen:drafters.0.online.where=off"
            raise InputError(f"--also: {item!r} has not the form {form}")
        found.setdefault(name.strip(), []).append(override.strip())
    return found


def parse_modes(text: str) -> list[str]:
    """`plain,decoupled` → modes to compare. Raises InputError for a name that is not a mode."""
    from specactor_ray.bench.variants import MODES

    names = split_items(text)
    if unknown := [name for name in names if name not in MODES]:
        raise InputError(f"--modes: {unknown[0]!r} is not a mode; the modes are {', '.join(MODES)}")
    return names
