"""What several commands share: options, numbers in a row, what a comparison of modes starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specactor_ray.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from specactor_ray.config import Config

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


def parse_numbers(option: str, text: str) -> list[int]:
    """`1,4,16` → the numbers, each once.

    Raises:
        InputError: One of them is not a whole number of 1 or more.
    """
    items = [item.strip() for item in text.split(",")]
    bad = [item for item in items if not item.isdecimal() or int(item) < 1]
    if bad:
        raise InputError(f"{option}: {bad[0]!r} is no whole number of 1 or more; give some, such as 1,4,16")
    return list(dict.fromkeys(int(item) for item in items))


def planned_side_by_side(settings: Config, console: Console) -> Config:
    """What a comparison of modes on the same cores starts from: `plan: auto` is made for decoupled, and said so;
    `mode: auto` is the layout as it is written.

    Raises:
        ConfigError, InputError: See `rollout.planning.resolve_plan`.
    """
    from specactor_ray.config.schema import ModeName
    from specactor_ray.observability.console import say
    from specactor_ray.rollout.planning import as_decoupled, resolve_plan

    resolved, lines = resolve_plan(as_decoupled(settings), [ModeName.decoupled])
    for line in lines:
        say(console, line)
    return resolved
