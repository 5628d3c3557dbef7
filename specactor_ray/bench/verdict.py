"""The conclusion of a paired comparison of drafted with plain decoding: ratio, its interval, and a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""97.5% quantiles of Student's t at 1 to 8 degrees of freedom; an expansion is within 0.2% above."""
_SAME = 0.02
"""Difference of the ratio from 1 that makes no difference to a user."""
_WIDE = 0.1
"""Largest distance of the interval's ends from 1 at which it shows that both are equally fast."""


def verdict(rounds: Sequence[tuple[float, float]], acceptance_length: float, subject: str) -> dict[str, Any]:
    """What rounds of (plain tokens/s, drafted tokens/s), both on the same work, say about drafts.

    `ratio` is the geometric mean over rounds and `interval` its 95% interval (None for one round), both at most
    `acceptance_length`; `outcome` is `pays`, `loses`, `even` (no difference that matters) or `noisy` (the rounds are
    not conclusive), and `verdict` a sentence.

    A step commits `acceptance_length` tokens of a request and takes no less time than a plain one, so a ratio above it
    is noise: it is not claimed. The interval is Student's, of the logarithms of the rounds' ratios. `subject` begins
    the sentence, as in "for these prompts at T=1, batch 16".
    """
    logs = [math.log(drafted / plain) for plain, drafted in rounds]
    mean = fmean(logs)
    half = _quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    low, high, measured = math.exp(mean - half), _exp(mean + half), math.exp(mean)
    ratio, most = min(measured, acceptance_length), min(high, acceptance_length)
    outcome = _outcome(ratio, low, high, acceptance_length)
    interval = None if math.isinf(half) else [round(min(low, most), 4), round(most, 4)]
    sentence = f"{subject}: {_sentence(outcome, ratio, interval, measured)}"
    return {"ratio": round(ratio, 4), "interval": interval, "outcome": outcome, "verdict": sentence}


def _outcome(ratio: float, low: float, high: float, acceptance_length: float) -> str:
    if low > acceptance_length * (1.0 + _SAME):
        return "noisy"  # other work slowed plain decoding down
    if low > 1.0 and ratio >= 1.0 + _SAME:
        return "pays"
    if high < 1.0 and ratio <= 1.0 - _SAME:
        return "loses"
    return "even" if low >= 1.0 - _WIDE and high <= 1.0 + _WIDE else "noisy"


def _sentence(outcome: str, ratio: float, ends: Sequence[float] | None, measured: float) -> str:
    if ends is None:
        return f"too noisy to tell: one round gave {measured:.2f} of plain decoding, without an error"
    low, high = ends
    figures = f"({ratio:.2f} of plain decoding, {low:.2f} to {high:.2f})"
    if measured > ratio:
        figures = (
            f"({measured:.2f} of plain decoding was measured, of which the acceptance length explains {ratio:.2f})"
        )
    return {
        "pays": f"drafts pay {figures}",
        "loses": f"drafts do not pay {figures}; auto will suspend them",
        "even": f"drafts make no difference {figures}",
        "noisy": f"too noisy to tell {figures}; more rounds or an idle machine may tell",
    }[outcome]


def _quantile(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf
