"""What this process does in a slower way than it could: said once in the log, and in the summary of the run."""

from __future__ import annotations

import logging

_taken: dict[str, None] = {}


def fall_back(logger: logging.Logger, what: str) -> None:
    """Log a warning the first time, and remember it for `fallbacks`."""
    if what not in _taken:
        _taken[what] = None
        logger.warning("%s", what)


def fallbacks() -> list[str]:
    """All that this process fell back to, in the order of the first time."""
    return list(_taken)
