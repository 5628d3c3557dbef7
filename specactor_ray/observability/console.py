"""Where text for people goes: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_WIDTH_OF_A_FILE = 140


def make_console(stream: TextIO | None = None) -> Console:
    """A console on a stream (default: standard output), wide enough for the tables when that is a file or a pipe."""
    stream = stream or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE
    return Console(file=stream, width=width, highlight=False, emoji=False, soft_wrap=False)


def say(console: Console, text: str) -> None:
    """One line as it is: brackets are no markup, and nothing is wrapped or cut."""
    console.print(Text(text), soft_wrap=True)


def make_bar(console: Console, count: ProgressColumn) -> Progress:
    """A bar of one task: its description, the bar, `count`, its field `figures`, and the time it has taken."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        count,
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )


def show_error(message: str) -> None:
    """The one line that a user's mistake is worth, on standard error."""
    say(make_console(sys.stderr), f"error: {message}")


def log_by_default() -> None:
    """Show the library's log on standard error from level INFO on, in a program that has set up no logging of its own:
    a start takes a while, and says then what it does."""
    library = logging.getLogger("specactor_ray")
    if library.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    library.addHandler(handler)
    if library.level == logging.NOTSET:
        library.setLevel(logging.INFO)


def log_through(console: Console, level: str) -> None:
    """Send the log lines of this process through a console, so that they do not tear its progress bar."""
    handler = RichHandler(console=console, show_path=False, markup=False, rich_tracebacks=False)
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[handler], force=True)
