"""`specactor plan`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from specactor_ray.cli.options import ConfigFile, Overrides, load_settings
from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.files import to_json

if TYPE_CHECKING:
    from specactor_ray.plan.search import Plan


def plan(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Choose mode, layout, draft method and window by the costs of an earlier run (`profile`).

    Lists the rejected ones with the reasons.
    """
    from specactor_ray.startup.machine import Machine
    from specactor_ray.startup.mode import plan_config

    _, found = plan_config(load_settings(config_file, overrides)[0], Machine.here())
    if as_json:
        sys.stdout.write(to_json({**asdict(found), "chosen": asdict(found.chosen)}, indent=1) + "\n")
        return
    console = make_console()
    console.print(prediction_table(found))
    rejected = (f"rejected: {reason}" for reason in found.rejected)
    for line in (*rejected, *found.notes, found.words()):
        say(console, line)


def prediction_table(plan: Plan) -> Table:
    """The best window of every layout, fastest first."""
    rows = (
        {
            "mode": row.mode.value,
            "method": row.method or "-",
            "verifiers": f"{row.verifiers} x {row.verify_devices}",
            "drafters": f"{row.drafters} x {row.draft_devices}" if row.drafters else "-",
            "requests": str(row.batch),
            "window": str(row.window),
            "tokens/s": f"{row.tokens_per_s:.1f}" + "*" * (row is plan.chosen),
        }
        for row in plan.predictions
    )
    kinds = ", ".join(f"{name} on {kind}" for name, kind in plan.kinds.items())
    title = f"{plan.batch} requests on {plan.devices} device(s)" + (f"; costs: {kinds}" if kinds else "")
    caption = (
        "* chosen. verifiers, drafters: number x cores or GPUs of each; requests: of a verifier; tokens/s: of all "
        "requests"
    )
    return make_table(rows, title, text=("mode", "method"), caption=caption, caption_justify="left")
