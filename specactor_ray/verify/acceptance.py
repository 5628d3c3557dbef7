"""The chance that draft tokens are right, by method, request and range of output positions."""

from __future__ import annotations

import numpy as np

from specactor_ray.config.schema import MAX_METHODS
from specactor_ray.table._kernels import Committed
from specactor_ray.table.table import RequestTable

BUCKET_NAMES = ("0-63", "64-127", "128-255", "256-511", "512-1023", "1024-2047", "2048-4095", "4096+")
"""Names of the ranges of output positions."""
BUCKETS = len(BUCKET_NAMES)
_BUCKET_BEGINS = 64 << np.arange(BUCKETS - 1)
PRIOR = 0.6
"""Chance that a draft token is right where nothing is known."""
PRIOR_TRIES = 4.0
"""Tries for which a prior counts, such as that of a method for its requests: about one window."""


def bucket_of(positions: np.ndarray) -> np.ndarray:
    """The range of each output position."""
    return _BUCKET_BEGINS.searchsorted(positions, side="right")


class Acceptance:
    """Estimates for the rows of a table, shrunk to those of their method, and these to `PRIOR`."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.evidence = np.zeros((2, MAX_METHODS, BUCKETS))
        """`(2, methods, BUCKETS)`: hits and tries by range of output positions."""
        self.overall = np.zeros((5, MAX_METHODS))
        """`(5, methods)`: as `RequestTable.evidence`, and steps since the acceptance of the method changed."""

    def number(self, method: str) -> int:
        """Index of a method in the arrays, assigned at the first call for the method."""
        if method not in self.methods:
            self.methods.append(method)
        return self.methods.index(method)

    def settle(self, table: RequestTable, step: Committed) -> None:
        """Compare the tails with the tokens that a step has committed to the table, and learn from them."""
        table.settle(step, bucket_of(table.committed[step.rows] - step.counts), self.evidence, self.overall)

    def of_method(self) -> np.ndarray:
        """`(methods, BUCKETS)`: chance that a token is right given that those before it are."""
        return _draw(self.evidence, _draw(self.overall, PRIOR)[:, None])

    def probability(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)`: the same chance for single requests at their output positions."""
        at_positions = self.of_method().take(bucket_of(table.committed[rows]), axis=1)
        return _draw(table.evidence.take(rows, axis=2), at_positions)

    def doubt(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)`: standard deviation of this estimate."""
        tries = self.overall[1][:, None] + table.evidence[1].take(rows, axis=1)
        chances = self.probability(table, rows)
        deviation: np.ndarray = np.sqrt(chances * (1.0 - chances) / (tries + PRIOR_TRIES))
        return deviation


def _draw(evidence: np.ndarray, prior: np.ndarray | float) -> np.ndarray:
    chances: np.ndarray = (evidence[0] + PRIOR_TRIES * prior) / (evidence[1] + PRIOR_TRIES)
    return chances
