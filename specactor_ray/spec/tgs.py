"""Predicted tokens per second of one request: the equations of SpecActor (arXiv 2511.16193, section 4).

With `p` the chance that a draft token is right given that those before it are, a window of `w` tokens, `D` seconds per
drafted token and `V(w)` seconds to verify `w + 1` positions, one iteration commits τ tokens in IL seconds:

    coupled    IL = w·D + V(w)       τ = Σ_{a=0}^{w-1} p^a (1-p) (a+1)   + (w+1)·p^w  =  Σ_{i=0}^{w} p^i
    decoupled  IL = max(w·D, V(w))   τ = Σ_{a=0}^{w-1} p^a (1-p) (a+1)/2 + w·p^w      =  (Σ_{i=0}^{w-1} p^i + w·p^w) / 2
    plain      IL = V(0)             τ = 1

and TGS = τ / IL. A decoupled miss also loses the window in flight (the /2), and a decoupled full match has no bonus
token, since its successor was drafted already.
"""

from __future__ import annotations

import numpy as np

_TINY_S = 1e-9
"""Stands in for a time of zero or less."""


def taus(probability: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """`(n, window)` each: τ of coupled and of decoupled iterations at windows 1, 2, ..., for `(n,)` probabilities."""
    powers = np.clip(probability, 0.0, 1.0)[:, None] ** np.arange(window + 1)
    sums = np.cumsum(powers, axis=1)
    return sums[:, 1:], (sums[:, :-1] + np.arange(1, window + 1) * powers[:, 1:]) / 2.0


def tau_coupled(probability: float, window: int) -> float:
    """Expected tokens of a coupled iteration, the bonus or recovered one included."""
    return float(taus(np.array([probability]), window)[0][0, -1])


def tau_decoupled(probability: float, window: int) -> float:
    """Expected tokens of a decoupled iteration."""
    return float(taus(np.array([probability]), window)[1][0, -1])


def window_rates(probability: np.ndarray, window: int, draft_s: float, verify_s: np.ndarray) -> np.ndarray:
    """`(n, window)` TGS at windows 1, 2, ...: the better of coupled and decoupled.

    Args:
        probability: `(n,)`.
        window: The largest.
        draft_s: D.
        verify_s: `verify_s[w]` is V(w); `window + 1` values at least.
    """
    drafting = np.arange(1, window + 1) * draft_s
    seconds = np.maximum(verify_s[1 : window + 1], _TINY_S)
    coupled, decoupled = taus(probability, window)
    return np.maximum(coupled / (drafting + seconds), decoupled / np.maximum(drafting, seconds))
