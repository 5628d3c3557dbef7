"""Which requests to move between verifiers when no request waits any more, and which verifiers can be spared. Pure.

A verify step of b requests takes about `b * v + β` seconds (SpecActor, arXiv 2511.16193, section 4), and a position of
a prefill costs about as much as one of a decode step, `v`. Moving one of L requests to a verifier with m saves
`(L - 1 - m) * v` per token to the moved one, and as much to all others taken together: `L - 1` of them lose one row of
their steps and `m` gain one. It costs `v` for each token of prompt and output that the new verifier has to read, which
its m requests wait for as well. `v` stands on both sides, so the choice needs no measured figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

MAX_MOVES = 2
"""A request that was moved so often stays."""
_LEAST_EXPECTED = 32
"""Output tokens that any request is expected to have ahead."""
_HANDOVER_TOKENS = 16
"""What a move costs beside the prefill, in decoded tokens: a few steps without this request, and the tokens that the
old verifier committed and nobody journaled."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request at a verifier."""

    request_id: str
    owner: str
    context: int
    """Tokens that another verifier would have to read: prompt and journaled output; 0 if nobody has begun with it."""
    remaining: float
    """Output tokens it is expected to have ahead."""
    moves: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Take this request from one verifier to another."""

    request_id: str
    source: str
    target: str


def expected_remaining(committed: int, max_tokens: int, ignore_eos: bool = False) -> float:
    """Output tokens a request is expected to have ahead.

    Output lengths have heavy tails: what has lasted long goes on for long. For a Pareto distribution of exponent 2 the
    mean rest equals what there is already; `max_tokens` bounds it.
    """
    room = max(max_tokens - committed, 0)
    return float(room if ignore_eos else min(room, max(committed, _LEAST_EXPECTED)))


def gain(request: RunningRequest, source_load: int, target_load: int) -> float:
    """What moving a request saves minus what it costs, in positions of a forward; above 0 it pays.

    Args:
        request: The one to move.
        source_load: Requests at its verifier, itself included.
        target_load: Requests where it would go.
    """
    saved = 2.0 * request.remaining * (source_load - 1 - target_load)
    return saved - (request.context + _HANDOVER_TOKENS) * (1 + target_load)


def plan_moves(running: Iterable[RunningRequest], verifiers: Iterable[str]) -> list[Move]:
    """Moves from the fullest to the emptiest verifiers, as long as their loads differ by 2 or more and a move pays.

    Args:
        running: Every request that a verifier has. Those of verifiers that are not listed are left alone.
        verifiers: Who can take requests.

    Returns:
        Moves to carry out together, each request at most once. Afterwards the loads call for no move back.
    """
    at: dict[str, list[RunningRequest]] = {verifier: [] for verifier in verifiers}
    for request in running:
        if request.owner in at:
            at[request.owner].append(request)
    moves: list[Move] = []
    while (found := _best_move(at)) is not None:
        request, target = found
        moves.append(Move(request.request_id, request.owner, target))
        at[request.owner].remove(request)
        at[target].append(replace(request, owner=target, moves=MAX_MOVES))  # once per plan
    return moves


def _best_move(at: Mapping[str, list[RunningRequest]]) -> tuple[RunningRequest, str] | None:
    """From the fullest verifier that can give one up to the emptiest that can take it, the one that gains most."""
    by_load = sorted(at, key=lambda verifier: (len(at[verifier]), verifier))
    for source in reversed(by_load):
        for target in by_load:
            loads = len(at[source]), len(at[target])
            if loads[0] - loads[1] < 2:
                break
            able = [r for r in at[source] if r.moves < MAX_MOVES]
            best = max(able, key=lambda request: gain(request, *loads), default=None)
            if best is not None and gain(best, *loads) > 0:
                return best, target
    return None


def spare_verifiers(loads: Mapping[str, int]) -> list[str]:
    """Verifiers that would have no request even if the requests were spread as widely as they can be.

    Args:
        loads: Verifier → its requests.
    """
    idle = sorted(verifier for verifier, load in loads.items() if load == 0)
    return idle[: max(len(loads) - sum(loads.values()), 0)]


def are_missed(serving: int, resting: int, requests: int) -> bool:
    """Whether verifiers that rest are needed: with them the requests could be spread more widely."""
    return serving < min(requests, serving + resting)


class Pace:
    """How fast requests progress: output tokens per second since they came to their verifier."""

    def __init__(self) -> None:
        self._begin: dict[str, tuple[float, int]] = {}
        self._rate: dict[str, float] = {}

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """So many output tokens are journaled by now; the first call sets the mark that others are measured from."""
        since, first = self._begin.setdefault(request_id, (now, tokens))
        if now > since and tokens > first:
            self._rate[request_id] = (tokens - first) / (now - since)

    def forget(self, request_id: str) -> None:
        """It ended, or goes on elsewhere at another pace."""
        self._begin.pop(request_id, None)
        self._rate.pop(request_id, None)

    def begun(self, request_id: str) -> bool:
        """Whether it has made any progress since it came to its verifier."""
        return request_id in self._begin

    def remaining_s(self, remaining: Mapping[str, float]) -> float | None:
        """Seconds until the last of these requests is expected to end; None as long as no pace is known.

        Args:
            remaining: Request → output tokens it is expected to have ahead. One whose pace is not known is taken to
                be as fast as the slowest that is.
        """
        known = [self._rate[request_id] for request_id in remaining if request_id in self._rate]
        if not known:
            return None
        slowest = min(known)
        return max(tokens / self._rate.get(request_id, slowest) for request_id, tokens in remaining.items())
