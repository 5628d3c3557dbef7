"""Measured acceptance of a draft method, by depth: how often the first i tokens of a tail were all right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specactor_ray.errors import InputError


def expected_accepted(probability: float, length: int) -> float:
    """Expected accepted tokens of a tail: `sum_{i=1..length} p^i`, each token being right with `p` given that those
    before it are (the model behind τ(w) of SpecActor, arXiv 2511.16193, section 4)."""
    p = min(max(probability, 0.0), 1.0)
    if p == 1.0:
        return float(max(0, length))
    return p * (1.0 - p ** max(0, length)) / (1.0 - p)


@dataclass(frozen=True, slots=True)
class Survival:
    """`rates[i-1]`: share of steps at which at least `i` draft tokens were there and right, for i = 1..len(rates).

    A step without a guess counts as a miss: supply is part of it. The plan's equations know one number p, the chance
    of each further token. Real tails are not geometric (a copied passage is right for long or not at all), so for
    each window the p is taken that gives the mean accepted length that was measured *for that window*.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = all(a >= b for a, b in zip(self.rates, self.rates[1:], strict=False))
        if not self.rates or not falling or not 0.0 <= self.rates[-1] <= self.rates[0] <= 1.0:
            raise InputError(f"{self.rates} are no survival rates: numbers from 1 to 0 that do not rise")

    @classmethod
    def constant(cls, probability: float) -> Survival:
        """The survival of tails whose every token is right with the same probability, at any depth."""
        return cls((probability,))

    def probability(self, window: int) -> float:
        """The p with `sum_{i=1..w} p^i` equal to the mean accepted length measured within this window; beyond the
        measured depth that of the whole depth.

        Raises:
            ValueError: The window is below 1.
        """
        if window < 1:
            raise ValueError(f"window {window} has no draft tokens")
        depth = min(window, len(self.rates))
        if depth == 1:
            return self.rates[0]
        wanted = sum(self.rates[:depth])
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2.0
            if expected_accepted(middle, depth) < wanted:
                low = middle
            else:
                high = middle
        return high


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
