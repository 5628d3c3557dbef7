"""Tables of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


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
