"""The `specactor` command: parse, validate, call the library, choose the exit code.

Exit codes: 0 done; 1 it ran but failed (every prompt failed, tokens differ, or an unexpected error, with its
traceback); 2 a mistake in the command, the configuration, the input or the cluster; 130 interrupted.
Modules that import ray or torch are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from specactor_ray.cli.bench import bench
from specactor_ray.cli.demo import demo
from specactor_ray.cli.doctor import doctor, init
from specactor_ray.cli.drafter import drafter
from specactor_ray.cli.live import scale, status
from specactor_ray.cli.options import ConfigFile, Overrides, load_settings
from specactor_ray.cli.plan import plan
from specactor_ray.cli.report import config_keys_table
from specactor_ray.cli.run_report import report, show_rollout, show_training
from specactor_ray.cli.simulate import app as simulate
from specactor_ray.core.console import make_console, say, show_error
from specactor_ray.core.errors import EXIT_FAILED, EXIT_USER_ERROR, InputError, SpecActorError, UserError
from specactor_ray.core.machine import versions
from specactor_ray.core.signals import ignore_signals, signals_deferred

JOB_RUNS = "~/specactor-runs"
"""Default of `run.dir` inside a Ray job, on the node where the job's driver runs: Ray removes the job's own folder."""
_NO_UTF8 = re.compile("[\ud800-\udfff]")
"""What stands in arguments for bytes that are not UTF-8."""

app = typer.Typer(name="specactor", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    from specactor_ray.config import Config, load_config, to_yaml
    from specactor_ray.config.fields import matching_keys

    if help_keys:
        make_console().print(config_keys_table(matching_keys(Config, overrides or ())))
        return
    sys.stdout.write(to_yaml(load_config(config_file, overrides or ())))


def rollout(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the figures of the drafts, too.")] = False,
) -> None:
    """Roll out the prompts of data.path and write trajectories (JSONL) and a summary (JSON); with reward.functions they
    are scored.

    Trajectories go to trajectories.jsonl.partial in the run's folder as they end; the file is renamed when all have.
    """
    settings, progress = load_settings(config_file, overrides)
    with signals_deferred():
        from specactor_ray.runs.rollout import run_rollout
        from specactor_ray.trainer.rewards import row_scorer

    with row_scorer(settings) as scorer:
        outcome = run_rollout(settings, progress, scorer)
    show_rollout(make_console(), outcome.summary, outcome.folder, verbose)
    raise typer.Exit(outcome.exit_code)


def train(config_file: ConfigFile = None, overrides: Overrides = None) -> None:
    """Train the target on the tasks of data.path with reinforcement learning; writes metrics and checkpoints."""
    settings, progress = load_settings(config_file, overrides)
    with signals_deferred():
        from specactor_ray.cli.run_files import read_run
        from specactor_ray.trainer.run import train as run_training

    outcome = run_training(settings, progress)
    more = "; the same command with resume=auto continues" if outcome.status == "interrupted" else ""
    console = make_console()
    try:
        show_training(console, read_run(outcome.folder, outcome.summary))
    except InputError as problem:  # no step has ended, or its file was damaged meanwhile
        say(console, str(problem))
    say(console, f"{outcome.status}: {outcome.summary['steps']} steps; results: {outcome.folder}{more}")
    raise typer.Exit(outcome.exit_code)


def serve(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen at; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. Default: target.model.", show_default=False)
    ] = None,
) -> None:
    """Serve the target over HTTP: the endpoints of OpenAI, and those of vLLM that trainers use.

    The token of clients is read from SPECACTOR_API_KEY, or from the file that SPECACTOR_API_KEY_PATH names.
    Ctrl-C and SIGTERM let open requests end for some seconds, then end the run.
    """
    settings, progress = load_settings(config_file, overrides)
    try:
        with signals_deferred():
            from specactor_ray.serve.run import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "httptools"):
            raise
        fix = "install it: pip install fastapi httptools uvicorn prometheus-client"
        raise InputError(f"{error.name} is not installed; {fix}") from None
    run_server(settings, host, port, model_name, progress)


for command in (demo, init, doctor, config, rollout, train, report, serve, status, scale, plan):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(drafter, name="drafter")
app.add_typer(simulate, name="simulate")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: that of this process) and exit with its code.

    Modules in the current folder can be named as drafters and rewards; Ray passes the path on to its processes.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        put_current_folder_last()
        if strange := [one for one in given if _NO_UTF8.search(one)]:
            fix = "rename the file, or set a UTF-8 locale"
            raise InputError(f"{strange[0]!a} in the command line is not valid UTF-8; {fix}")
        if sum(one in ("--config", "-c") or one.startswith("--config=") for one in given) > 1:
            raise InputError("--config is given twice; give one file, and what differs as KEY=VALUE")
        app(args=given, prog_name="specactor")
    except SpecActorError as error:
        show_error(str(error))
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED)
    finally:
        atexit.register(ignore_signals)  # all is done; the final work of libraries must not be interrupted


def put_current_folder_last() -> None:
    """Put the current folder last on the search path: its modules can be drafters and rewards, but replace no module.

    A checkout from which the package itself runs keeps its place.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder has been removed; change to one that exists") from None
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if folder != package_root:
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    if folder not in sys.path:
        sys.path.append(folder)


def run_as_job(command: Sequence[str], arguments: Sequence[str]) -> None:
    """Run a command with its arguments on the cluster of this Ray job, which is RAY_ADDRESS there.

    `run.dir` comes before the arguments: they override it, the configuration file does not. `drafter` commands have no
    such key.
    """
    inside = command[0] != "drafter" and os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    main([*command, *([f"run.dir={JOB_RUNS}"] if inside else []), *arguments])


if __name__ == "__main__":
    main()
