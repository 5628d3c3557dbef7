"""Predicted tokens per second of one request: the equations of SpecActor (arXiv 2511.16193, section 4).

With `S_i` the chance that the first `i` draft tokens are all right (`p^i` in the paper), a window of `w` tokens, `D`
seconds per drafted token and `V(w)` seconds to verify `w + 1` positions, one iteration commits τ tokens in IL seconds:

    coupled    IL = w·D + V(w)       τ = Σ_{a<w} (S_a - S_{a+1}) (a+1)   + (w+1)·S_w  =  Σ_{i=0}^{w} S_i
    decoupled  IL = max(w·D, V(w))   τ = Σ_{a<w} (S_a - S_{a+1}) (a+1)/2 + w·S_w      =  (Σ_{i=0}^{w-1} S_i + w·S_w) / 2
    plain      IL = V(0)             τ = 1

and TGS = τ / IL. A decoupled miss also loses the window in flight (the /2), and a decoupled full match has no bonus
token, since its successor was drafted already. The ladder ranks methods by these. The plan predicts decoupled drafting
by `run_ahead`, a model of this package: neither side waits, and branches rescue a share of the misses.
"""

from __future__ import annotations

import numpy as np

TINY_S = 1e-9
"""Seconds in place of a time of zero or less."""
RIGHT_BEHIND_WRONG = (0.4, 0.18, 0.12, 0.1)
"""Chance that the second, third, ... candidate of a draw is right where those before it are wrong: SmolLM2 as a drafter
that samples with the target's noise has 0.36-0.48, 0.13-0.23, 0.10-0.16 and 0.06-0.15."""
_RARELY = 1e-6
"""Chance of a new request in a step, so that rows begin without a tail also if no tail ever ends without one."""
_BEHIND_WRONG = np.array(RIGHT_BEHIND_WRONG)
_RIGHT = _BEHIND_WRONG * np.cumprod(np.append(1.0, 1.0 - _BEHIND_WRONG[:-1]))
"""`(4,)`: chance that the second, third, ... candidate is right where the first is wrong."""


def geometric(probability: np.ndarray, window: int) -> np.ndarray:
    """`(n, window + 1)`: S_0, S_1, ... of drafts whose tokens are all right with the same probability, `(n,)`."""
    powers: np.ndarray = np.clip(probability, 0.0, 1.0)[:, None] ** np.arange(window + 1)
    return powers


def share_right(survival: np.ndarray) -> float:
    """p from `(window + 1,)` S_i: the share of right draft tokens among those with only right tokens before."""
    return float(survival[1:].sum() / survival[:-1].sum())


def iterations(
    survival: np.ndarray, draft_s: float, verify_s: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """τ and IL of coupled iterations, τ and IL of decoupled ones, at windows 1, 2, ...: `(n, window)` and `(window,)`.
    `survival`: `(n, window + 1)` S_i; `draft_s`, `verify_s`: D, and `(window + 1,)` V(0), V(1), ..."""
    windows, sums = np.arange(1, survival.shape[1]), np.cumsum(survival, axis=1)
    drafting_s, seconds = windows * draft_s, np.maximum(verify_s[1:], TINY_S)
    decoupled = (sums[:, :-1] + windows * survival[:, 1:]) / 2.0
    return (sums[:, 1:], drafting_s + seconds), (decoupled, np.maximum(drafting_s, seconds))


def window_rates(probability: np.ndarray, window: int, draft_s: float, verify_s: np.ndarray) -> np.ndarray:
    """`(n, window)` TGS at windows 1, 2, ..., `window`, the better of coupled and decoupled. `probability`: `(n,)`;
    `draft_s`, `verify_s`: D, and `window + 1` or more of V(0), V(1), ..."""
    coupled, decoupled = iterations(geometric(probability, window), draft_s, verify_s[: window + 1])
    rates: np.ndarray = np.maximum(coupled[0] / coupled[1], decoupled[0] / decoupled[1])
    return rates


def run_ahead(survival: np.ndarray, forwards: float, most: int, spare: float) -> tuple[float, float]:
    """τ of a decoupled step of a verifier that does not wait, and the draft tokens that it verifies, both per row.

    The state of a row is the length of its tail. While a step verifies the tail, the drafter lengthens it. A tail that
    was right so far continues after the committed tokens; if it was refuted, a branch that begins with the right
    candidate takes its place, and without such a branch the next step of the row is plain. The results are means over
    the stationary distribution of the states.

    Args:
        survival: `(window + 1,)` S_i; tails have at most `window` tokens.
        forwards: Tokens by which a drafter lengthens a main chain in a step.
        most: Most draft tokens of a row that a step verifies.
        spare: Tokens of branches that a drafter drafts in a step for each row, the most likely needed ones.
    """
    window = len(survival) - 1
    missed, branches = survival[:-1] - survival[1:], _branch_lengths(survival, forwards, spare)
    states = np.arange(window + 1)
    grown = np.maximum(forwards - (states == 0), 0.0)  # the forward under way drafts for the refuted chain
    verified, tails = np.minimum(states, most), np.minimum(states + grown, window)
    # By state and number of right tokens before the first wrong one: the chance, and the rest of the tail.
    right = states[:window]
    reached = (right <= verified[:, None]) & (right < tails[:, None])
    missing, left = np.where(reached, missed, 0.0), np.clip(tails[:, None] - right - 1.0, 0.0, None)
    rescued = np.minimum(branches[None], left[..., None])  # (states, right tokens, candidates)
    found = missing[..., None] * _RIGHT * (rescued > 0.0)
    moves = np.zeros((window + 1, window + 2))
    _spread(moves, np.broadcast_to(states[:, None, None], found.shape), rescued, found)
    unrefuted = survival[np.minimum(verified + 1, window)] * (tails >= verified + 1)
    _spread(moves, states, np.clip(tails - verified - 1.0, 0.0, None), unrefuted)
    moves = moves[:, :-1] * (1.0 - _RARELY)
    moves[:, 0] += 1.0 - moves.sum(axis=1)  # the rest has no tail
    equations = moves.T - np.eye(window + 1)
    equations[-1] = 1.0
    shares = np.linalg.solve(equations, np.append(np.zeros(window), 1.0))
    accepted = np.append(0.0, np.cumsum(survival[1:]))[verified]
    return 1.0 + float(shares @ accepted), float(shares @ verified)


def _branch_lengths(survival: np.ndarray, forwards: float, spare: float) -> np.ndarray:
    """`(window, 4)`: tokens of the branch that begins with each candidate at each position of a main chain, without
    that candidate, which the verifier commits itself."""
    window = len(survival) - 1
    depth = int(min(max(forwards, 1.0), window))
    onward = survival[1] ** np.arange(depth)
    needed = ((survival[:-1] - survival[1:])[:, None] * _RIGHT)[..., None] * onward
    beyond = np.arange(window)[:, None] + np.arange(depth) >= window
    needed = np.where(beyond[:, None, :], 0.0, needed)
    drafted = np.zeros(needed.size, np.bool_)
    drafted[np.argsort(-needed, axis=None, kind="stable")[: int(spare)]] = True
    drafted &= needed.ravel() > 0.0
    lengths: np.ndarray = np.maximum(drafted.reshape(needed.shape).sum(axis=2) - 1.0, 0.0)
    return lengths


def _spread(moves: np.ndarray, states: np.ndarray, lengths: np.ndarray, chances: np.ndarray) -> None:
    """Add transitions from states to lengths of tails; a length between two whole ones is divided between them."""
    whole = lengths.astype(np.int64)
    part = lengths - whole
    np.add.at(moves, (states, whole), chances * (1.0 - part))
    np.add.at(moves, (states, whole + 1), chances * part)
