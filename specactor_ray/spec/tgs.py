"""Predicted tokens per second of one request: the equations of SpecActor (arXiv 2511.16193, section 4).

With `S_i` the chance that the first `i` draft tokens are all right (`p^i` in the paper), a window of `w` tokens, `D`
seconds per drafted token and `V(w)` seconds to verify `w + 1` positions, one iteration commits τ tokens in IL seconds:

    coupled    IL = w·D + V(w)       τ = Σ_{a<w} (S_a - S_{a+1}) (a+1)   + (w+1)·S_w  =  Σ_{i=0}^{w} S_i
    decoupled  IL = max(w·D, V(w))   τ = Σ_{a<w} (S_a - S_{a+1}) (a+1)/2 + w·S_w      =  (Σ_{i=0}^{w-1} S_i + w·S_w) / 2
    plain      IL = V(0)             τ = 1

and TGS = τ / IL. A decoupled miss also loses the window in flight (the /2), and a full match has no bonus token.
"""

from __future__ import annotations

import numpy as np

_TINY_S = 1e-9


def geometric(probability: np.ndarray, window: int) -> np.ndarray:
    """`(n, window + 1)` S_0, S_1, ... of drafts whose every token is right with `(n,)` the same probability."""
    powers: np.ndarray = np.clip(probability, 0.0, 1.0)[:, None] ** np.arange(window + 1)
    return powers


def share_right(survival: np.ndarray) -> float:
    """p of `(window + 1,)` S_i: the share of draft tokens that were right, of those before which all were."""
    return float(survival[1:].sum() / survival[:-1].sum())


def iterations(
    survival: np.ndarray, draft_s: float, verify_s: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """τ and IL of coupled iterations, τ and IL of decoupled ones, at windows 1, 2, ...: `(n, window)` and `(window,)`.
    `survival`: `(n, window + 1)` S_i; `draft_s`, `verify_s`: D, and `(window + 1,)` V(0), V(1), ..."""
    windows, sums = np.arange(1, survival.shape[1]), np.cumsum(survival, axis=1)
    drafting_s, seconds = windows * draft_s, np.maximum(verify_s[1:], _TINY_S)
    decoupled = (sums[:, :-1] + windows * survival[:, 1:]) / 2.0
    return (sums[:, 1:], drafting_s + seconds), (decoupled, np.maximum(drafting_s, seconds))


def window_rates(probability: np.ndarray, window: int, draft_s: float, verify_s: np.ndarray) -> np.ndarray:
    """`(n, window)` TGS at windows 1, 2, ..., `window`, the better of coupled and decoupled. `probability`: `(n,)`;
    `draft_s`, `verify_s`: D, and `window + 1` or more of V(0), V(1), ..."""
    coupled, decoupled = iterations(geometric(probability, window), draft_s, verify_s[: window + 1])
    rates: np.ndarray = np.maximum(coupled[0] / coupled[1], decoupled[0] / decoupled[1])
    return rates
