"""Measured acceptance of a draft method, by depth: how often the first i tokens of a tail were all right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specactor_ray.errors import InputError


@dataclass(frozen=True, slots=True)
class Survival:
    """`rates[i-1]`: S_i, the share of steps at which at least `i` draft tokens were there and right.

    A step without a guess counts as a miss: supply is part of it.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = all(a >= b for a, b in zip(self.rates, self.rates[1:], strict=False))
        if not self.rates or not falling or not 0.0 <= self.rates[-1] <= self.rates[0] <= 1.0:
            raise InputError(f"{self.rates} are no survival rates: numbers from 1 to 0 that do not rise")

    def within(self, window: int) -> np.ndarray:
        """`(window + 1,)` S_0 to S_w; beyond the measured depth each token is as likely as the last one measured."""
        known = np.array([1.0, *self.rates])
        ratio = known[-1] / known[-2] if known[-2] else 0.0
        beyond = known[-1] * ratio ** np.arange(1, window + 2 - len(known))
        survival: np.ndarray = np.concatenate([known, beyond])[: window + 1]
        return survival

    def probability(self, window: int) -> float:
        """p: the share of draft tokens that were right, of those before which all were, within this window."""
        survival = self.within(window)
        return float(survival[1:].sum() / survival[:-1].sum())


def survival_from_counts(trials: Sequence[int], hits: Sequence[int]) -> Survival:
    """From counts per depth. Depths that were never tried are left out, and so are those after them.

    Raises:
        InputError: Nothing was tried.
    """
    rates: list[float] = []
    for tried, hit in zip(trials, hits, strict=True):
        if not tried:
            break
        rates.append(min(hit / tried, rates[-1] if rates else 1.0))
    if not rates:
        raise InputError("no draft could be held against an output: the outputs are too short to measure acceptance")
    return Survival(tuple(rates))
