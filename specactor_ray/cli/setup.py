"""`specactor init` and `specactor doctor`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.errors import EXIT_FAILED, InputError
from specactor_ray.core.files import make_folder


def copy_shipped(folder: Path) -> list[Path]:
    """Copy the shipped files to `folder/conf`; returns the new files.

    Raises:
        InputError: A file exists already, or the folder cannot be written to. Nothing is copied.
    """
    from specactor_ray.config.load import SHIPPED

    sources = sorted(path for path in SHIPPED.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    targets = [folder / "conf" / source.relative_to(SHIPPED) for source in sources]
    if there := [str(target) for target in targets if target.exists()]:
        more = f" and {len(there) - 1} others" if len(there) > 1 else ""
        raise InputError(f"no file is replaced, and there is {there[0]}{more}; name another folder")
    for parent in sorted({target.parent for target in targets}):
        make_folder(parent, "DIR")
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)
    return targets


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to work in; made if it is not there.")],
) -> None:
    """Copy the shipped configurations and prompts to DIR/conf, to be edited. No file there is replaced."""
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
