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
_FEWER = 0.5
"""Part of its requests at which a suspension ends early."""
_OWN_WEIGHT = 0.1
"""Weight of the newest plain step in the moving mean of what the verifier's own Python takes in one."""


class Suspension:
    """Leaves drafts alone for a while where steps with them commit fewer tokens per second than plain ones would.

    What a plain step in place of one with drafts would have taken follows from that step: its seconds without the wait,
    without the draft positions of the forward, and without what the verifier's own Python takes more than in plain
    steps. So a machine that is slow for a while says nothing against either.
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
        self._plain_row_s = 0.0
        """The verifier's own Python per request in plain steps; nothing, it is hoped, as long as there was none."""

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

    def record(self, num_rows: int, accepted: int, seconds: float, drafting_s: float, own_s: float) -> None:
        """A step has ended.

        Args:
            num_rows, accepted: Requests that were decoded, and draft tokens that were right.
            seconds: Duration of the step.
            drafting_s: Of them, waiting for drafts and verifying them.
            own_s: Of them, the verifier's own Python.
        """
        if not num_rows:
            return
        if self._left:
            if self.is_quiet:
                self._note_plain(own_s / num_rows)
            # Fewer requests leave more room for drafts.
            self._left = self._left - 1 if num_rows > _FEWER * self._rows else 0
            return
        self._steps += 1
        if self._steps == 1:
            self._sums[:] = 0.0
            return  # drafters catch up
        saved_s = max(own_s - num_rows * self._plain_row_s, 0.0)
        plain_s = max(seconds - drafting_s - saved_s, 0.0)
        self._sums = _FADE * self._sums + (num_rows + accepted, seconds, num_rows, plain_s)
        if self._steps > PROBE_STEPS:
            self._judge(num_rows)

    def _judge(self, num_rows: int) -> None:
        tokens, seconds, plain_tokens, plain_s = self._sums
        if tokens * plain_s < plain_tokens * seconds:
            self._left, self._steps, self._rows = self._spell, 0, num_rows
            self._spell = min(4 * self._spell, _LONGEST)
        elif self._steps > 4 * PROBE_STEPS:
            self._spell = _SHORTEST

    def _note_plain(self, row_s: float) -> None:
        weight = _OWN_WEIGHT if self._plain_row_s else 1.0
        self._plain_row_s += weight * (row_s - self._plain_row_s)
