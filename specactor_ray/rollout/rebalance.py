"""Choice of the requests to move between verifiers when no request waits. Pure functions.

A verify step of b requests takes about `b * v + β` seconds (SpecActor, arXiv 2511.16193, section 4), and a position of
a prefill costs about as much as one of a decode step, `v`. Moving one of L requests to a verifier with m saves
`(L - 1 - m) * v` per token for the moved request, and as much for all others taken together: `L - 1` of them lose one
row of their steps and `m` gain one. It costs `v` for each token of prompt and output that the new verifier has to read,
which its m requests wait for as well. `v` is on both sides, so the choice needs no measured value.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MAX_MOVES = 2
"""Number of moves after which a request stays."""
_LEAST_EXPECTED = 32
"""Smallest number of expected remaining output tokens of a request."""
_HANDOVER_TOKENS = 16
"""Cost of a move besides the prefill, in decoded tokens: a few steps without this request, and the tokens that the old
verifier committed and that are not journaled."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request at a verifier."""

    request_id: str
    context: int
    """Tokens that another verifier would have to read: prompt and journaled output; 0 before the request has begun."""
    remaining: float
    """Expected number of remaining output tokens."""
    moves: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Move of a request from one verifier to another."""

    request_id: str
    source: str
    target: str


def expected_remaining(committed: int, max_tokens: int, ignore_eos: bool = False) -> float:
    """Expected number of remaining output tokens of a request.

    Output lengths are heavy-tailed: the longer an output is, the more tokens are expected to follow. For a Pareto
    distribution of exponent 2 the mean rest equals the present length; `max_tokens` bounds it.
    """
    room = max(max_tokens - committed, 0)
    return float(room if ignore_eos else min(room, max(committed, _LEAST_EXPECTED)))


def gain(request: RunningRequest, source_load: int, target_load: int) -> float:
    """Saving of a move minus its cost, in positions of a forward pass; a move pays above 0.

    Args:
        request: The request to move.
        source_load: Number of requests at its verifier, itself included.
        target_load: Number of requests at the new verifier.
    """
    saved = 2.0 * request.remaining * (source_load - 1 - target_load)
    return saved - (request.context + _HANDOVER_TOKENS) * (1 + target_load)


def plan_moves(loads: Mapping[str, int], running_at: Callable[[str], Iterable[RunningRequest]]) -> list[Move]:
    """Moves from the fullest to the emptiest verifiers, as long as their loads differ by 2 or more and a move pays.

    A move that does not pay to the emptiest verifier pays to none, now and later in the plan, so each verifier without
    a paying move is checked once. Each move reads the requests of its verifier, and all loads.

    Args:
        loads: Verifier that can take requests → number of its requests.
        running_at: Requests of one of them; called only for verifiers that are too full.

    Returns:
        Moves to carry out together, each request at most once. The resulting loads cause no move back.
    """
    loads, moves = dict(loads), []
    able: dict[str, list[RunningRequest]] = {}
    fullest = [(-load, verifier) for verifier, load in loads.items()]
    heapq.heapify(fullest)
    target = min(loads, key=loads.__getitem__, default="")
    while fullest:
        _, source = heapq.heappop(fullest)
        at = loads[source], loads[target]
        if at[0] - at[1] < 2:
            break
        if source not in able:
            able[source] = [request for request in running_at(source) if request.moves < MAX_MOVES]
        best = max(able[source], key=lambda request: gain(request, *at), default=None)
        if best is None or gain(best, *at) <= 0:
            continue
        moves.append(Move(best.request_id, source, target))
        able[source].remove(best)
        loads[source] -= 1
        loads[target] += 1
        heapq.heappush(fullest, (-loads[source], source))
        target = min(loads, key=loads.__getitem__)
    return moves
