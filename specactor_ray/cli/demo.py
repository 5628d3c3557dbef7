"""`specactor demo`, its table and its conclusions."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from specactor_ray.cli.options import finish, progress_console
from specactor_ray.core.console import figures_table, make_console, say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import require_folder


def demo(
    model: Annotated[str, typer.Option(help="Built in, a folder, or a Hugging Face id.")] = "smollm2-135m",
    minutes: Annotated[
        float, typer.Option(help="About how long it may take; two rounds and two steps at least.")
    ] = 3.0,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the report. Default: runs/demo-...", show_default=False)
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
    progress = progress_console("INFO")
    from specactor_ray.bench.demo import Demo, run_demo
    from specactor_ray.cluster.names import new_run_name

    folder = output or Path("runs") / f"demo-{new_run_name()}"
    report = run_demo(Demo(model, minutes, folder.absolute(), progress))
    console = make_console()
    console.print(demo_table(report))
    say(console, verdict(report["speed"]))
    if report["speed"] is None:
        finish("interrupted")
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


def demo_table(report: Mapping[str, Any]) -> Table:
    """The figures, one per row."""
    return figures_table(f"demo: {report['model']}, {report['seconds']:.0f} s", _rows(report))


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    speed, training = report["speed"], report["training"]
    if speed is not None:
        yield "plain", f"{speed['plain_tokens_per_s']:.1f} tokens/s"
        yield "auto", f"{speed['auto_tokens_per_s']:.1f} tokens/s"
        error = "" if speed["error"] is None else f" ± {speed['error']:.2f}"
        yield f"ratio, {speed['rounds']} paired round(s)", f"{speed['ratio']:.2f}{error}"
        yield "acceptance length", f"{speed['acceptance_length']:.2f}"
        yield "identical outputs", f"{speed['identical']} of {speed['requests']}"
    if training is not None:
        rewards, lengths = training["rewards"], training["acceptance_lengths"]
        for number, (mean, error) in ((1, rewards[0]), (training["steps"], rewards[-1])):
            yield f"GRPO reward, step {number}", f"{mean:.2f} ± {error:.2f} ({training['samples']} samples)"
        yield "acceptance length, first and last step", f"{lengths[0]:.2f} and {lengths[-1]:.2f}"


def verdict(speed: Mapping[str, Any] | None) -> str:
    """The conclusion from the figures, in words: a difference within two standard errors counts as none."""
    if speed is None:
        return "nothing was measured"
    if speed["identical"] < speed["requests"]:
        return f"{speed['requests'] - speed['identical']} outputs differ from those of plain decoding: report this"
    ratio, error = speed["ratio"], speed["error"]
    if error is None:
        return "one round only: the ratio has no error"
    if abs(ratio - 1.0) <= 2.0 * error:
        return f"auto is as fast as plain decoding here, within the error ({ratio:.2f} ± {error:.2f})"
    return f"auto is {ratio:.2f} times as fast as plain decoding here, token for token the same"
