"""The `specactor` command: parse, validate, call the library, choose the exit code.

Exit codes: 0 done; 1 it ran but failed (every prompt failed, tokens differ, or an unexpected error, with its
traceback); 2 a mistake in the command, the configuration, the input or the cluster; 130 interrupted.
Modules that import ray or torch are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from specactor_ray.cli.demo import demo
from specactor_ray.cli.drafter import drafter
from specactor_ray.cli.options import ConfigFile, Overrides, finish, load_settings, parse_numbers, planned_side_by_side
from specactor_ray.cli.plan import plan, profile
from specactor_ray.cli.report import (
    alarm_lines,
    config_keys_table,
    cut_line,
    difference_lines,
    failed_prompts_line,
    ladder_table,
    reason_lines,
    rollout_table,
    speed_table,
    status_table,
    time_table,
)
from specactor_ray.cli.serve import serve
from specactor_ray.cli.setup import doctor, init
from specactor_ray.cli.simulate import simulate
from specactor_ray.cluster.module_path import put_current_folder_last
from specactor_ray.core.console import make_console, say, show_error
from specactor_ray.core.environment import versions
from specactor_ray.core.errors import EXIT_FAILED, EXIT_USER_ERROR, ConfigError, InputError, SpecActorError, UserError
from specactor_ray.core.signals import ignore_signals

SUBMITTABLE = {"train": "train", "rollout": "rollout", "bench": "bench rollout", "train-drafter": "drafter train"}
"""Name of a job → command that it runs."""
JOB_RUNS = "~/specactor-runs"
"""Default of `run.dir` inside a Ray job, on the node where the job's driver runs."""
JOB_DEFAULTS = ("cluster.address=auto", f"run.dir={JOB_RUNS}")
"""Overrides inside a Ray job. Ray removes the job's own folder when it ends."""

_MOST_PENDING = 3
"""Most draft actors without room that `scale` names."""

app = typer.Typer(
    name="specactor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(drafter, name="drafter")
app.command()(demo)
app.command()(init)
app.command()(doctor)
app.command()(serve)
app.command()(profile)
app.command()(plan)
app.command()(simulate)


def show_versions(wanted: bool) -> None:
    """Print versions of the package and of its dependencies, without importing them."""
    if wanted:
        sys.stdout.write("".join(f"{name} {version}\n" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def specactor(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_versions, help="Show versions and exit.")
    ] = False,
) -> None:
    """Lossless decoupled speculative decoding for RL rollouts, on Ray."""


Run = Annotated[str | None, typer.Option("--run", help="Name of the run. Default: the only one.", show_default=False)]
Address = Annotated[
    str, typer.Option("--address", envvar="RAY_ADDRESS", help="host:port of the Ray cluster, as the run printed it.")
]


@app.command()
def config(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    help_keys: Annotated[
        bool, typer.Option("--help-keys", help="Explain every key instead, or those with one of the words that follow.")
    ] = False,
) -> None:
    """Print the whole configuration, defaults included, as YAML.

    Some keys only: specactor config --help-keys speculation max_batch
    """
    from specactor_ray.config import load_config, to_yaml
    from specactor_ray.config.describe import matching_keys

    if help_keys:
        make_console().print(config_keys_table(matching_keys(overrides or ())))
        return
    sys.stdout.write(to_yaml(load_config(config_file, overrides or ())))


@app.command()
def rollout(config_file: ConfigFile = None, overrides: Overrides = None) -> None:
    """Roll out the prompts of data.path and write trajectories (JSONL) and a summary (JSON).

    Trajectories are written to OUTPUT.partial as they end; the file gets its own name when all have.
    """
    settings, progress = load_settings(config_file, overrides)
    from specactor_ray.runs.rollout import run_rollout

    outcome = run_rollout(settings, progress)
    console = make_console()
    console.print(rollout_table(outcome.summary))
    _show_ladder(console, outcome.summary["actors"])
    counts = outcome.summary["trajectories"]
    failed = failed_prompts_line(counts["failed_prompts"])
    alarms = alarm_lines(outcome.summary["drafters"])
    for line in (*reason_lines(counts["failures"]), *failed, *cut_line(counts), *alarms):
        say(console, line)
    if outcome.trajectories.exists():
        say(console, f"trajectories: {outcome.trajectories.resolve()}")
    say(console, f"summary and configuration: {outcome.folder.resolve()}")
    raise typer.Exit(outcome.exit_code)


@app.command()
def train(config_file: ConfigFile = None, overrides: Overrides = None) -> None:
    """Train the target on the tasks of data.path with reinforcement learning; writes metrics, checkpoints, a report."""
    settings, progress = load_settings(config_file, overrides)
    from specactor_ray.trainer.report import REPORT_FILE
    from specactor_ray.trainer.run import train as run_training

    outcome = run_training(settings, progress)
    more = "; the same command with resume=auto continues" if outcome.status == "interrupted" else ""
    report = outcome.folder / REPORT_FILE
    say(make_console(), f"{outcome.status}: {outcome.summary['steps']} steps; report: {report}{more}")
    raise typer.Exit(outcome.exit_code)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="train, rollout, bench or train-drafter.")],
    address: Annotated[
        str | None, typer.Option(help="Dashboard. Default: RAY_API_SERVER_ADDRESS or http://127.0.0.1:8265.")
    ] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="YAML file: pip, env_vars and so on.")] = None,
    follow: Annotated[bool, typer.Option(help="Show the log until the job ends; Ctrl-C stops the job.")] = True,
) -> None:
    """Run a command as a job on a Ray cluster that is up, with this folder as its own.

    What follows COMMAND goes to it: specactor submit train --config conf/train_local_cpu.yaml trainer.steps=20
    """
    if command not in SUBMITTABLE:
        raise InputError(f"{command!r} cannot be submitted; COMMAND is one of {', '.join(SUBMITTABLE)}")
    check_job_arguments(SUBMITTABLE[command].split(), context.args)
    from specactor_ray.cluster.submission import submit as submit_job

    code = submit_job(command, context.args, address, runtime_env, follow, make_console(sys.stderr))
    raise typer.Exit(code)


@app.command()
def scale(
    drafters: Annotated[
        list[str], typer.Argument(metavar="METHOD=N", help="Draft actors wanted, as in ngram=2; auto: as many as pay.")
    ],
    run: Run = None,
    address: Address = "auto",
) -> None:
    """Add or remove draft actors while a rollout runs (mode decoupled)."""
    wanted = parse_scale(drafters)
    from specactor_ray.rollout.run_client import scale_run

    name, rows = scale_run(run, wanted, address)
    console = make_console()
    shown = (f"{method}={'auto' if count is None else count}" for method, count in wanted.items())
    say(console, f"run {name}: wanted now {', '.join(shown)}")
    console.print(status_table(rows))
    pending = [row for row in rows if row["phase"] == "pending" and row["method"] in wanted]
    for row in pending[:_MOST_PENDING]:
        reason = f": it {row['note']}" if row["note"] else "."
        say(console, f"{row['id']} cannot start yet{reason} It starts when there is room.")
    if len(pending) > _MOST_PENDING:
        say(console, f"{len(pending) - _MOST_PENDING} more cannot start yet")


@app.command()
def status(
    run: Run = None,
    address: Address = "auto",
    watch: Annotated[bool, typer.Option("--watch", help="Show them until the run ends, or Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.")] = 2.0,
) -> None:
    """Show the actors of a run."""
    console = make_console()
    if watch:
        _watch(console, run, address, every)
        return
    from specactor_ray.rollout.run_client import status_of_run

    console.print(_status(*status_of_run(run, address)))


def _watch(console: Console, run: str | None, address: str, interval_s: float) -> None:
    """Redraw the status in a terminal, else print one status after the other."""
    if not 0.1 <= interval_s <= 3600.0:
        raise InputError(f"--every: {interval_s:g} is out of range; give seconds, 0.1 to 3600")
    from rich.live import Live

    from specactor_ray.rollout.run_client import watch_run

    name = None
    say(make_console(sys.stderr), "looking for the run")
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, vertical_overflow="visible")
        if console.is_terminal
        else contextlib.nullcontext() as live,
    ):
        for name, rows in watch_run(run, address, interval_s):
            if live is None:
                console.print(_status(name, rows))
            else:
                live.update(_status(name, rows), refresh=True)
        say(console, f"run {name} has ended")


def _status(name: str, rows: Sequence[Mapping[str, Any]]) -> Group:
    """The actors of a run, and the ladder of their draft methods."""
    ladder = ladder_table(rows)
    return Group(Text(f"run {name}"), status_table(rows), *([ladder] if ladder is not None else []))


def _show_ladder(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    ladder = ladder_table(rows)
    if ladder is not None:
        console.print(ladder)


@bench.command("rollout")
def bench_rollout(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    modes: Annotated[
        str,
        typer.Option(
            help="What to compare: plain, coupled and (draft actors) decoupled with each method, fon with all."
        ),
    ] = "plain,coupled,decoupled",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompts; may be repeated. Default: data.path.", show_default=False)
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="As in 0,1. Default: sampling.temperature.", show_default=False)
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes, as in 1,4,16. Default: target.max_batch.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens. Default: sampling.max_tokens.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Report. Default: bench.json in a new run folder.", show_default=False)
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="hf or vllm. Default: target.backend.", show_default=False)
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure vLLM as it is, too: plain, and its own ngram, suffix, eagle3, ...")
    ] = False,
) -> None:
    """Compare the modes on the same prompts, seeds and cores; exit code 1 if any token differs from plain decoding."""
    chosen_backend = [f"target.backend={backend}"] if backend is not None else []
    given = [*(overrides or ()), *chosen_backend, "target.record_margins=true"]
    settings, progress = load_settings(config_file, given)
    if max_tokens is not None:
        settings.sampling = replace(settings.sampling, max_tokens=max_tokens)
    chosen = parse_modes(modes)
    batches = [settings.target.max_batch] if batch is None else parse_numbers("--batch", batch)
    settings = planned_side_by_side(settings, progress)
    from specactor_ray.bench.comparison import all_identical
    from specactor_ray.bench.rollout_modes import plan_workloads, run_bench

    workloads = plan_workloads(settings, prompts or (), parse_temperatures(temperatures))
    report = run_bench(settings, chosen, batches, workloads, output, progress, peers)
    _show_bench(report)
    finish(report["status"], all_identical(report))


def _show_bench(report: dict) -> None:
    console = make_console()
    results = report["results"]
    if not results:
        say(console, "interrupted before the first variant was measured; no report was written")
        return
    console.print(speed_table(results))
    console.print(time_table(results))
    if report["status"] == "interrupted":
        say(console, f"interrupted: the {len(results)} variants above were measured")
    for result in results:
        for line in reason_lines(result["failures"]):
            say(console, f"{result['variant']}, batch {result['batch']}, {result['workload']}:{line}")
    for line in difference_lines(results):
        say(console, line)
    say(console, f"report: {Path(report['output']).resolve()}")


def parse_scale(items: Sequence[str]) -> dict[str, int | None]:
    """`["ngram=2"]` → `{"ngram": 2}`, None for `auto`. Raises InputError for an item that is not METHOD=N."""
    wanted: dict[str, int | None] = {}
    for item in items:
        method, separator, count = item.partition("=")
        if not (method and separator and (count.isdecimal() or count == "auto")):
            raise InputError(f"{item!r} is not METHOD=N with a whole number, 0 or more, or auto; for example ngram=2")
        wanted[method] = None if count == "auto" else int(count)
    return wanted


def parse_modes(text: str) -> list:
    """`plain,decoupled` → variants to compare. Raises InputError for a name that is not a mode."""
    from specactor_ray.bench.variants import BenchMode

    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in BenchMode.__members__]
    if unknown:
        raise InputError(f"--modes: {unknown[0]!r} is not a mode; the modes are {', '.join(BenchMode.__members__)}")
    return [BenchMode[name] for name in names]


def parse_temperatures(text: str | None) -> list[float]:
    """`0,1` → the numbers; empty for None. Raises InputError for an item that is not a number of 0 or more."""
    numbers = []
    for item in text.split(",") if text else ():
        try:
            number = float(item)
        except ValueError:
            number = -1.0
        if not 0.0 <= number < float("inf"):
            raise InputError(f"--temperatures: {item.strip()!r} is not a temperature; give numbers of 0 or more: 0,1")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def refuse_two_files(arguments: Sequence[str]) -> None:
    """Raises InputError if more than one configuration file is given, since the parser would use the last one."""
    if sum(argument in ("--config", "-c") or argument.startswith("--config=") for argument in arguments) > 1:
        raise InputError("--config is given twice; give one file, and what differs as KEY=VALUE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: that of this process) and exit with its code.

    Modules in the current folder can be named as drafters and rewards; Ray passes the path on to its processes.
    """
    put_current_folder_last()
    try:
        refuse_two_files(sys.argv[1:] if arguments is None else arguments)
        app(args=None if arguments is None else list(arguments), prog_name="specactor")
    except SpecActorError as error:
        show_error(str(error))
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED)
    finally:
        atexit.register(ignore_signals)  # all is done; the final work of libraries must not be interrupted


def run_as_job(command: Sequence[str], arguments: Sequence[str]) -> None:
    """Run a command on the present cluster: that of this Ray job, or of RAY_ADDRESS; without either, as usual.

    `cluster.address=auto`, and inside a job `run.dir`, come before the arguments: the arguments override them, the
    configuration file does not, so that a file made for one machine can be submitted to a cluster.
    `drafter` commands have no such keys, since they use no cluster.
    """
    if command[0] == "drafter":
        main([*command, *arguments])
        return
    in_job = bool(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"))
    outside = ("cluster.address=auto",) if os.environ.get("RAY_ADDRESS") else ()
    main([*command, *(JOB_DEFAULTS if in_job else outside), *arguments])


def check_job_arguments(command: Sequence[str], arguments: Sequence[str]) -> None:
    """Parse a job's arguments and configuration in the same way as the job, before anything is uploaded.

    Things that only the cluster may have (files by absolute paths, variables of its environment) are left to the job.

    Raises:
        ConfigError: The configuration is wrong.
        click.UsageError: An option is unknown or lacks its value.
    """
    from omegaconf.errors import InterpolationResolutionError

    from specactor_ray.config import load_config

    parser: Any = typer.main.get_command(app)
    for name in command:
        parser = parser.commands[name]
    defaults = () if command[0] == "drafter" else JOB_DEFAULTS
    given = parser.make_context(" ".join(command), [*defaults, *arguments]).params
    file = given.get("config_file")
    if command[0] == "drafter" or (file is not None and Path(file).is_absolute() and not Path(file).exists()):
        return
    try:
        load_config(file, given["overrides"] or ())
    except ConfigError as error:
        if not isinstance(error.__context__, InterpolationResolutionError):
            raise


if __name__ == "__main__":
    main()
