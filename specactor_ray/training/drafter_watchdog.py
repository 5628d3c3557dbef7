"""Whether drafts went bad all at once: each weight version's acceptance against that of the versions before.

Every training step rolls out with a new version of the policy. A drafter that lags behind it loses a little each time;
one that was handed wrong weights, or draws with another noise, is right hardly ever from one step to the next. The
tokens are the same either way, so nothing but the speed would show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_ENOUGH = 200
"""Draft tokens to judge by. A method that has gone bad is soon asked for few, so they may take several steps; the alarm
does not wait for them once it is sure."""
_COLLAPSE = 0.5
"""Share of the usual acceptance below which it is an alarm."""
_DOUBT = 0.001
"""Largest probability of a false alarm: of so few accepted tokens with an acceptance at that bound."""
_MEMORY = 0.8
"""Weight of the past in the usual acceptance."""


@dataclass(slots=True)
class _Usual:
    """What is usual for one method."""

    rate: float | None = None
    alarmed: bool = False
    drafted: int = 0
    """Draft tokens since the last judgement, and how many of them were right."""
    accepted: int = 0


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
            usual = self._usual.setdefault(method, _Usual())
            usual.drafted += drafted
            usual.accepted += accepted
            collapsed = usual.rate is not None and _is_below(_COLLAPSE * usual.rate, usual.drafted, usual.accepted)
            if usual.drafted < _ENOUGH and not collapsed:
                continue
            rate = usual.accepted / usual.drafted
            usual.drafted = usual.accepted = 0
            if usual.rate is None:
                usual.rate = rate
            if collapsed:
                if not usual.alarmed:
                    alarms[method] = (rate, usual.rate)
                usual.alarmed = True
                continue  # what is usual is not learnt from a collapse
            usual.alarmed = usual.alarmed and rate < usual.rate
            usual.rate = _MEMORY * usual.rate + (1.0 - _MEMORY) * rate
        return alarms


def _is_below(bound: float, drafted: int, accepted: int) -> bool:
    """Whether the acceptance is surely below `bound`: `accepted` of `drafted` tokens are too few for it (Chernoff:
    P <= exp(-n KL(accepted / n || bound)))."""
    rate = accepted / max(drafted, 1)
    if not rate < bound < 1.0:
        return False
    divergence = (1.0 - rate) * math.log((1.0 - rate) / (1.0 - bound))
    if rate > 0.0:
        divergence += rate * math.log(rate / bound)
    return drafted * divergence > -math.log(_DOUBT)
