"""`specactor profile` and `specactor plan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from specactor_ray.bench.micro import parse_numbers
from specactor_ray.cli.options import ConfigFile, Overrides, load_settings
from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.files import to_json

if TYPE_CHECKING:
    from specactor_ray.plan.search import Plan


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
    output: Annotated[Path, typer.Option(help="The file; never overwritten.")] = Path("profile.json"),
) -> None:
    """Measure what verifying and drafting cost on this machine, and how often drafts are right.

    Target, draft methods, sampling and prompts come from the configuration. Starts no cluster; needs an idle machine.
    """
    settings, progress = load_settings(config_file, overrides)
    options = {"--batches": batches, "--windows": windows, "--contexts": contexts}
    sizes, drafted, lengths = (parse_numbers(option, text, int, 1) for option, text in options.items())
    device_counts = None if devices is None else parse_numbers("--devices", devices, int, 1)
    from specactor_ray.bench.profile import default_devices, parse_axes, run_profile

    axes = parse_axes(sizes, drafted, lengths, repeats)
    data = run_profile(settings, axes, device_counts or default_devices(settings), output, progress)
    console = make_console()
    console.print(cost_table(data))
    for method, entry in data["methods"].items():
        rate, steps = entry["acceptance"]["acceptance_rate"], entry["acceptance"]["steps"]
        say(console, f"{method}: {rate:.1%} of its draft tokens were right, in {steps} steps")
    say(console, f"profile: {output.resolve()} ({data['seconds']:.0f} s)")


def plan(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Choose mode, layout, draft method and window by a profile, and list the rejected ones with the reasons."""
    from specactor_ray.rollout.planning import as_decoupled, make_plan, usable_profile

    settings = as_decoupled(load_settings(config_file, overrides)[0])
    found = make_plan(settings, usable_profile(settings))
    if as_json:
        sys.stdout.write(to_json({**asdict(found), "chosen": asdict(found.chosen)}, indent=1) + "\n")
        return
    console = make_console()
    console.print(prediction_table(found))
    rejected = (f"rejected: {reason}" for reason in found.rejected)
    for line in (*rejected, *found.notes, found.words()):
        say(console, line)


# ---- tables ----


def cost_table(profile: Mapping[str, Any]) -> Table:
    """Milliseconds at the longest context: a row per measured item, device count and window."""
    measured = [("verifying", profile["verify"])]
    measured += [(f"drafting, {method}", entry["points"]) for method, entry in profile["methods"].items()]
    batches = sorted({point["batch"] for _, points in measured for point in points})
    context = max(point["context"] for point in profile["verify"])
    columns = ("cost of", "devices", "window", *(f"batch {batch}" for batch in batches))
    caption = "verifying: of a step; drafting: of one token of each request"
    table = make_table(columns, title=f"ms, context {context}", text=("cost of",), caption=caption)
    for name, points in measured:
        rows: dict[tuple[int, int], dict[int, float]] = {}
        for point in points:
            if point["context"] == context:
                rows.setdefault((point["devices"], point["window"]), {})[point["batch"]] = 1e3 * point["seconds"]
        for (devices, window), costs in sorted(rows.items()):
            cells = (f"{costs[batch]:.3g}" if batch in costs else "-" for batch in batches)
            table.add_row(name, str(devices), str(window) if name == "verifying" else "-", *cells)
    return table


def prediction_table(plan: Plan) -> Table:
    """The best window of every layout, fastest first."""
    title = f"batch {plan.batch} on {plan.devices} device(s), context {plan.context:.0f}"
    columns = ("mode", "method", "verifiers", "drafters", "requests", "window", "tokens/s")
    table = make_table(columns, title=title, text=("mode", "method"), caption_justify="left")
    for row in plan.predictions:
        table.add_row(
            row.mode.value,
            row.method or "-",
            f"{row.verifiers} x {row.verify_devices}",
            f"{row.drafters} x {row.draft_devices}" if row.drafters else "-",
            str(row.batch),
            str(row.window),
            f"{row.tokens_per_s:.1f}" + ("*" if row is plan.chosen else ""),
        )
    table.caption = (
        "* chosen. verifiers, drafters: number x cores or GPUs of each; requests: of a verifier; tokens/s: of all "
        "requests"
    )
    return table
