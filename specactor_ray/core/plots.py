"""Plots by matplotlib, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def draw(path: Path, *plots: Callable[[Any], None], size: tuple[float, float] = (7, 3.5)) -> bool:
    """Write a PNG file of `size` inches; each of the plots draws on its own axes, side by side. Returns False if
    matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(plots), figsize=size, squeeze=False)
    for one, plot in zip(axes[0], plots, strict=True):
        plot(one)
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
