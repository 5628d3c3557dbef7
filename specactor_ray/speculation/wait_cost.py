"""What it costs to wait for drafts of the newest commit, measured while a coupled verifier does so."""

from __future__ import annotations

from collections import deque
from statistics import median


class WaitCost:
    """Moving medians over the waits that were answered.

    Args:
        memory: Waits kept.
    """

    def __init__(self, memory: int = 15) -> None:
        if memory < 1:
            raise ValueError(f"memory is {memory}; it must be 1 or more")
        self._waits: deque[float] = deque(maxlen=memory)
        self._overheads: deque[float] = deque(maxlen=memory)

    def record(self, waited_s: float, drafting_s: float) -> None:
        """A wait of `waited_s` seconds was answered; `drafting_s` of them are accounted for by the tokens that came."""
        self._waits.append(max(waited_s, 0.0))
        self._overheads.append(max(waited_s - max(drafting_s, 0.0), 0.0))

    @property
    def wait_s(self) -> float:
        """Seconds of a whole wait; 0 before the first."""
        return median(self._waits) if self._waits else 0.0

    @property
    def overhead_s(self) -> float:
        """Seconds of it that do not depend on how many tokens are drafted: messages there and back, and the drafter's
        reading of the commit; 0 before the first."""
        return median(self._overheads) if self._overheads else 0.0
