"""How long a step waits for first drafts: what a wait adds against what its seconds, and the next step, lose."""

from __future__ import annotations

import numpy as np

from specactor_ray.verify.acceptance import HALF_LIFE_STEPS
from specactor_ray.verify.table import RequestTable

_FADE = 0.5 ** (1.0 / HALF_LIFE_STEPS)
_TRIES, _GAIN_TRIES = 8.0, 64.0
"""Observations for which what is hoped for counts: of a tail at the next step, and of an accepted token."""
_SUNK = 2.0
"""A wait ends after so many times the seconds that it is worth: those that have passed do not count any more."""
_LEAST_WEIGHT = 0.1
"""Weight of the newest wait in the moving mean of their seconds."""
_FORGET_STEPS = 256
"""Steps after the last wait at which that mean is forgotten."""
_HOPELESS, _REST_STEPS = 0.75, 16
"""Where a wait is worth less than this part of its seconds even if it costs no tail, none is considered for so long."""
_PLAIN, _WAITED, _TAIL = range(3)
"""What a row did in a step: neither of the others, wait for a tail, or have one at hand."""


class Waiting:
    """Compares the long-run tokens per second of two rules, to wait where a row has no tail, and not to.

    A row begins each step with a tail or without one. Without one, a plain step commits one token, and the next step
    has a tail with probability `a`, since the drafter gets a whole step ahead; after a step that waited, only with `b`;
    after a step with a tail, with `c`. In the long run a tail is worth

        h = (tokens of a step with a tail - 1) / (1 + a - c)

    tokens more than none. A wait of `w` seconds for `n` rows pays where `n · (p + (b - a) · h)`, p tokens accepted of
    each, exceeds what all rows commit in `w` and in the seconds of verifying. All of these are means that forget; where
    nothing is known the best is hoped for: `w` is one draft forward and its messages, and `b` = `a`.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((3, 3))
        """By what a row did: rows, those with a tail at the next step, and tokens committed."""
        self._hoped = np.zeros(2)
        """Rows without a tail, and the chances of their first draft tokens."""
        self._rate = np.zeros(2)
        """Tokens and seconds of steps."""
        self._answer_s, self._waits, self._left = 0.0, 0, 0
        """Seconds of a wait; waits since it was forgotten; steps until it is."""
        self.rest = 0
        """Steps in which no wait is considered."""
        self._did = np.zeros(0, np.int8)
        self._began = np.zeros((3, 0), np.int32)
        """By row of the table, at its newest step: generation, steps and committed tokens."""

    def begin(self, table: RequestTable, rows: np.ndarray, has_tail: np.ndarray) -> None:
        """A step begins: learn what became of the rows since the step before."""
        if (more := len(table.generation) - len(self._did)) > 0:
            self._did, self._began = np.pad(self._did, (0, more)), np.pad(self._began, ((0, 0), (0, more)))
        now = np.stack((table.generation[rows], table.steps[rows], table.committed[rows]))
        generation, steps, tokens = now - self._began[:, rows]
        known = (generation == 0) & (steps == 1)
        did, ends = self._did[rows[known]], (None, has_tail[known], tokens[known])
        self._counts = _FADE * self._counts + np.stack([np.bincount(did, end, minlength=3) for end in ends], axis=1)
        self._hoped *= _FADE
        self._began[:, rows], self._did[rows] = now, np.where(has_tail, _TAIL, _PLAIN)

    def plan(self, chances: np.ndarray, verify_s: float, least_s: float) -> float:
        """Longest wait in seconds; 0 where none pays.

        Args:
            chances: `(n,)` of the rows that could wait: chance that the first draft token is right.
            verify_s: Seconds of verifying one draft token of each.
            least_s: Seconds that an answer takes at least; counts where no wait is remembered.
        """
        self._hoped += (len(chances), chances.sum())
        tokens, seconds = self._rate
        if not tokens:
            return 0.0
        rows, tailed, committed = self._counts.T
        gain = committed[_WAITED] - rows[_WAITED] + _GAIN_TRIES * self._hoped[1] / self._hoped[0]
        gain /= rows[_WAITED] + _GAIN_TRIES
        plain = (tailed[_PLAIN] + _TRIES) / (rows[_PLAIN] + _TRIES)
        waited = (tailed[_WAITED] + _TRIES * plain) / (rows[_WAITED] + _TRIES)
        with_tail = max(rows[_TAIL], 1.0)
        worth = max(committed[_TAIL] / with_tail - 1.0, 0.0) / (1.0 + plain - tailed[_TAIL] / with_tail)
        row_s, answer_s = len(chances) * seconds / tokens, self._answer_s if self._waits else least_s
        if row_s * gain - verify_s < _HOPELESS * answer_s:
            self.rest = _REST_STEPS
        most_s = row_s * (gain + (waited - plain) * worth) - verify_s
        return _SUNK * float(most_s) if most_s > answer_s else 0.0

    def waited(self, rows: np.ndarray, seconds: float) -> None:
        """These rows have waited for so long."""
        self._did[rows] = _WAITED
        self._waits, self._left = self._waits + 1, _FORGET_STEPS
        self._answer_s += max(1.0 / self._waits, _LEAST_WEIGHT) * (seconds - self._answer_s)

    def record(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._rate = _FADE * self._rate + (tokens, seconds)
        self.rest, self._left = max(self.rest - 1, 0), self._left - 1
        if self._left == 0:
            self._answer_s, self._waits = 0.0, 0
