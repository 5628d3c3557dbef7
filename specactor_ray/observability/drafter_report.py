"""Tables and plots of drafters, made from the plain data that `drafter.json` holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

logger = logging.getLogger(__name__)


def acceptance_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Acceptance per draft position on held-out rollouts, a row per temperature and kind of noise."""
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("T", justify="right")
    table.add_column("noise")
    for name in ("steps", "supply", "acc. rate", "acc. length"):
        table.add_column(name, justify="right", no_wrap=True)
    window = max((row["window"] for row in rows), default=0)
    for position in range(1, window + 1):
        table.add_column(f"p{position}", justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row['temperature']:g}", row["noise"], f"{row['steps']:,}", f"{row['supply']:.2f}"]
        cells += [f"{row['acceptance_rate']:.1%}", f"{row['acceptance_length']:.2f}"]
        table.add_row(*cells, *("-" if p is None else f"{p:.2f}" for p in row["by_position"]))
    table.caption = (
        "acc. length: tokens per verify step, the target's own included. supply: draft tokens per step.\n"
        "p1, p2, ...: probability that this draft token is right when all before it were; p1 is the match rate."
    )
    return table


def plot_training(path: Path, history: Sequence[Mapping[str, float]], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Loss over the steps, and acceptance per position, as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        logger.info("matplotlib is not installed; there is no plot")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.5))
    steps = [record["step"] for record in history]
    left.plot(steps, [record["loss"] for record in history], marker=".", label="held-out loss")
    left.plot(steps, [record["matches"] for record in history], marker=".", label="held-out match rate")
    left.set(xlabel="step", ylim=(0, None))
    left.legend(fontsize=8)
    for row in rows:
        values = [float("nan") if p is None else p for p in row["by_position"]]
        label = f"T={row['temperature']:g}, {row['noise']} noise: {row['acceptance_length']:.2f} tokens/step"
        right.plot(range(1, len(values) + 1), values, marker=".", label=label)
    right.set(xlabel="draft position", ylabel="P(right | all before it were)", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
