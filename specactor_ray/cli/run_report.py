"""`specactor report`: tables and plots of runs, made again from the files in their folders."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specactor_ray.cli.report import (
    alarm_lines,
    ladder_table,
    reason_lines,
    rollout_table,
    sparkline,
    timeline_table,
    training_table,
    trainings_table,
)
from specactor_ray.config.schema import RunConfig
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import expanded, refuse_existing, require_folder
from specactor_ray.core.signals import signals_deferred

if TYPE_CHECKING:
    from specactor_ray.cli.run_files import RunFiles

_RUNS = Path(RunConfig().dir)
PLOT_FILE, PLOT_OF_SEVERAL = "training.png", "trainings.png"


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Folders of runs, or names in --run-dir.")],
    step: Annotated[
        int | None, typer.Option(help="Step for the timeline. Default: the slowest one.", show_default=False)
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder of the runs that are named.")] = _RUNS,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for the plot. Default: training.png in the run's folder; of several runs trainings.png in that "
            "of the first.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the figures of a rollout's drafts, too.")] = False,
) -> None:
    """Show the results of runs from their files: tables, and for trainings a plot and the timeline of a step.

    The runs may have ended, still run, or have been killed. Curves of several trainings are drawn over each other.
    """
    run_dir, output = expanded(run_dir), None if output is None else expanded(output)
    refuse_existing(output, "--output")
    if output is not None:
        require_folder(output.parent, "--output")
    with signals_deferred():
        from specactor_ray.cli.run_files import DAMAGE, find_run, read_run

    found, console = [read_run(find_run(name, run_dir)) for name in dict.fromkeys(runs)], make_console()
    trainings = [run for run in found if run.records]
    if step is not None and len(trainings) != 1:
        raise InputError(f"--step is for one training run, and {len(trainings)} of these runs are such")
    for run in found:
        if run.summary and not run.records:
            try:
                show_rollout(console, run.summary, run.folder, verbose)
            except DAMAGE as error:
                problem = f"{type(error).__name__}: {error}"
                raise InputError(f"{run.folder}: its summary.json is not that of a rollout ({problem})") from None
        elif not run.records:
            say(console, f"rollout {run.name} ({run.status}): {run.trajectories:,} trajectories, and no summary yet")
    if len(trainings) == 1:
        show_training(console, trainings[0], step, output)
    elif trainings:
        from specactor_ray.cli.training_plot import plot_trainings

        console.print(trainings_table((run.name, run.status, len(run.records), run.results) for run in trainings))
        say(console, plot_trainings(trainings, output or trainings[0].folder / PLOT_OF_SEVERAL))


def show_training(console: Console, run: RunFiles, step: int | None = None, output: Path | None = None) -> None:
    """Table, curve of rewards, timeline and plot of a training run, and its best checkpoint. Raises InputError for a
    step without a timeline."""
    from specactor_ray.cli.training_plot import plot_training, series

    slowest = run.step(step)
    done, planned = run.records[-1]["step"], run.planned_steps
    steps = f"{done}, {run.status}" if planned is None else f"{done} of {planned}, {run.status}"
    console.print(training_table(run.name, run.results, run.totals, steps))
    _, rewards = series(run.records, "train", "reward_mean")
    if len(rewards) > 1 and not console.options.ascii_only:
        say(console, f"  reward by step: {sparkline(rewards)} {min(rewards):.3f} to {max(rewards):.3f}")
    if slowest is not None:
        console.print(timeline_table(slowest))
    say(console, plot_training(run, slowest, output or run.folder / PLOT_FILE))
    if (best := run.best_checkpoint()) is not None:
        weights = shlex.quote(str(best / "weights"))
        say(console, f"the best checkpoint: specactor rollout target.model={weights} data.path=PROMPTS.jsonl")


def show_rollout(console: Console, summary: Mapping[str, Any], folder: Path, verbose: bool) -> None:
    """Table of a rollout, reasons of failures, alarms of drafters, and its files."""
    console.print(rollout_table(summary, verbose))
    if verbose and (ladder := ladder_table(summary["actors"])) is not None:
        console.print(ladder)
    for line in (*reason_lines(summary["trajectories"]["failures"]), *alarm_lines(summary["drafters"])):
        say(console, line)
    if Path(summary["output"]).exists():
        say(console, f"trajectories: {summary['output']}")
    say(console, f"summary and configuration: {folder.resolve()}")
    say(console, f"drafts: {summary['drafts']}")
