"""Whether drafts went bad all at once: each step's acceptance against that of the steps before.

A drafter that lags behind the policy loses a little with every step; one that was handed wrong weights, or draws with
another noise, is hardly ever right from one step to the next. Tokens are the same either way: only the speed shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_ENOUGH = 200
"""Draft tokens to judge by; a sure alarm does not wait for them. They may be those of several steps, since a method
that has gone bad is soon asked for few."""
_COLLAPSE = 0.5
"""Share of the usual acceptance below which it is an alarm."""
_DOUBT = 0.001
"""Largest probability of a false alarm: of so few accepted tokens with an acceptance at that bound."""
_MEMORY = 0.8
"""Weight of the past in the usual acceptance."""


@dataclass(slots=True)
class _Method:
    usual: float | None = None
    """Acceptance."""
    alarmed: bool = False
    drafted: int = 0
    """Draft tokens since the last judgement, and how many of them were right."""
    accepted: int = 0


class DrafterWatchdog:
    """Watches the acceptance of a run's draft methods."""

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}

    def observe(self, by_method: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
        """Take one step's (drafted, accepted) tokens by method.

        Returns:
            Methods that have just collapsed → (acceptance now, usual acceptance); each is reported once, until it has
            been as good as before again.
        """
        alarms: dict[str, tuple[float, float]] = {}
        for name, (drafted, accepted) in by_method.items():
            method = self._methods.setdefault(name, _Method())
            method.drafted += drafted
            method.accepted += accepted
            usual, rate = method.usual, method.accepted / max(method.drafted, 1)
            collapsed = usual is not None and _is_below(_COLLAPSE * usual, rate, method.drafted)
            if method.drafted < _ENOUGH and not collapsed:
                continue
            method.drafted = method.accepted = 0
            if usual is None:
                method.usual = rate
            elif not collapsed:
                method.alarmed = method.alarmed and rate < usual
                method.usual = _MEMORY * usual + (1.0 - _MEMORY) * rate
            else:  # what is usual is not learnt from a collapse
                if not method.alarmed:
                    alarms[name] = (rate, usual)
                method.alarmed = True
        return alarms


def _is_below(bound: float, rate: float, drafted: int) -> bool:
    """Whether an acceptance of `rate` is too low for chance (Chernoff: P <= exp(-n KL(rate || bound)))."""
    if not rate < bound < 1.0:
        return False
    divergence = (1.0 - rate) * math.log((1.0 - rate) / (1.0 - bound))
    if rate > 0.0:
        divergence += rate * math.log(rate / bound)
    return drafted * divergence > -math.log(_DOUBT)
