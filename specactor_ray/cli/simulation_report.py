"""Tables of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specactor_ray.core.console import make_table

_COLUMNS = ("backend", "batch", "layout", "measured tokens/s", "simulated", "error", "acc. length", "simulated")


def validation_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Measured and simulated figures, side by side."""
    rows = (
        (
            point["backend"],
            str(point["batch"]),
            point["variant"],
            f"{point['measured']:.1f}",
            f"{point['predicted']:.1f}",
            f"{point['error']:+.1%}",
            f"{point['measured_length']:.2f}",
            f"{point['predicted_length']:.2f}",
        )
        for point in points
    )
    text = ("backend", "layout")
    return make_table(_COLUMNS, rows, "simulated against measured", text, wrap=True, title_justify="left")
