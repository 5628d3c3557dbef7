"""Matplotlib, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def draw(path: Path, *plots: Callable[[Any], None], size: tuple[float, float] = (7, 3.5)) -> bool:
    """Write a figure.

    Args:
        path: A PNG file.
        plots: Each draws on axes of its own, side by side.
        size: Of the figure, in inches.

    Returns:
        Whether it was written: not where matplotlib is not installed.
    """
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
