"""Chance that draft tokens are right: decaying hits and tries per row, method and output position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.config.schema import MAX_METHODS

if TYPE_CHECKING:
    from specactor_ray.verify.table import RequestTable

BUCKET_NAMES = ("0-63", "64-127", "128-255", "256-511", "512-1023", "1024-2047", "2048-4095", "4096+")
"""Names of the ranges of output positions."""
BUCKETS = len(BUCKET_NAMES)
_BUCKET_BEGINS = 64 << np.arange(BUCKETS - 1)
DEFAULT_PRIOR = 0.6
PRIOR_TRIES = 8.0
"""Tries for which a prior counts, such as that of a method for its requests: about one window."""
HALF_LIFE_STEPS = 128.0
"""Verify steps after which an observation counts half, also without later ones: the only rule of exploration."""
_FADE = 0.5 ** (1.0 / HALF_LIFE_STEPS)


def bucket_of(positions: np.ndarray) -> np.ndarray:
    """The range of each output position."""
    return _BUCKET_BEGINS.searchsorted(positions, side="right")


class Acceptance:
    """Estimates for the rows of a table, shrunk to those of their method, and these to a prior.

    Args:
        priors: Draft method → chance that a draft token is right, as measured offline.
    """

    def __init__(self, priors: Mapping[str, float] | None = None) -> None:
        self._given = dict(priors or {})
        self.methods: list[str] = []
        self.prior = np.full(MAX_METHODS, DEFAULT_PRIOR)
        self.evidence = np.zeros((2, MAX_METHODS, BUCKETS))
        """`(2, methods, BUCKETS)`: as `RequestTable.evidence`, by range of output positions."""

    def number(self, method: str) -> int:
        """Index of a method in the arrays, assigned at the first call for the method."""
        if method not in self.methods:
            self.methods.append(method)
            self.prior[len(self.methods) - 1] = self._given.get(method, DEFAULT_PRIOR)
        return self.methods.index(method)

    def fade(self, table: RequestTable) -> None:
        """Decrease the weight of all evidence after a step."""
        self.evidence *= _FADE
        table.evidence *= _FADE

    def of_method(self) -> np.ndarray:
        """`(methods, BUCKETS)`: chance that a token is right given that those before it are."""
        return _draw(self.evidence, _draw(self.evidence.sum(axis=2), self.prior)[:, None])

    def probability(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)`: the same chance for single requests at their output positions."""
        at_positions = self.of_method().take(bucket_of(table.committed[rows]), axis=1)
        return _draw(table.evidence.take(rows, axis=2), at_positions)


def _draw(evidence: np.ndarray, prior: np.ndarray) -> np.ndarray:
    chances: np.ndarray = (evidence[0] + PRIOR_TRIES * prior) / (evidence[1] + PRIOR_TRIES)
    return chances
