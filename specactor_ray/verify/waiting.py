"""How long a step waits for first drafts, and when drafting is suspended. See docs/design/policy.md."""

from __future__ import annotations

import numpy as np

from specactor_ray.verify.table import HALF_LIFE_STEPS, RequestTable

_FADE = 0.5 ** (1.0 / HALF_LIFE_STEPS)
_TRIES, _GAIN_TRIES = 8.0, 64.0
"""Observations for which a prior counts: of a tail at the next step, and of an accepted token."""
_SUNK = 2.0
"""Multiple of its worth in seconds after which a wait ends: seconds that have passed do not count any more."""
_LEAST_WEIGHT, _FORGET_STEPS = 0.1, 256
"""Least weight of the newest wait in the mean of their seconds; steps after the last wait at which it is dropped."""
_HOPELESS, _REST_STEPS = 0.75, 16
"""Share of a wait's seconds, and steps: if a wait is worth less than this share even without the loss of a tail, none
is considered for this many steps."""
_PLAIN, _WAITED, _TAIL = range(3)
"""Kinds of a row's step: plain, after a wait for a tail, or with a tail at its begin."""
PROBE_STEPS = 8
"""Steps with drafts before their speed is compared."""
TELL_EVERY = 16
"""Period, in steps of a suspension, at which commits are sent to drafters."""
_STEP_FADE = 1.0 - 1.0 / 48.0
"""Weight that a step with drafts loses with each one after it."""
_SHORTEST, _LONGEST = 2, 256
"""Least and most steps of a suspension, which is four times as long if drafts do not pay after it either."""
_FEWER = 0.5
"""Share of its initial requests at which a suspension ends early."""
_OWN_WEIGHT = 0.1
"""Weight of the newest plain step in the moving mean of the Python time of plain steps."""


class Waiting:
    """Compares the long-run tokens per second of two rules: to wait if a row has no tail, and not to wait.

    A row begins each step with or without a tail. Without one, a plain step commits one token, and the next step has a
    tail with probability `a`, since the drafter gets a whole step ahead; after a step that waited, only with `b`; after
    a step with a tail, with `c`. In the long run a tail is worth

        h = (tokens of a step with a tail - 1) / (1 + a - c)

    tokens more than none. A wait of `w` seconds for `n` rows pays where `n · (p + (b - a) · h)`, p tokens accepted of
    each, exceeds the tokens that all rows commit in `w` and in the seconds of verifying. All of these are decaying
    means; without observations the estimates are optimistic: `w` is one draft forward and its messages, and `b` = `a`.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((3, 3))  # by kind of step: rows, those with a tail at the next step, committed tokens
        self._hoped = np.zeros(2)  # rows without a tail, and the sum of the chances of their first draft tokens
        self._rate = np.zeros(2)  # tokens and seconds of steps
        self._answer_s, self._waits = 0.0, 0  # mean seconds of a wait; waits since the mean was dropped
        self._left = 0  # steps until the mean is dropped
        self.rest = 0
        """Number of next steps in which no wait is considered."""
        self._did = np.zeros(0, np.int8)
        self._began = np.zeros((3, 0), np.int32)  # by row at its newest step: generation, steps, committed tokens

    def begin(self, table: RequestTable, rows: np.ndarray, has_tail: np.ndarray) -> None:
        """Begin a step: learn from the rows' states since the previous step."""
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
        """Longest wait in seconds of rows whose first draft tokens are right with `chances`; 0 where none pays.
        `verify_s`: seconds of verifying one draft token of each; `least_s`: least seconds of an answer."""
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
        """Record a wait of these rows."""
        self._did[rows] = _WAITED
        self._waits, self._left = self._waits + 1, _FORGET_STEPS
        self._answer_s += max(1.0 / self._waits, _LEAST_WEIGHT) * (seconds - self._answer_s)

    def record(self, tokens: int, seconds: float) -> None:
        """Record the end of a step."""
        self._rate = _FADE * self._rate + (tokens, seconds)
        self.rest, self._left = max(self.rest - 1, 0), self._left - 1
        if self._left == 0:
            self._answer_s, self._waits = 0.0, 0


class Suspension:
    """Suspends drafts for a while if steps with drafts commit fewer tokens per second than plain ones would: the same
    steps without the wait, the draft positions and the additional Python. A slow machine favours neither."""

    def __init__(self) -> None:
        self._left, self._spell = 0, _SHORTEST  # remaining steps of this suspension, and steps of the next one
        self._rows = 0  # requests at its begin
        self._steps = 0  # steps with drafts since the last suspension
        self._sums = np.zeros(4)  # tokens and seconds of these steps; the same for plain steps in their place
        self._plain_row_s = 0.0  # Python seconds per request in plain steps; 0 before the first one

    @property
    def is_on(self) -> bool:
        """Whether steps neither wait for drafts nor verify any."""
        return self._left > 0

    @property
    def is_quiet(self) -> bool:
        """Whether commits are not sent to drafters either."""
        return self._left % TELL_EVERY != 0

    def end(self) -> None:
        """Resume drafting now."""
        self._left, self._steps, self._spell = 0, 0, _SHORTEST

    def record(self, num_rows: int, accepted: int, seconds: float, drafting_s: float, own_s: float) -> None:
        """Record a step of `seconds`, of which `drafting_s` for waiting for drafts and verifying them, and `own_s` in
        the verifier's Python. `num_rows`, `accepted`: decoded requests, and right draft tokens."""
        if not num_rows:
            return
        if self._left:
            if self.is_quiet:
                weight = _OWN_WEIGHT if self._plain_row_s else 1.0
                self._plain_row_s += weight * (own_s / num_rows - self._plain_row_s)
            # Fewer requests leave more room for drafts.
            self._left = self._left - 1 if num_rows > _FEWER * self._rows else 0
            return
        self._steps += 1
        if self._steps == 1:
            self._sums[:] = 0.0
            return  # drafters catch up
        saved_s = max(own_s - num_rows * self._plain_row_s, 0.0)
        plain_s = max(seconds - drafting_s - saved_s, 0.0)
        self._sums = _STEP_FADE * self._sums + (num_rows + accepted, seconds, num_rows, plain_s)
        if self._steps <= PROBE_STEPS:
            return
        tokens, seconds, plain_tokens, plain_s = self._sums
        if tokens * plain_s < plain_tokens * seconds:
            self._left, self._steps, self._rows = self._spell, 0, num_rows
            self._spell = min(4 * self._spell, _LONGEST)
        elif self._steps > 4 * PROBE_STEPS:
            self._spell = _SHORTEST
