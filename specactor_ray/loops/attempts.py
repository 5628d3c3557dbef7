"""Which attempts at its requests a verifier has ended, so that none is begun twice.

Submissions and cancellations may be repeated, late, or overtake each other. The attempt's number tells them apart: what
has ended or was cancelled is not begun again, however late its submission arrives.
"""

from __future__ import annotations

_REMEMBERED = 65_536
"""Requests remembered: far more than can be submitted while a message is on its way."""


class EndedAttempts:
    """The newest attempt per request that has ended, was refused or was cancelled.

    Args:
        remembered: Requests; beyond it those that ended longest ago are forgotten.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._newest: dict[str, int] = {}

    def note(self, request_id: str, attempt: int) -> None:
        """This attempt is over, and so are those before it."""
        newest = max(attempt, self._newest.pop(request_id, attempt))
        self._newest[request_id] = newest
        if len(self._newest) > self._remembered:
            del self._newest[next(iter(self._newest))]

    def covers(self, request_id: str, attempt: int) -> bool:
        """This attempt must not be begun."""
        newest = self._newest.get(request_id)
        return newest is not None and attempt <= newest
