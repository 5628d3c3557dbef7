"""How many draft tokens are worth a step's time, and how long drafts are worth waiting for.

A verify forward over more positions takes longer; whether that pays depends on how likely the tokens are to be right.
Everything here is decided by the same quotient, expected committed tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_TINY_S = 1e-9
"""Stands in for a cost of zero or less."""


class VerifyCandidate(NamedTuple):
    """A row of the next step."""

    request_id: str
    probability: float
    """Chance that a draft token is right given that those before it are."""
    supply: int
    """Draft tokens that are there; 0 for a row that only decodes."""


def choose_verify_lengths(
    candidates: Sequence[VerifyCandidate | tuple[str, float, int]], step_cost: Callable[[int, int], float]
) -> dict[str, int]:
    """Draft tokens to verify per request, so that expected committed tokens per second are the most.

    A row with `n` draft tokens commits `1 + sum_{i=1..n} p^i` tokens on average, so its i-th draft token gains `p^i`.
    These gains fall with `i`, and the cost depends only on how many positions there are in all: for every total the
    best choice takes the largest gains, and it is enough to compare the totals. The result is exact, no heuristic.

    Args:
        candidates: All rows of the step, also those without drafts.
        step_cost: (rows, positions) → seconds of a step; `StepCostModel.seconds`. Positions count one per row and one
            per draft token.

    Returns:
        request id → 0..supply, for every candidate. Of equal quotients the one with fewer draft tokens.
    """
    rows = [VerifyCandidate(*candidate) for candidate in candidates]
    lengths = {row.request_id: 0 for row in rows}
    gains = sorted(_gains(rows))
    chosen = count_worth_verifying(len(rows), [loss for loss, _, _ in gains], step_cost)
    for _, _, row_number in gains[:chosen]:
        lengths[rows[row_number].request_id] += 1
    return lengths


def count_worth_verifying(num_rows: int, losses: Sequence[float], step_cost: Callable[[int, int], float]) -> int:
    """How many draft tokens to take, the best first, so that expected committed tokens per second are the most.

    Args:
        num_rows: Rows of the step; each commits one token anyway.
        losses: Minus the expected tokens that each draft token adds, ascending.
        step_cost: As in `choose_verify_lengths`.

    Returns:
        0..len(losses); of equal quotients the smallest.
    """
    if not num_rows:
        return 0
    chosen, tokens = 0, float(num_rows)
    best = tokens / max(step_cost(num_rows, num_rows), _TINY_S)
    for taken, loss in enumerate(losses, start=1):
        tokens -= loss
        ratio = tokens / max(step_cost(num_rows, num_rows + taken), _TINY_S)
        if ratio > best:
            best, chosen = ratio, taken
    return chosen


def _gains(rows: Sequence[VerifyCandidate]) -> list[tuple[float, int, int]]:
    """(-gain, position, row) per draft token that may gain anything; sorting them keeps positions of a row in order."""
    gains = []
    for number, row in enumerate(rows):
        p, gain = min(max(row.probability, 0.0), 1.0), 1.0
        for position in range(row.supply):
            gain *= p
            if gain <= 0.0:
                break
            gains.append((-gain, position, number))
    return gains


def choose_wait_s(
    expected_extra: float, expected_now: float, step_s: float, *, cap_s: float = 0.020, share: float = 0.5
) -> float:
    """How long a decoupled verifier may wait for tails of its newest commit before it takes the next step without.

    Without waiting the step commits `c = expected_now` tokens in `S = step_s` seconds; after a wait of `w` it commits
    `c + e` in `S + w`, where `e = expected_extra`. That is faster exactly if `w < e · S / c`: the extra tokens times
    the time a token takes. Only a `share` of that break-even time is granted, since an answer at the last moment would
    gain nothing and none at all would cost the whole wait:

        wait = min(cap_s, share · e · S / c)

    Args:
        expected_extra: Tokens that the tails not there yet would add to the step, over all rows; already multiplied
            with how likely they are to come in time, if that is known.
        expected_now: Tokens the step commits with what is there, at least 1 per row.
        step_s: Seconds of a step.
        cap_s: Longest wait.
        share: Part of the break-even time that is granted.

    Returns:
        Seconds, 0 or more; 0 if anything is unknown or not positive.
    """
    if not (expected_extra > 0.0 and expected_now > 0.0 and step_s > 0.0):
        return 0.0
    return max(0.0, min(cap_s, share * expected_extra * step_s / expected_now))
