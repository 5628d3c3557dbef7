"""Tables of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specactor_ray.observability.console import say


class Published(Protocol):
    """A published figure beside its prediction."""

    @property
    def name(self) -> str: ...
    @property
    def published(self) -> float: ...
    @property
    def predicted(self) -> float: ...
    @property
    def difference(self) -> float: ...
    @property
    def within(self) -> bool: ...
    @property
    def source(self) -> str: ...
    @property
    def note(self) -> str: ...


def show_published(console: Console, points: Sequence[Published]) -> None:
    """The cost models against published measurements; the notes below are numbered as in the first column."""
    table = Table(title="cost models against published measurements", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("what")
    for column in ("published", "predicted", "difference"):
        table.add_column(column, justify="right")
    table.add_column("source")
    notes = list(dict.fromkeys(point.note for point in points if point.note))
    for point in points:
        mark = f" [{notes.index(point.note) + 1}]" if point.note else ""
        difference = f"{point.difference:+.1%}" + ("" if point.within else " !")
        figures = f"{point.published:.4g}", f"{point.predicted:.4g}", difference
        table.add_row(Text(point.name + mark), *figures, Text(point.source))
    console.print(table)
    for number, note in enumerate(notes, 1):
        say(console, f"[{number}] {note}")


def validation_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """What was measured against what was simulated."""
    table = Table(title="simulated against measured", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("backend")
    table.add_column("batch", justify="right")
    table.add_column("layout")
    for name in ("measured tokens/s", "simulated", "error", "acc. length", "simulated"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            point["backend"],
            str(point["batch"]),
            point["variant"],
            f"{point['measured']:.1f}",
            f"{point['predicted']:.1f}",
            f"{point['error']:+.1%}",
            f"{point['measured_length']:.2f}",
            f"{point['predicted_length']:.2f}",
        )
    return table
