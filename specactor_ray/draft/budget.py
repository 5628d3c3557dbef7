"""How many rows a forward of a drafter may have, so that its drafts are there before the verification has ended."""

from __future__ import annotations

from specactor_ray.draft.proposer import NO_LIMIT, Reach
from specactor_ray.spec.cost import StepCost

FORWARDS = 6
"""Forwards that fit into a verify step: a window drafted later than the verification ends adds its time to the step
(SSD, arXiv 2603.03251). Of 2 to 12 six did best in simulation (docs/simulation.md)."""
_AS_FAST = 1.1
"""Largest ratio to a forward over a single row at which a forward counts as equally fast."""
_SPARE = 4
"""Chains of each request for which a forward has room where few requests share a drafter (docs/design/policy.md)."""


def reach(budget: int, requests: int, of_many: Reach) -> Reach:
    """Whole windows and all branches while a forward of `budget` rows has room for `_SPARE` chains of each request,
    else `of_many`."""
    return NO_LIMIT if budget >= _SPARE * requests else of_many


def row_budget(cost: StepCost, step_s: float, most: int) -> int:
    """Most rows, up to `most`, with which `FORWARDS` forwards fit into a verify step of `step_s` seconds, or one
    forward is as fast as over a single row.

    Args:
        cost: Of a forward by its rows; larger ones than were seen lately are expected to cost no more.
        step_s: 0 if unknown.

    Returns:
        0 where one of the two is unknown.
    """
    if not cost.is_known or step_s <= 0.0:
        return 0
    return int(min(cost.within(max(step_s / FORWARDS, _AS_FAST * cost.curve(1, 0)[0])), most))
