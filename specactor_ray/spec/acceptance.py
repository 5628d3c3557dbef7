"""How likely draft tokens are to be right: hits and tries with forgetting, per row, method and output position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from specactor_ray.spec.table import RequestTable

BUCKETS = 8
"""Ranges of output positions: 0-63, 64-127, 128-255, ..."""
_FIRST_BUCKET_BITS = 6
DEFAULT_PRIOR = 0.6
PRIOR_TRIES = 8.0
"""Weight of what is known of many against what is known of one: about one window."""
HALF_LIFE_STEPS = 128.0
"""Verify steps after which an observation counts half, whether or not anything was tried since. That is the one rule of
exploration: what was not tried for long is forgotten, and of the unknown the best is hoped for."""
_FADE = 0.5 ** (1.0 / HALF_LIFE_STEPS)


def bucket_of(positions: np.ndarray) -> np.ndarray:
    """The range of each output position."""
    exponents = np.frexp(positions)[1] - _FIRST_BUCKET_BITS
    return np.clip(exponents, 0, BUCKETS - 1)


class Acceptance:
    """Estimates for the rows of a table, drawn to those of their method, and these to a prior.

    Args:
        priors: Draft method → chance that a draft token is right, as measured offline; the number of a method is its
            place here once `number` was asked for it.
    """

    def __init__(self, priors: Mapping[str, float] | None = None, methods: int = 8) -> None:
        self._given = dict(priors or {})
        self.methods: list[str] = []
        self.prior = np.full(methods, DEFAULT_PRIOR)
        self.hits, self.tries = np.zeros((methods, BUCKETS)), np.zeros((methods, BUCKETS))
        self.guesses, self.answers = np.zeros((methods, BUCKETS)), np.zeros((methods, BUCKETS))

    def number(self, method: str) -> int:
        """Row of the arrays that stands for a method."""
        if method not in self.methods:
            self.methods.append(method)
            self.prior[len(self.methods) - 1] = self._given.get(method, DEFAULT_PRIOR)
        return self.methods.index(method)

    def fade(self, table: RequestTable) -> None:
        """A step is over: everything that is known counts a little less."""
        for evidence in (self.hits, self.tries, self.guesses, self.answers):
            evidence *= _FADE
        for own in (table.hits, table.tries, table.guesses, table.answers):
            own *= _FADE

    def of_method(self) -> np.ndarray:
        """`(methods, BUCKETS)` chance that a token is right given that those before it are."""
        return self._drawn(self.hits, self.tries, self.prior)

    def probability(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)` the same for single requests, at their output positions."""
        average = self.of_method()[:, bucket_of(table.committed[rows])]
        return _draw(table.hits[:, rows], table.tries[:, rows], average)

    def guessing(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)` chance that there is a guess at all."""
        average = self.guessing_of_method()[:, bucket_of(table.committed[rows])]
        return _draw(table.guesses[:, rows], table.answers[:, rows], average)

    def guessing_of_method(self) -> np.ndarray:
        """`(methods, BUCKETS)` the same over all requests."""
        return self._drawn(self.guesses, self.answers, np.ones(len(self.prior)))

    @staticmethod
    def _drawn(hits: np.ndarray, tries: np.ndarray, prior: np.ndarray) -> np.ndarray:
        overall = _draw(hits.sum(1), tries.sum(1), prior)
        return _draw(hits, tries, overall[:, None])


def _draw(hits: np.ndarray, tries: np.ndarray, prior: np.ndarray) -> np.ndarray:
    return (hits + PRIOR_TRIES * prior) / (tries + PRIOR_TRIES)
