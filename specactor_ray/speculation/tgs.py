"""Predicted tokens per second of one request: the equations of SpecActor (arXiv 2511.16193, section 4).

With `p` the chance that a draft token is right given that those before it are, a window of `w` tokens, `D` seconds per
drafted token and `V(w)` seconds to verify `w + 1` positions, one iteration commits τ tokens in IL seconds:

    coupled    IL = w·D + V(w)       τ = Σ_{a=0}^{w-1} p^a (1-p) (a+1)   + (w+1)·p^w
    decoupled  IL = max(w·D, V(w))   τ = Σ_{a=0}^{w-1} p^a (1-p) (a+1)/2 + w·p^w
    plain      IL = V(0)             τ = 1

and TGS = τ / IL. A decoupled miss also loses the window in flight (the /2), and a decoupled full match has no bonus
token, since its successor was drafted already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specactor_ray.messages import Mode

_TINY_S = 1e-9
"""Stands in for a time of zero or less."""


def tau_coupled(probability: float, window: int) -> float:
    """Expected tokens of a coupled iteration, the bonus or recovered one included: `Σ_{i=0}^{w} p^i`, which the sum
    above telescopes to.

    Raises:
        ValueError: The window is negative.
    """
    return _geometric(probability, _checked(window) + 1)


def tau_decoupled(probability: float, window: int) -> float:
    """Expected tokens of a decoupled iteration: `(Σ_{i=0}^{w-1} p^i + w·p^w) / 2`, which the sum above telescopes to.

    Raises:
        ValueError: The window is below 1; a drafter that may not draft is plain decoding.
    """
    if window < 1:
        raise ValueError(f"a decoupled window is 1 or more, not {window}")
    p = _unit(probability)
    return (_geometric(p, window) + window * p**window) / 2.0


def tokens_per_s(mode: Mode, probability: float, window: int, draft_s: float, verify_s: float) -> float:
    """TGS of one request.

    Args:
        mode: `plain` ignores probability, window and `draft_s`.
        probability: Chance that a draft token is right given that those before it are.
        window: Draft tokens per iteration, 1 or more.
        draft_s: D, seconds per drafted token; 0 if drafting costs nothing.
        verify_s: V(w), seconds of a verify step over `window + 1` positions; V(0) for `plain`.
    """
    verify_s = max(verify_s, _TINY_S)
    if mode is Mode.PLAIN:
        return 1.0 / verify_s
    drafting_s = window * max(draft_s, 0.0)
    if mode is Mode.COUPLED:
        return tau_coupled(probability, window) / (drafting_s + verify_s)
    return tau_decoupled(probability, window) / max(drafting_s, verify_s)


def best_window(
    mode: Mode, probability: float, draft_s: float, verify_s: Sequence[float], max_window: int
) -> tuple[float, int]:
    """The window of 1..max_window with the highest TGS.

    The same as `max` over `tokens_per_s`, with the sums carried from one window to the next: verifiers call this for
    every request and method.

    Args:
        mode: `coupled` or `decoupled`.
        probability: Chance that a draft token is right given that those before it are.
        draft_s: D, seconds per drafted token.
        verify_s: `verify_s[w]` is V(w); `max_window + 1` values at least.
        max_window: 1 or more.

    Returns:
        (TGS, window); of equal ones the smallest window.
    """
    p, draft_s = _unit(probability), max(draft_s, 0.0)
    best, chosen = 0.0, 1
    power, total = 1.0, 0.0  # p^(w-1) and Σ_{i<w-1} p^i
    for window in range(1, max_window + 1):
        total += power
        power *= p
        seconds = max(verify_s[window], _TINY_S)
        if mode is Mode.COUPLED:
            rate = (total + power) / (window * draft_s + seconds)
        else:
            rate = (total + window * power) / (2.0 * max(window * draft_s, seconds))
        if rate > best:
            best, chosen = rate, window
    return best, chosen


def _geometric(probability: float, terms: int) -> float:
    """`Σ_{i=0}^{terms-1} p^i`. The quotient (1 - p^n) / (1 - p) loses all digits near p = 1, so its numerator is taken
    from the logarithm; 1 - p itself is exact there."""
    p = _unit(probability)
    if p == 1.0:
        return float(terms)
    if p < 0.5:
        return (1.0 - p**terms) / (1.0 - p)
    return -math.expm1(terms * math.log1p(p - 1.0)) / (1.0 - p)


def _unit(probability: float) -> float:
    return min(max(probability, 0.0), 1.0)


def _checked(window: int) -> int:
    if window < 0:
        raise ValueError(f"a window is 0 or more, not {window}")
    return window
