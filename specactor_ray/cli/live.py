"""`specactor status` and `specactor scale`: runs that are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from specactor_ray.cli.report import MOST_PENDING, ladder_table, status_table
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError, clipped
from specactor_ray.core.signals import Terminated

Run = Annotated[str | None, typer.Option("--run", help="Name of the run. Default: the only one.", show_default=False)]
Address = Annotated[
    str, typer.Option("--address", envvar="RAY_ADDRESS", help="host:port of the Ray cluster, as the run printed it.")
]


def scale(
    drafters: Annotated[list[str], typer.Argument(metavar="METHOD=N", help="Draft actors wanted, as in ngram=2.")],
    run: Run = None,
    address: Address = "auto",
) -> None:
    """Add or remove draft actors while a rollout runs (mode decoupled)."""
    wanted = parse_scale(drafters)
    from specactor_ray.rollout.operations import scale_run

    name, rows = scale_run(run, wanted, address)
    console = make_console()
    say(console, f"run {name}: wanted now {', '.join(f'{method}={count}' for method, count in wanted.items())}")
    console.print(status_table(rows))
    pending = [row for row in rows if row["phase"] == "pending" and row["method"] in wanted]
    for row in pending[:MOST_PENDING]:
        reason = f": it {row['note']}" if row["note"] else "."
        say(console, f"{row['id']} cannot start yet{reason} It starts when there is room.")


def status(
    run: Run = None,
    address: Address = "auto",
    watch: Annotated[bool, typer.Option("--watch", help="Show them until the run ends, or Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1, max=3600.0)] = 2.0,
) -> None:
    """Show the actors of a run."""
    console = make_console()
    if watch:
        _watch(console, run, address, every)
        return
    from specactor_ray.rollout.operations import status_of_run

    console.print(_actors(*status_of_run(run, address)))


def _watch(console: Console, run: str | None, address: str, interval_s: float) -> None:
    """Redraw the status in a terminal, else print one status after the other."""
    from rich.live import Live

    from specactor_ray.rollout.operations import watch_run

    name = None
    shown = Live(console=console, auto_refresh=False, vertical_overflow="visible") if console.is_terminal else None
    try:
        with shown or contextlib.nullcontext():
            for name, rows in watch_run(run, address, interval_s):
                if shown is None:
                    console.print(_actors(name, rows))
                else:
                    shown.update(_actors(name, rows), refresh=True)
            say(console, f"run {name} has ended")
    except Terminated:
        raise
    except KeyboardInterrupt:  # the usual end
        pass


def _actors(name: str, rows: Sequence[Mapping[str, Any]]) -> Group:
    """The actors of a run, and the ladder of their draft methods."""
    ladder = ladder_table(rows)
    return Group(Text(f"run {name}"), status_table(rows), *([ladder] if ladder is not None else []))


def parse_scale(items: Sequence[str]) -> dict[str, int]:
    """`["ngram=2"]` → `{"ngram": 2}`. Raises InputError for an item that is not METHOD=N."""
    wanted: dict[str, int] = {}
    for item in items:
        method, separator, count = item.partition("=")
        if not (method and separator and count.isdecimal() and len(count) < 10):
            raise InputError(f"{clipped(item)} is not METHOD=N with a whole number, 0 or more; for example ngram=2")
        if method in wanted:
            raise InputError(f"{method} is given twice. Fix: give one number of its draft actors")
        wanted[method] = int(count)
    return wanted
