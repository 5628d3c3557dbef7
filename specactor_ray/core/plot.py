"""Plots as PNG files: panels side by side in one figure. matplotlib is optional."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specactor_ray.core.files import replacing

Panel = Callable[[Any], object]
"""Draws on the axes that it receives, and names them."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""


def write_plot(file: Path, *panels: Panel, columns: int = 1, height: float = 3.0) -> str:
    """Draw panels into a file, row by row, which replaces an older one, in a folder that need not exist. `height`:
    inches of a panel. Returns a line for the user: where the plot is, or why there is none."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    rows = -(-len(panels) // columns)
    with rc_context({"text.parse_math": False}):  # a name may have dollar signs
        figure = Figure((8.0 if columns == 1 else 6.0 * columns, height * rows), layout="constrained")
        places: Any = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(places, panels, strict=False):
            axes.set_prop_cycle(color=_COLOURS)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            panel(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
        for axes in places[len(panels) :]:
            axes.remove()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary:
                figure.savefig(temporary, format="png", dpi=110)
        except OSError as error:
            return f"no plot: {file} cannot be written ({error.strerror})"
    return f"plot: {file.resolve()}"
