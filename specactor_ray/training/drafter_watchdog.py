"""Whether drafts went bad all at once: each weight version's acceptance against that of the versions before.

Every training step rolls out with a new version of the policy. A drafter that lags behind it loses a little each time;
one that was handed wrong weights, or draws with another noise, is right hardly ever from one step to the next. The
tokens are the same either way, so nothing but the speed would show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_FEWEST = 200
"""Draft tokens of a step to judge by."""
_COLLAPSE = 0.5
"""Share of the usual acceptance below which it is an alarm."""
_SIGMAS = 3.0
"""How sure the alarm has to be, in standard deviations of the step's share of accepted tokens."""
_MEMORY = 0.8
"""Weight of the past in the usual acceptance."""


@dataclass(slots=True)
class _Usual:
    """What is usual for one method."""

    rate: float
    alarmed: bool = False


class DrafterWatchdog:
    """One run's draft methods, looked at once per step."""

    def __init__(self) -> None:
        self._usual: dict[str, _Usual] = {}

    def observe(self, by_method: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
        """Take one step's figures.

        Args:
            by_method: Method → (drafted, accepted) tokens of the step.

        Returns:
            Methods that have just collapsed → (acceptance now, usual acceptance); each is reported once, until it has
            been as good as before again.
        """
        alarms: dict[str, tuple[float, float]] = {}
        for method, (drafted, accepted) in by_method.items():
            if drafted < _FEWEST:
                continue
            rate = accepted / drafted
            usual = self._usual.setdefault(method, _Usual(rate))
            threshold = _COLLAPSE * usual.rate
            doubt = _SIGMAS * math.sqrt(max(threshold * (1.0 - threshold), 0.0) / drafted)
            if rate < threshold - doubt:
                if not usual.alarmed:
                    alarms[method] = (rate, usual.rate)
                usual.alarmed = True
                continue  # what is usual is not learnt from a collapse
            usual.alarmed = usual.alarmed and rate < usual.rate
            usual.rate = _MEMORY * usual.rate + (1.0 - _MEMORY) * rate
        return alarms
