"""Which of the usable tails of each request are verified in a step, and how much of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specactor_ray.loops.drafted_request import DraftedRequest
from specactor_ray.speculation.track_record import TrackRecord
from specactor_ray.speculation.tree import choose_tree_nodes, tree_candidate
from specactor_ray.speculation.window import VerifyCandidate
from specactor_ray.targets.base import Tail


def choose_best_tails(
    requests: Mapping[str, DraftedRequest],
    acceptance: TrackRecord,
    verify_lengths: Callable[[Sequence[VerifyCandidate]], dict[str, int]],
) -> dict[str, Tail]:
    """Per request the tail with the most expected accepted tokens, cut to what pays; notes whose it is.

    Args:
        requests: Those that decode, with their usable tails.
        acceptance: How good each drafter is for each request.
        verify_lengths: Draft tokens worth verifying, per request.
    """
    tails, candidates = {}, []
    for request_id, state in requests.items():
        state.chosen = _best(request_id, state.usable, acceptance)
        tail = state.usable.get(state.chosen, ()) if state.chosen else ()
        probability = acceptance.probability(request_id, state.chosen) if state.chosen else 0.0
        tails[request_id] = tail
        candidates.append(VerifyCandidate(request_id, probability, len(tail)))
    lengths = verify_lengths(candidates)
    return {request_id: tail[: lengths[request_id]] for request_id, tail in tails.items() if lengths[request_id]}


def choose_trees(
    requests: Mapping[str, DraftedRequest], acceptance: TrackRecord, step_cost: Callable[[int, int], float] | None
) -> dict[str, Tail]:
    """All usable tails of a request as one tree, cut to what pays; a tree of a single branch is a tail again.

    Args:
        requests: Those that decode, with their usable tails.
        acceptance: How good each drafter is for each request.
        step_cost: (rows, positions) → seconds of a step; None verifies whole trees.
    """
    candidates = []
    for request_id, state in requests.items():
        probabilities = {drafter_id: acceptance.probability(request_id, drafter_id) for drafter_id in state.usable}
        candidates.append(tree_candidate(request_id, state.usable, probabilities))
    if step_cost is None:
        trees = {candidate.request_id: candidate.tree for candidate in candidates}
    else:
        trees = choose_tree_nodes(candidates, step_cost)
    for request_id, tree in trees.items():
        state = requests[request_id]
        state.chosen = max(state.usable, key=lambda d: len(state.usable[d]), default=None)
        state.branches = {drafter_id: len(tree.walk(tail)) for drafter_id, tail in state.usable.items()}
    return {request_id: tree.token_ids if tree.is_chain else tree for request_id, tree in trees.items() if len(tree)}


def _best(request_id: str, usable: Mapping[str, tuple[int, ...]], acceptance: TrackRecord) -> str | None:
    if len(usable) <= 1:
        return next(iter(usable), None)
    return max(usable, key=lambda d: acceptance.expected_accepted(request_id, d, len(usable[d])))
