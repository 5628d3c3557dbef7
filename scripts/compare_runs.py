#!/usr/bin/env python
"""Do two training runs learn the same? Compares their records step by step and plots both.

    python scripts/compare_runs.py runs/plain runs/decoupled --plot docs/figures/modes.png

Exit code 1 if anything that was learnt differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from specactor_ray.runs.training import METRICS_FILE, read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, help="folders of the two runs")
    parser.add_argument("--plot", type=Path, help="write the reward curves here (PNG)")
    arguments = parser.parse_args()
    first, second = (read_metrics(folder / METRICS_FILE) for folder in arguments.runs)
    console = Console()
    different = [
        (a["step"], name)
        for a, b in zip(first, second, strict=False)
        for name in a["train"]
        if a["train"][name] != b["train"].get(name)
    ]
    steps = min(len(first), len(second))
    console.print(f"{steps} steps, {len(first[0]['train'])} metrics each: {len(different)} differ")
    for step, name in different[:10]:
        console.print(f"  step {step}: {name}")
    console.print(_phases([folder.name for folder in arguments.runs], [first[:steps], second[:steps]]))
    if arguments.plot is not None:
        _plot(arguments.plot, [folder.name for folder in arguments.runs], [first[:steps], second[:steps]])
    return 1 if different else 0


def _phases(names: list[str], runs: list[list[dict[str, Any]]]) -> Table:
    table = Table(title="mean seconds per step")
    table.add_column("run")
    phases = list(runs[0][0]["seconds"])
    for name in (*phases, "tokens/s", "acceptance length"):
        table.add_column(name, justify="right")
    for name, records in zip(names, runs, strict=True):
        seconds = [f"{mean(record['seconds'][phase] for record in records):.2f}" for phase in phases]
        speed = [
            f"{mean(record['speed'][key] for record in records):.2f}" for key in ("tokens_per_s", "acceptance_length")
        ]
        table.add_row(name, *seconds, *speed)
    return table


def _plot(path: Path, names: list[str], runs: list[list[dict[str, Any]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    styles = ({"linewidth": 4, "alpha": 0.4}, {"linewidth": 1.2, "color": "black", "linestyle": "--"})
    for name, records, style in zip(names, runs, styles, strict=True):
        steps = [record["step"] for record in records]
        left.plot(steps, [record["train"]["reward_mean"] for record in records], label=name, **style)
        right.plot(steps, [record["speed"]["acceptance_length"] for record in records], label=name, **style)
    left.set(xlabel="step", ylabel="mean reward")
    right.set(xlabel="step", ylabel="acceptance length")
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
