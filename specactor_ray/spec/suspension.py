"""When drafts are left alone: measured tokens per second of steps with drafts against those of plain steps."""

from __future__ import annotations

import numpy as np

PROBE_STEPS = 8
"""Steps with drafts before they are judged."""
TELL_EVERY = 16
"""Steps of a suspension between two at which drafters are told what was committed."""
_FADE = 1.0 - 1.0 / 48.0
"""Weight that a step loses with each one after it."""
_SHORTEST, _LONGEST = 2, 256
"""Steps of a suspension, four times as many when drafts bring nothing after it either."""
_WORTH = 1.01
"""Tokens per second with drafts over those of plain steps that are worth having drafters."""
_FEWER = 0.5
"""Part of its requests at which a suspension ends early."""


class Suspension:
    """Leaves drafts alone for a while where steps with them commit no more tokens per second than plain ones would.

    What a plain step in place of one with drafts would have taken follows from that step: its seconds without the wait
    and without the draft positions of the forward. So a machine that is slow for a while says nothing against either.
    """

    def __init__(self) -> None:
        self._left = 0
        self._spell = _SHORTEST
        self._rows = 0
        """Requests when it began."""
        self._steps = 0
        """With drafts, since the last suspension."""
        self._sums = np.zeros(4)
        """Tokens and seconds of these steps; the same if they had been plain."""

    @property
    def is_on(self) -> bool:
        """Drafts are neither waited for nor verified."""
        return self._left > 0

    @property
    def is_quiet(self) -> bool:
        """Nor are drafters told of what is committed."""
        return self._left % TELL_EVERY != 0

    def end(self) -> None:
        """Resume drafting now."""
        self._left, self._steps, self._spell = 0, 0, _SHORTEST

    def record(self, num_rows: int, accepted: int, seconds: float, drafting_s: float) -> None:
        """A step has ended.

        Args:
            num_rows: Requests that were decoded.
            accepted: Draft tokens that were right.
            seconds: That it took in all.
            drafting_s: Of them, waiting for drafts and verifying them.
        """
        if not num_rows:
            return
        if self._left:
            # Fewer requests leave more room for drafts.
            self._left = self._left - 1 if num_rows > _FEWER * self._rows else 0
            return
        self._steps += 1
        if self._steps == 1:
            self._sums[:] = 0.0
            return  # drafters catch up
        self._sums = _FADE * self._sums + (num_rows + accepted, seconds, num_rows, max(seconds - drafting_s, 0.0))
        tokens, seconds, plain_tokens, plain_s = self._sums
        if self._steps <= PROBE_STEPS:
            return
        if tokens * plain_s <= _WORTH * plain_tokens * seconds:
            self._left, self._steps, self._rows = self._spell, 0, num_rows
            self._spell = min(4 * self._spell, _LONGEST)
        elif self._steps > 4 * PROBE_STEPS:
            self._spell = _SHORTEST
