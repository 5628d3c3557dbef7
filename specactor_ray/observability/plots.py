"""Matplotlib, where it is installed."""

from __future__ import annotations

from typing import Any


def load_pyplot() -> Any:
    """Its plotting module, for files; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
