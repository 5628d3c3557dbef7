"""Detection of sudden drops of draft quality: acceptance of each step compared with that of the steps before.

A drafter that lags behind the policy gets slightly worse with every step; one with wrong weights or another noise is
hardly ever right from one step to the next. Tokens are the same in both cases: only the speed differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_ENOUGH = 200
"""Draft tokens required for a judgement; a certain alarm needs fewer. They may come from several steps, since few are
requested from a method that has collapsed."""
_COLLAPSE = 0.5
"""Share of the usual acceptance below which an alarm is raised."""
_DOUBT = 0.001
"""Largest probability of a false alarm: of as few accepted tokens if the acceptance were at that bound."""
_MEMORY = 0.8
"""Weight of the past in the usual acceptance."""


@dataclass(slots=True)
class _Method:
    usual: float | None = None
    """Usual acceptance."""
    alarmed: bool = False
    drafted: int = 0
    """Draft tokens since the last judgement, and the number of right ones."""
    accepted: int = 0


class DrafterWatchdog:
    """Watches the acceptance of a run's draft methods."""

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}

    def observe(self, by_method: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
        """Add the (drafted, accepted) tokens of one step by method.

        Returns:
            Methods that have just collapsed → (present acceptance, usual acceptance); each is reported once, until its
            acceptance has recovered.
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
            else:  # a collapse does not change the usual acceptance
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
