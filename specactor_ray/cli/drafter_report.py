"""Tables and plots of drafters, made from the plain data in `drafter.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specactor_ray.core.console import draw, make_table

logger = logging.getLogger(__name__)
_CAPTION = (
    "acc. length: tokens per verify step, the target's own included. supply: draft tokens per step.\n"
    "p1, p2, ...: probability that this draft token is right when all before it were; p1 is the match rate."
)


def acceptance_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Acceptance per draft position on held-out rollouts, a row per temperature and kind of noise."""
    window = max((row["window"] for row in rows), default=0)
    positions = (f"p{position}" for position in range(1, window + 1))
    columns = ("T", "noise", "steps", "supply", "acc. rate", "acc. length", *positions)
    cells = (
        (
            f"{row['temperature']:g}",
            row["noise"],
            f"{row['steps']:,}",
            f"{row['supply']:.2f}",
            f"{row['acceptance_rate']:.1%}",
            f"{row['acceptance_length']:.2f}",
            *("-" if p is None else f"{p:.2f}" for p in row["by_position"]),
        )
        for row in rows
    )
    return make_table(columns, cells, title, text=("noise",), caption=_CAPTION)


def plot_training(path: Path, history: Sequence[Mapping[str, float]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot the loss over the steps, and acceptance per position, as a PNG, if matplotlib is installed."""

    def draw_losses(axes: Any) -> None:
        steps = [record["step"] for record in history]
        for key, name in (("loss", "loss"), ("matches", "match rate")):
            axes.plot(steps, [record[key] for record in history], marker=".", label=f"held-out {name}")
        axes.set(xlabel="step", ylim=(0, None))

    def draw_acceptance(axes: Any) -> None:
        for row in rows:
            values = [float("nan") if p is None else p for p in row["by_position"]]
            label = f"T={row['temperature']:g}, {row['noise']} noise: {row['acceptance_length']:.2f} tokens/step"
            axes.plot(range(1, len(values) + 1), values, marker=".", label=label)
        axes.set(xlabel="draft position", ylabel="P(right | all before it were)", ylim=(0, 1))

    if not draw(path, draw_losses, draw_acceptance, size=(10, 3.5)):
        logger.info("matplotlib is not installed; there is no plot")
