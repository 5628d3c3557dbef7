"""What several commands share: options, numbers in a row, the resolution of `plan: auto`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specactor_ray.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from specactor_ray.config import Config

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file. Default: the built-in defaults.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as target.max_batch=8.", show_default=False),
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


def resolve_and_say(settings: Config, console: Console, *, side_by_side: bool = False) -> Config:
    """Carry out `plan: auto`, and say in one line what was chosen.

    Args:
        settings: The loaded configuration.
        console: Where to say it.
        side_by_side: The modes will be compared on the same cores, so the plan is for the decoupled one of them.

    Raises:
        ConfigError, InputError: See `rollout.planning.resolve_plan`.
    """
    from specactor_ray.config.schema import ModeName, PlanPolicy

    if settings.plan is PlanPolicy.fixed:
        return settings
    from specactor_ray.observability.console import say
    from specactor_ray.rollout.planning import resolve_plan
    from specactor_ray.speculation.plan import ALL_MODES

    resolved, lines = resolve_plan(settings, [ModeName.decoupled] if side_by_side else ALL_MODES)
    for line in lines:
        say(console, line)
    return resolved
