"""The conclusion of a paired comparison of drafted with plain decoding: when rounds suffice, and what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""97.5% quantiles of Student's t at 1 to 8 degrees of freedom; an expansion is within 0.2% above."""
_SAME = 0.02
"""Difference of the ratio from 1 that makes no difference to a user."""
_WIDE = 0.1
"""Largest distance of the interval's ends from 1 at which it shows that both are equally fast."""
_NARROW = 0.05
"""Half width of the interval, of the ratio's logarithm, at which further rounds would tell no more."""


class Round(NamedTuple):
    """The same work by turns, without drafts and with."""

    plain: float
    """Tokens/s without drafts."""
    drafted: float
    length: float = 1.0
    """Acceptance length, if the work differs from round to round."""


class Estimate(NamedTuple):
    """Ratio of the speeds, and the ends of its 95% interval (0 and infinity for one round)."""

    ratio: float
    low: float
    high: float
    spread: float
    """Standard deviation of a round, as a share of the ratio."""


def estimate(rounds: Sequence[Round], length: float = 1.0) -> Estimate:
    """Geometric mean of the rounds' ratios, with Student's interval of their logarithms. Both turns of a round see the
    same minute of the machine, so a slow minute changes no ratio.

    `length`: acceptance length of all rounds together, 1 where rounds have none. A round whose prompts repeat more has
    a larger ratio, which is no error of the measurement: what varies by chance is the cost of a drafted step in plain
    steps, and the ratio is the acceptance length over that.
    """
    logs = [math.log(one.drafted / one.plain / one.length) for one in rounds]
    mean, deviation = math.log(length) + fmean(logs), stdev(logs) if len(logs) > 1 else math.inf
    half = _quantile(len(logs) - 1) * deviation / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return Estimate(math.exp(mean), math.exp(mean - half), _exp(mean + half), _exp(deviation) - 1.0)


def why_stop(
    rounds: Sequence[Round], length: float, round_s: float, left_s: float, least: tuple[int, int] = (5, 3)
) -> str:
    """Why no round follows these, in words that continue "5 rounds, "; empty: another one follows.

    They end when there are `least[0]` and the interval is narrow, or when there are `least[1]` and another round of
    `round_s` seconds does not fit into `left_s`. The rule depends on the width of the interval alone, never on the
    ratio, so that it does not wait for a result.
    """
    if len(rounds) >= max(least[0], 2):
        found = estimate(rounds, length)
        if math.log(found.high / found.low) <= 2.0 * _NARROW:
            return "enough for this interval"
    return "then the time was over" if len(rounds) >= least[1] and round_s > left_s else ""


def verdict(
    rounds: Sequence[Round], subject: str, most: float, length: float = 1.0, stopped: str = ""
) -> dict[str, Any]:
    """What rounds say about drafts.

    `ratio`, its `interval` (None for one round) and `spread` are those of `estimate`, but at most `most`, the largest
    acceptance length that any request can have had: a step takes no less time with drafts than without, so more is
    noise and is not claimed. `outcome` is `pays`, `loses`, `even` (no difference that matters) or `noisy` (the rounds
    are not conclusive), and `verdict` a sentence, which begins with `subject`, as in "for these prompts at T=1, batch
    16", and says why the rounds ended, if `stopped` does.
    """
    found = estimate(rounds, length)
    ratio, top = min(found.ratio, most), min(found.high, most)
    interval = None if len(rounds) < 2 else [round(min(found.low, top), 4), round(top, 4)]
    outcome = _outcome(ratio, found.low, found.high, most)
    return {
        "ratio": round(ratio, 4),
        "interval": interval,
        "spread": None if interval is None else round(found.spread, 4),
        "outcome": outcome,
        "verdict": f"{subject}: {_sentence(outcome, ratio, interval, found, len(rounds), stopped)}",
    }


def _outcome(ratio: float, low: float, high: float, most: float) -> str:
    if low > most * (1.0 + _SAME):
        return "noisy"  # other work slowed plain decoding down
    if low > 1.0 and ratio >= 1.0 + _SAME:
        return "pays"
    if high < 1.0 and ratio <= 1.0 - _SAME:
        return "loses"
    return "even" if low >= 1.0 - _WIDE and high <= 1.0 + _WIDE else "noisy"


def _sentence(
    outcome: str, ratio: float, ends: Sequence[float] | None, found: Estimate, rounds: int, stopped: str
) -> str:
    if ends is None:
        return f"not conclusive: {found.ratio:.2f} times as fast as plain decoding in one round, which shows no error"
    figures = f"{ratio:.2f} times as fast as plain decoding (95%: {ends[0]:.2f} to {ends[1]:.2f}"
    if found.ratio > ratio:
        figures += f"; {found.ratio:.2f} was measured, of which the acceptance length explains {ratio:.2f}"
    figures += f"; {rounds} rounds{f', {stopped}' if stopped else ''})"
    return {
        "pays": f"drafts pay: {figures}",
        "loses": f"drafts do not pay: {figures}; auto will suspend them",
        "even": f"drafts make no difference: {figures}",
        "noisy": f"not conclusive: {figures}. The rounds differed by {found.spread:.0%}; more of them may tell, or an "
        "idle machine",
    }[outcome]


def _quantile(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf
