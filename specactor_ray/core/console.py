"""Output for users: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import io
import itertools
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

_WIDTH_OF_A_FILE = 140
START_LOG = "specactor_ray.start"
"""Logger of the phases of a start."""


def make_console(stream: TextIO | None = None) -> Console:
    """A console on a stream (default: standard output), wide enough for the tables if that is a file or a pipe."""
    stream = stream or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE
    return Console(file=stream, width=width, highlight=False, emoji=False, soft_wrap=False)


def say(console: Console, text: str) -> None:
    """Print one line verbatim: brackets are not markup, and nothing is wrapped or cut."""
    console.print(Text(text), soft_wrap=True)


def make_table(
    rows: Iterable[Mapping[str, str | Text]],
    title: str | None = None,
    text: Collection[str] = (),
    groups: Sequence[str] = (),
    wrap: bool = False,
    **options: Any,
) -> Table:
    """A table of numbers with a column for every key of the rows. The columns in `text` are aligned to the left; a line
    stands where values in the columns `groups` change. With `wrap` cells may take several lines. Options are those of
    rich's `Table`, such as `caption`."""
    rows = list(rows)
    table = Table(title=title, box=SIMPLE_HEAD, **options)
    names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    for name in names:
        table.add_column(name, justify="left" if name in text else "right", no_wrap=not wrap)
    for row, following in zip(rows, [*rows[1:], {}], strict=True):
        is_last = any(row[name] != following.get(name) for name in groups)
        table.add_row(*(row.get(name, "") for name in names), end_section=is_last)
    return table


def figures_table(title: str, figures: Iterable[tuple[str, str]], **options: Any) -> Table:
    """A row for the name and the value of each figure."""
    rows = ({"name": name, "value": value} for name, value in figures)
    return make_table(rows, title, text=("name",), show_header=False, **options)


def as_text(table: Table, width: int) -> str:
    """A table as plain lines of at most `width` columns, for `say`."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def show_error(message: str) -> None:
    """Print the message of a user's mistake as one line on standard error."""
    say(make_console(sys.stderr), f"error: {message}")


def log_by_default() -> None:
    """Show the library's log on standard error from level INFO on, in a program that has set up no logging."""
    library = logging.getLogger("specactor_ray")
    if library.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    library.addHandler(handler)
    if library.level == logging.NOTSET:
        library.setLevel(logging.INFO)


def log_through(console: Console, level: str) -> None:
    """Send the log lines of this process through a console, so that they do not break its progress bar; those of a
    start as plain lines at every level."""
    handler = RichHandler(console=console, show_path=False, markup=False, rich_tracebacks=False)
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[handler], force=True)
    start = logging.getLogger(START_LOG)
    start.handlers, start.propagate = [_PlainLines(console)], False
    start.setLevel(logging.INFO)


class _PlainLines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self._console, record.getMessage())
        except Exception:  # noqa: BLE001 - a closed stream must not end the work
            self.handleError(record)
