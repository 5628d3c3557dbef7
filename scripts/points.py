"""Shared parts of the scripts: figures as tables and JSON files, and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from specactor_ray.core.console import make_console, make_table, show_error
from specactor_ray.core.errors import EXIT_FAILED, EXIT_USER_ERROR, SpecActorError, UserError
from specactor_ray.core.files import refuse_existing, write_json
from specactor_ray.core.signals import sigterm_interrupts


def run_script(command: Callable[..., Any]) -> None:
    """Run a script; its options are the arguments of `command`. A user's mistake is one line and exit code 2."""
    try:
        with sigterm_interrupts():
            typer.run(command)
    except SpecActorError as error:
        show_error(str(error))
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED)


def _json_file(path: Path | None) -> Path | None:
    refuse_existing(path, "--json")
    return path


Point = Mapping[str, Any]
"""Figures of one measurement: column → value."""
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the figures; never overwritten.", show_default=False, callback=_json_file),
]


def show_points(title: str, points: Sequence[Point], json_file: Path | None = None) -> None:
    """Print the points as a table, and write them as JSON."""
    make_console().print(points_table(points, title))
    if json_file is not None:
        write_json(json_file, points, new=True)


def points_table(points: Sequence[Point], title: str | None = None) -> Table:
    """A row for each point, a column for every key."""
    columns = list(dict.fromkeys(key for point in points for key in point))
    text = [name for name in columns if any(isinstance(point.get(name), str) for point in points)]
    return make_table(({name: cell(point.get(name)) for name in columns} for point in points), title, text)


def cell(value: Any) -> str:
    """A value with three significant digits; `-` for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)
