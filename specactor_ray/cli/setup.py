"""`specactor init` and `specactor doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.errors import EXIT_FAILED


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to work in; made if it is not there.")],
) -> None:
    """Copy the shipped configurations and prompts to DIR/conf, to be edited. No file there is replaced."""
    from specactor_ray.config.shipped import copy_shipped

    copied = copy_shipped(folder)
    console = make_console()
    say(console, f"{len(copied)} files in {folder / 'conf'}; next:")
    say(console, f"  cd {folder} && specactor rollout --config conf/local_cpu.yaml")


def doctor() -> None:
    """Show what is installed, what the devices, backends and clusters here can do, and what to fix.

    Exit code 1 if something is wrong; what is only optional is no failure.
    """
    from specactor_ray.cli.doctor import State, diagnose, is_sound

    errors, findings = make_console(sys.stderr), []
    with errors.status("looking at this machine"):
        for finding in diagnose():
            findings.append(finding)
    console = make_console()
    columns = "area", "what", "state", "found"
    rows = [(one.area, one.what, one.state.value, one.found) for one in findings]
    console.print(make_table(columns, rows, text=columns, wrap=True))
    for one in findings:
        if one.fix:
            label = "to fix" if one.state is State.WRONG else "optional"
            say(console, f"{label}: {one.what}: {one.fix}")
    if not is_sound(findings):
        raise typer.Exit(EXIT_FAILED)
