"""`specactor profile` and `specactor plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specactor_ray.cli.options import ConfigFile, Overrides, load_settings, parse_numbers, require_positive
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError


def profile(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    batches: Annotated[str, typer.Option(help="Requests per step.")] = "1,2,4,8,16",
    windows: Annotated[str, typer.Option(help="Draft tokens verified per request.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option(help="Tokens that requests have had.")] = "64,512",
    devices: Annotated[
        str | None, typer.Option(help="Cores per actor. Default: 1, 2, 4, ... of this machine.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps per figure.")] = 5,
    requests: Annotated[int, typer.Option(help="Samples recorded to measure acceptance on.")] = 16,
    output: Annotated[Path, typer.Option(help="The file; never overwritten.")] = Path("profile.json"),
) -> None:
    """Measure what verifying and drafting cost on this machine, and how often drafts are right.

    Target, draft methods, sampling and prompts come from the configuration. Starts no cluster; needs an idle machine.
    """
    from specactor_ray.cli.plan_report import acceptance_table, cost_table
    from specactor_ray.plan.profile import disturbed

    settings, progress = load_settings(config_file, overrides)
    options = {"--batches": batches, "--windows": windows, "--contexts": contexts}
    sizes, drafted, lengths = (parse_numbers(option, text) for option, text in options.items())
    device_counts = None if devices is None else parse_numbers("--devices", devices)
    require_positive("--requests", requests)
    from specactor_ray.bench.profile import default_devices, parse_axes, run_profile

    axes = parse_axes(sizes, drafted, lengths, repeats)
    data = run_profile(settings, axes, device_counts or default_devices(settings), output, progress, requests)
    console = make_console()
    console.print(cost_table(data))
    console.print(acceptance_table(data))
    for problem in disturbed(data):
        say(console, f"warning: {problem}; measure again on a quiet machine")
    say(console, f"profile: {output.resolve()} ({data['seconds']:.0f} s)")


def plan(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="Profile. Default: the key `profile`.", show_default=False)
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Cores or GPUs. Default: all of this machine.", show_default=False)
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Requests at once in all, as in 1,4,16. Default: max_batch x replicas.", show_default=False),
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="p of every method, in place of the measured.", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Mean tokens of prompt and output. Default: by the prompts.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Choose mode, layout, draft method and window by a profile, and list the rejected ones with the reasons."""
    from specactor_ray.cli.plan_report import cost_table, prediction_table
    from specactor_ray.plan.apply import requests_of
    from specactor_ray.rollout.planning import as_decoupled, checked_devices, make_plan, usable_profile

    settings = as_decoupled(load_settings(config_file, overrides)[0])
    if profile_file is not None:
        settings.profile = str(profile_file)
    if acceptance is not None and not 0.0 <= acceptance <= 1.0:
        raise InputError(f"--acceptance: {acceptance} is no probability; use 0 to 1")
    require_positive("--devices", devices)
    require_positive("--context", context)
    batches = [requests_of(settings)] if batch is None else parse_numbers("--batch", batch)
    measured, warnings = usable_profile(settings, settings.plan_force)
    count = checked_devices(settings, devices if devices is not None else settings.plan_devices, "--devices")
    plans = [
        make_plan(settings, measured, count, requests, context=context, acceptance=acceptance) for requests in batches
    ]
    if as_json:
        predicted = [{**asdict(plan), "chosen": asdict(plan.chosen)} for plan in plans]
        report = {"profile": settings.profile, "warnings": warnings, "plans": predicted}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return
    console = make_console()
    console.print(cost_table(measured.data))
    for plan in plans:
        console.print(prediction_table(plan))
        for reason in plan.rejected:
            say(console, f"rejected: {reason}")
    for warning in warnings:
        say(console, f"warning: {warning}")
    for plan in plans:
        for line in (*plan.notes, plan.words()):
            say(console, f"batch {plan.batch}: {line}")
