"""`specactor demo`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from specactor_ray.cli.options import finish, progress_console
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import require_folder


def demo(
    model: Annotated[str, typer.Option(help="Built in, a folder, or a Hugging Face id.")] = "smollm2-135m",
    minutes: Annotated[
        float, typer.Option(help="About how long it may take; two rounds and two steps at least.")
    ] = 3.0,
    skip_training: Annotated[bool, typer.Option("--skip-training", help="Only plain and auto side by side.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="New folder for report and plot. Default: runs/demo-...", show_default=False)
    ] = None,
) -> None:
    """Measure plain decoding and mode auto side by side, then train a little with GRPO, on the CPUs of this machine.

    Ctrl-C ends it in order and shows what was measured until then. Exit code 1 if any output differs.
    """
    if not 0.0 < minutes < float("inf"):
        raise InputError(f"--minutes: {minutes:g} is no time; use more than 0")
    if output is not None and output.exists():
        raise InputError(f"--output: {output} exists and is never overwritten; name another folder")
    from specactor_ray.rollout.preflight import require_named_model

    require_named_model("--model", model)
    require_folder(output or Path("runs"), "--output")
    progress = progress_console("WARNING")
    from specactor_ray.bench.demo import Demo, run_demo
    from specactor_ray.bench.demo_report import demo_table, verdict_lines
    from specactor_ray.cluster.names import new_run_name

    folder = output or Path("runs") / f"demo-{new_run_name()}"
    report = run_demo(Demo(model, minutes, folder.absolute(), progress), training=not skip_training)
    console = make_console()
    console.print(demo_table(report))
    for line in verdict_lines(report):
        say(console, line)
    if report["speed"] is None:
        finish("interrupted")
    say(console, f"plot: {report['plot'] or 'none, as matplotlib is not installed (pip install matplotlib)'}")
    say(console, "Edits and tables repeat their prompts, which is where drafts pay; measure your own prompts next:")
    for command in _next_commands(model, folder, trained=report["training"] is not None):
        say(console, f"  {command}")
    identical = report["speed"]["identical"] == report["speed"]["requests"]
    finish(report["status"], report["status"] == "complete" and identical)


def _next_commands(model: str, folder: Path, trained: bool) -> list[str]:
    specactor = (
        "specactor" if shutil.which("specactor") else os.path.relpath(Path(sys.executable).with_name("specactor"))
    )
    return [
        f"{specactor} bench rollout target.model={model} data.path=PROMPTS.jsonl",
        f"{specactor} train --config {folder}/training/config.yaml resume=auto trainer.steps=60"
        if trained
        else f"{specactor} train target.model={model} data.path=TASKS.jsonl data.n=8",
        f"{specactor} config --help-keys speculation",
    ]
