"""Shared parts of commands: options, their parsing, the configuration, exit codes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.console import Console

from specactor_ray.core.console import log_through, make_console
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, InputError, clipped

if TYPE_CHECKING:
    from specactor_ray.config import Config

N = TypeVar("N", int, float)
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML file or shipped name (local_cpu). Default: the built-in defaults.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides, such as target.max_batch=8; 'target={cores: 2}' keeps the section's other keys.",
        show_default=False,
    ),
]


def load_settings(config_file: Path | None, overrides: Sequence[str] | None) -> tuple[Config, Console]:
    """The configuration, and the console for progress. Raises as `load_config`."""
    from specactor_ray.config import load_config

    settings = load_config(config_file, overrides or ())
    return settings, progress_console(settings.run.log_level)


def progress_console(log_level: str) -> Console:
    """The console of standard error, which also shows the log from a level on."""
    console = make_console(sys.stderr)
    log_through(console, log_level)
    return console


def finish(status: str, sound: bool = True) -> NoReturn:
    """Exit with the code of a status; `sound` applies to a status that is not an interruption."""
    raise typer.Exit(EXIT_INTERRUPTED if status == "interrupted" else 0 if sound else EXIT_FAILED)


def split_items(text: str) -> list[str]:
    """`1, 4` → `["1", "4"]`, without empty items."""
    return list(filter(None, map(str.strip, text.split(","))))


def parse_numbers(option: str, text: str, kind: Callable[[str], N], least: float, most: float = math.inf) -> list[N]:
    """The different numbers of a comma-separated list. InputError: it has another form, or one is out of range."""
    try:
        found = list(dict.fromkeys(map(kind, text.split(","))))
    except ValueError:
        found = []
    if not found or not all(least <= value <= most and value < math.inf for value in found):
        limits = f"from {least} to {most}" if most < math.inf else f"of {least} or more"
        what = f"no list of {'whole ' * (kind is int)}numbers {limits}"
        raise InputError(f"{option}: {clipped(text)} is {what}; separate them by commas, such as 1,4")
    return found
