"""Hidden states on their way out of an engine: every sequence position of a request once, in order."""

from __future__ import annotations

import numpy as np


class StateExport:
    """Exported hidden states of one request that no output has handed out yet."""

    __slots__ = ("_handed_out", "_kept")

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self._handed_out = 0

    def keep(self, first: int, states: np.ndarray, num_context: int, num_accepted: int) -> None:
        """Take what one forward computed.

        Args:
            first: Sequence position of the first state.
            states: `(num_context + draft tokens, width)`: of context positions, then of draft tokens.
            num_context: How many of them are of the context.
            num_accepted: Draft tokens that were accepted; the states of the others are dropped. After a preemption
                context is computed again whose states were handed out before: that is passed over.
        """
        known = self._handed_out + sum(map(len, self._kept)) - first
        self._kept.append(states[known : num_context + num_accepted])

    def hand_out(self, end: int) -> tuple[int, np.ndarray]:
        """`(position of the first, states)` up to position `end`; what lies behind is dropped."""
        begin = self._handed_out
        states = np.concatenate(self._kept)[: end - begin]
        self._handed_out, self._kept = end, []
        return begin, states
