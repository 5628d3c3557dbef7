"""Slower fallbacks that this process uses: each is logged once, and listed in the summary of the run."""

from __future__ import annotations

import logging

_taken: dict[str, None] = {}


def fall_back(logger: logging.Logger, what: str) -> None:
    """Log a warning the first time, and record it for `fallbacks`."""
    if what not in _taken:
        _taken[what] = None
        logger.warning("%s", what)


def fallbacks() -> list[str]:
    """All fallbacks of this process, in the order of their first use."""
    return list(_taken)
