"""`specactor demo`, its table and its conclusions."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specactor_ray.cli.options import finish, progress_console
from specactor_ray.core.console import figures_table, make_console, say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import refuse_existing, require_folder


def demo(
    model: Annotated[str, typer.Option(help="Built in, a folder, or a Hugging Face id.")] = "smollm2-135m",
    minutes: Annotated[
        float, typer.Option(help="About how long it may take; five rounds and two steps at least.")
    ] = 3.0,
    skip_training: Annotated[bool, typer.Option("--skip-training", help="Measure only, for all of the time.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the report. Default: runs/demo-...", show_default=False)
    ] = None,
) -> None:
    """Measure plain decoding and mode auto side by side, then train a little with GRPO, on the CPUs of this machine.

    Ctrl-C ends it in order and shows what was measured until then. Exit code 1 if any output differs.
    """
    if not 0.0 < minutes < float("inf"):
        raise InputError(f"--minutes: {minutes:g} is no time; use more than 0")
    refuse_existing(output, "--output")
    from specactor_ray.models.loading import require_named_model

    require_named_model("--model", model)
    require_folder(output or Path("runs"), "--output")
    progress = progress_console("WARNING")
    from specactor_ray.bench.demo import Demo, run_demo
    from specactor_ray.bench.rollout_modes import all_identical
    from specactor_ray.cluster.names import new_run_name

    folder = output or Path("runs") / f"demo-{new_run_name()}"
    report = run_demo(Demo(model, minutes, folder.absolute(), progress, not skip_training))
    console = make_console()
    if not report["results"]:
        say(console, "nothing was measured")
        finish("interrupted")
    show(console, report)
    say(console, "Edits and tables repeat their prompts, which is where drafts pay; measure your own prompts next:")
    for command in _next_commands(model, folder, trained=report["training"] is not None):
        say(console, f"  {command}")
    finish(report["status"], report["status"] == "complete" and all_identical(report))


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


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Print answers, figures, and the conclusion."""
    for text in _answers(report, bool(console.color_system)):
        console.print(text, soft_wrap=True)
    caption = "±: standard error of a mean. The acceptance length, tokens per forward, is the most that drafts bring."
    if report["training"]:
        share = f"{report['training']['rollout_share']:.0%} of the step on this CPU"
        caption += f" In training, rollout takes {share}; on GPUs with long outputs most of it."
    title = f"demo: {report['model']}, {report['seconds']:.0f} s"
    console.print(figures_table(title, _rows(report), caption=caption))
    say(console, conclusion(report))


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    (plain, auto), training = report["results"], report["training"]
    yield "plain", f"{plain['tokens_per_s']:.1f} tokens/s"
    yield "auto", f"{auto['tokens_per_s']:.1f} tokens/s"
    interval = "" if auto["interval"] is None else " (95%: {:.2f} to {:.2f})".format(*auto["interval"])
    yield "auto / plain", f"{auto['ratio']:.2f}{interval} in {len(auto['rounds'])} rounds"
    yield "acceptance length", f"{auto['metrics']['acceptance_length']:.2f}"
    yield "identical outputs", f"{auto['requests'] - _differing(report)} of {auto['requests']}"
    if training is None:
        return
    rewards, lengths, held_out = training["rewards"], training["acceptance_lengths"], training["held_out"]
    if rewards:
        pair = _from_to(rewards[0], rewards[-1])
        yield "GRPO reward", f"{pair} in {training['steps']} steps of {training['samples']} samples"
    if len(held_out) == 2:
        yield "on other prompts", f"{_from_to(*held_out)}, {len(training['outputs'][0])} samples"
    yield "drafts right", f"{training['acceptance_rate']:.0%}; acceptance length {lengths[0]:.2f} to {lengths[-1]:.2f}"


def _from_to(before: tuple[float, float], after: tuple[float, float]) -> str:
    return " to ".join(f"{mean:.2f} ± {error:.2f}" for mean, error in (before, after))


def _answers(report: Mapping[str, Any], colours: bool) -> Iterator[Text]:
    """Yield an output with its draft tokens marked, and outputs before and after the training."""
    if example := report["example"]:
        begin, end, marks = ("", "", "in green") if colours else ("[", "]", "in brackets")
        yield Text.assemble(("Prompt: ", "bold"), f"{example['prompt'].splitlines()[0]} ...")
        parts = ((f"{begin}{text}{end}", "green") if drafted else text for text, drafted in example["pieces"])
        yield Text.assemble((f"Answer of auto, drafted tokens {marks}:\n", "bold"), *parts)
    outputs = (report["training"] or {}).get("outputs", ())
    if len(outputs) == 2:
        yield Text("Answers before and after training, same seeds, prompts that were not trained on", style="bold")
        for (before, low), (after, high) in islice(zip(*outputs, strict=True), 0, None, 4):
            yield Text(f"  {before.strip()!r} {low:.2f} -> {after.strip()!r} {high:.2f}")


def conclusion(report: Mapping[str, Any]) -> str:
    """The conclusion from the figures, in words."""
    auto = report["results"][1]
    if differing := _differing(report):
        return f"{differing} outputs differ from those of plain decoding: report this"
    same = "token for token the same"
    if auto["outcome"] != "noisy":
        return f"{auto['verdict']}, {same}"
    where = f"{len(auto['rounds'])} rounds, load average {report['load']:.1f}"
    return f"{auto['verdict']} ({where}): scripts/demo --minutes 6 --skip-training; {same}"


def _differing(report: Mapping[str, Any]) -> int:
    return sum(len(one["differences"]) for one in report["results"])
