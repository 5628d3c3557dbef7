"""Failures of a draft method, counted and logged."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Failures:
    """Counts failures by the kind of error. Logs the first one of a kind with its traceback, and then the 10th, the
    100th and so on."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def __len__(self) -> int:
        """Number of failures."""
        return self._counts.total()

    def add(self, what: str, error: BaseException) -> None:
        """Count a failure; `what`: name of the failed work in the log."""
        kind = type(error).__name__
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            logger.error("%s; further failures with %s are counted", what, kind, exc_info=error)
        elif str(count).strip("0") == "1":
            logger.warning("%s: %s; %d failures with %s so far", what, error, count, kind)
