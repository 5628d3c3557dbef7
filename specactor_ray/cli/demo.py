"""`specactor demo`, its table and its conclusions."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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

_PROMPTS = 3
"""Prompts whose answers before and after training are shown."""
_LATE = 1.05
"""Share of the given time from which on the demo says that it took longer."""


def demo(
    model: Annotated[str, typer.Option(help="Built in, a folder, or a Hugging Face id.")] = "smollm2-135m",
    minutes: Annotated[
        float, typer.Option(help="About how long it may take; three rounds and two steps at least.")
    ] = 3.0,
    skip_training: Annotated[bool, typer.Option("--skip-training", help="Measure only, for all of the time.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the report. Default: runs/demo-...", show_default=False)
    ] = None,
) -> None:
    """Measure plain decoding and mode auto side by side, then train a little with GRPO, on the CPUs of this machine.

    Ctrl-C ends it in order and shows what was measured until then. Exit code 1 if any output differs.
    """
    began = time.monotonic()
    if not 0.0 < minutes < float("inf"):
        raise InputError(f"--minutes: {minutes:g} is no time; use more than 0")
    refuse_existing(output, "--output")
    from specactor_ray.models.loading import require_named_model

    require_named_model("--model", model)
    require_folder(output or Path("runs"), "--output")
    progress = progress_console("WARNING")
    from specactor_ray.bench.demo import REPORT_FILE, Demo, run_demo
    from specactor_ray.bench.rollout_modes import all_identical
    from specactor_ray.cluster.names import new_run_name

    folder = output or Path("runs") / f"demo-{new_run_name()}"
    report = run_demo(Demo(model, minutes, folder.absolute(), progress, not skip_training, began))
    console = make_console()
    if not report["results"]:
        say(console, "nothing was measured")
        finish("interrupted")
    show(console, report)
    say(console, f"report: {folder.absolute() / REPORT_FILE}")
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
    """Print answers, figures, and the conclusions."""
    training = report["training"] or {}
    _show_example(console, report["example"])
    if len(answers := training.get("answers", ())) == 2:
        title = f"Answers before and after {training['steps']} training steps, to prompts that were not trained on:"
        console.print(Text(title, style="bold"), soft_wrap=True)
        for line in _answer_lines(*answers):
            say(console, line)
    console.print(figures_table(f"demo: {report['model']}, {report['seconds']:.0f} s", _rows(report)))
    say(console, "±: standard error of a mean. Acceptance length: tokens of a forward, the most that drafts bring.")
    if training:
        share = f"{training['rollout_share']:.0%} of the step on this CPU"
        say(console, f"In training, rollout takes {share}; on GPUs with long outputs most of it.")
    for line in conclusions(report):
        say(console, line)


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    (plain, auto), training = report["results"], report["training"]
    yield "plain", f"{plain['tokens_per_s']:.1f} tokens/s"
    yield "auto", f"{auto['tokens_per_s']:.1f} tokens/s"
    interval = "" if auto["interval"] is None else " (95%: {:.2f} to {:.2f})".format(*auto["interval"])
    yield "auto / plain", f"{auto['ratio']:.2f}{interval} in {len(auto['rounds'])} rounds"
    yield "acceptance length", f"{auto['metrics']['acceptance_length']:.2f}, the most that a ratio counts"
    yield "identical outputs", f"{auto['requests'] - _differing(report)} of {auto['requests']}"
    yield "load average", f"{report['load']:.1f} on {report['cores']} cores"
    if training is None:
        return
    rewards, lengths, held_out = training["rewards"], training["acceptance_lengths"], training["held_out"]
    if rewards:
        pair = _from_to(rewards[0], rewards[-1])
        yield "GRPO reward", f"{pair} in {training['steps']} steps of {training['samples']} samples"
    if len(held_out) == 2:
        yield "on other prompts", f"{_from_to(*held_out)}, {len(training['answers'][0])} samples"
        right = " to ".join(str(sum(map(_is_right, one))) for one in training["answers"])
        yield "right answers to them", f"{right} of {len(training['answers'][0])}"
    yield "drafts right", f"{training['acceptance_rate']:.0%}; acceptance length {lengths[0]:.2f} to {lengths[-1]:.2f}"


def _from_to(before: tuple[float, float], after: tuple[float, float]) -> str:
    return " to ".join(f"{mean:.2f} ± {error:.2f}" for mean, error in (before, after))


def _show_example(console: Console, example: Mapping[str, Any] | None) -> None:
    """Print an output with its draft tokens marked."""
    if not example:
        return
    colours = bool(console.color_system) and not console.no_color
    begin, end, marks = ("", "", "in green") if colours else ("«", "»", "in «»")
    parts = ((f"{begin}{text}{end}", "green") if drafted else text for text, drafted in example["pieces"])
    console.print(Text.assemble(("Prompt: ", "bold"), f"{example['prompt'].splitlines()[0]} ..."), soft_wrap=True)
    console.print(Text.assemble((f"Answer of auto, drafted tokens {marks}:\n", "bold"), *parts), soft_wrap=True)


def _answer_lines(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the first prompts, each with its first answer before the training and after, of the same seed."""
    firsts: dict[str, Any] = {}
    for pair in zip(before, after, strict=True):
        firsts.setdefault(pair[0]["prompt"], pair)
    for prompt, pair in islice(firsts.items(), _PROMPTS):
        yield f"  {prompt.replace(chr(10), '; ')}"
        yield f"    expected  {pair[0]['expected']}"
        for when, one in zip(("before", "after"), pair, strict=True):
            text = one["text"] if one["text"].isprintable() else repr(one["text"])[1:-1]
            yield f"    {when:<8}  {text or '(nothing)'}  ({'right' if _is_right(one) else 'wrong'})"


def _is_right(answer: Mapping[str, Any]) -> bool:
    return bool(answer["text"] == answer["expected"])


def conclusions(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conclusions from the figures, in words."""
    auto, training = report["results"][1], report["training"] or {}
    if differing := _differing(report):
        yield f"{differing} outputs differ from those of plain decoding: report this"
    else:
        yield auto["verdict"] or "no round gave tokens without drafts and with"
        yield "All outputs are token for token those of plain decoding"
    if auto["outcome"] == "noisy" and not differing:
        more = "scripts/demo --minutes 6 --skip-training"
        yield f"The load average was {report['load']:.1f} on {report['cores']} cores; {more} has time for more rounds"
    if training.get("gain"):
        yield _learnt(training)
    if report["seconds"] > _LATE * 60.0 * report["minutes"]:
        least = "three rounds and two training steps are its least"
        yield f"It took {report['seconds']:.0f} s in place of {60.0 * report['minutes']:.0f} s: {least}"


def _learnt(training: Mapping[str, Any]) -> str:
    gain, error = training["gain"]
    figures = f"reward {gain:+.2f} ± {error:.2f} on prompts that were not trained on, in {training['steps']} steps"
    if abs(gain) <= 2.0 * error:
        return f"training: no change that shows: {figures}; more steps may tell"
    return f"training: answers came {'closer to' if gain > 0.0 else 'further from'} the right ones: {figures}"


def _differing(report: Mapping[str, Any]) -> int:
    return sum(len(one["differences"]) for one in report["results"])
