"""Request-level reconfiguration: window and mode per request (SpecActor, arXiv 2511.16193, Algorithm 2).

The plan of a whole training fits the average request. One whose drafts are worse than average would draw windows that
are mostly thrown away; it gets the better of the best coupled and the best decoupled window by predicted tokens per
second, or none at all where neither beats plain decoding. The others keep the base plan. (The paper predicts at batch
1, for the tail of a rollout; here V(w) is that of the present batch, all of whose requests use the window.)

Acceptance is a noisy measurement, so a change has to promise something and to rest on evidence; see `Reconfigurator`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from specactor_ray.messages import Mode
from specactor_ray.speculation.tgs import best_window, tokens_per_s

MIN_GAIN = 0.1
"""Part by which a change must promise to be faster than what is set."""
MIN_VERIFIED = 32
"""Draft tokens put to the test before the first change and between two changes."""
PLAIN_TOKENS = 128
"""Output tokens after which a plain request is drafted for again, to see whether that pays now."""
_MAX_BACKOFF = 8
_AVERAGE_MEMORY = 64.0
"""Looks at single requests after which the remembered average has mostly become that of the running ones."""
LEAST_USE = 0.05
"""Chance of being reached from which a draft token is worth drafting ahead."""


class RequestPlan(NamedTuple):
    """How one request is drafted for."""

    window: int
    """Draft window; 0 in mode `plain`."""
    mode: Mode


PLAIN = RequestPlan(0, Mode.PLAIN)


class RequestView(NamedTuple):
    """A running request as the reconfiguration sees it."""

    request_id: str
    probability: float
    """p_r: chance that a draft token is right given that those before it are."""
    draft_s: float
    """D: seconds per drafted token of its drafter; 0 if unknown."""
    base: RequestPlan
    """Its drafter's window, which is also the largest allowed, and the base mode."""
    verified: int
    """Draft tokens of it that were put to the test so far."""
    committed: int
    """Output tokens committed so far."""


def predicted(plan: RequestPlan, probability: float, draft_s: float, verify_s: Sequence[float]) -> float:
    """TGS of this plan; `verify_s[w]` is V(w)."""
    return tokens_per_s(plan.mode, probability, plan.window, draft_s, verify_s[plan.window])


def best_plan(
    probability: float, draft_s: float, verify_s: Sequence[float], max_window: int, modes: Iterable[Mode]
) -> tuple[RequestPlan, float]:
    """The plan with the highest TGS over windows 1..max_window in these modes, and plain decoding.

    Returns:
        (plan, its TGS). Plain where nothing beats it; of equal ones the earlier mode and the smaller window.
    """
    chosen, best = PLAIN, predicted(PLAIN, 0.0, 0.0, verify_s)
    for mode in modes:
        rate, window = best_window(mode, probability, draft_s, verify_s, max_window)
        if rate > best:
            chosen, best = RequestPlan(window, mode), rate
    return chosen, best


def useful_window(probability: float, most: int) -> int:
    """How far it is worth running ahead: to the last token that is reached with a chance of `LEAST_USE`.

    A decoupled drafter's own time is free, but not the memory bandwidth and the messages that it shares with others.

    Returns:
        1..most; 0 if `most` is 0.
    """
    if probability >= 1.0 or most < 1:
        return max(most, 0)
    if probability <= LEAST_USE:
        return 1
    return min(most, math.ceil(math.log(LEAST_USE) / math.log(probability)))


def reconfigure(
    requests: Sequence[RequestView],
    verify_s: Sequence[float],
    modes: Sequence[Mode],
    average: float | None = None,
) -> dict[str, RequestPlan]:
    """Algorithm 2 as written, without memory: the best plan for every request below the average acceptance, the base
    plan for the others.

    Args:
        requests: All running requests that have a drafter.
        verify_s: `verify_s[w]` is V(w), up to the largest base window.
        modes: `coupled` and `decoupled`, or one of them where the layout allows only that.
        average: The average acceptance; default: that of these requests.
    """
    if average is None:
        average = fmean(view.probability for view in requests) if requests else 0.0
    return {
        view.request_id: best_plan(view.probability, view.draft_s, verify_s, view.base.window, modes)[0]
        if view.probability < average
        else view.base
        for view in requests
    }


@dataclass(slots=True)
class _Set:
    """What is set for a request, and since when."""

    plan: RequestPlan | None = None
    """None: its base plan."""
    verified: int = 0
    committed: int = 0
    backoff: int = 1
    """Grows each time a plain request was drafted for again in vain."""


class Reconfigurator:
    """Algorithm 2 with hysteresis.

    A request changes its plan when Algorithm 2 says so, *and* the new plan promises `min_gain` more than the one that
    is set, *and* at least `min_verified` of its draft tokens were put to the test since the last change. That holds
    in both directions: a request that rose above the average goes back to its base plan only where that is the faster
    one.

    The average is that over the running requests, remembered for a while: the last stragglers are compared with those
    that have ended, not only with each other.

    A plain request gets no drafts, so nothing can be learnt about it: after `plain_tokens` output tokens it has its
    base plan back, and is judged anew. Each time that was in vain the next try is twice as far away, up to eight times.

    Args:
        modes: What the layout allows, see `reconfigure`.
        base_is_searched: The base plan is the best for the average request. Else every request gets the best plan for
            its own acceptance, those above the average too.
        min_gain: Relative gain a change must promise.
        min_verified: Draft tokens to judge by.
        plain_tokens: Output tokens of a request between two tries.
    """

    def __init__(
        self,
        modes: Sequence[Mode],
        min_gain: float = MIN_GAIN,
        min_verified: int = MIN_VERIFIED,
        plain_tokens: int = PLAIN_TOKENS,
        base_is_searched: bool = True,
    ) -> None:
        self._modes, self._base_is_searched = tuple(modes), base_is_searched
        self._min_gain, self._min_verified, self._plain_tokens = min_gain, min_verified, plain_tokens
        self._set: dict[str, _Set] = {}
        self._average: float | None = None
        self.changes = 0
        """How often a plan was changed."""

    def plan(self, request_id: str, base: RequestPlan) -> RequestPlan:
        """What is set: the base plan unless it was changed, and never a window above the base's."""
        state = self._set.get(request_id)
        if state is None or state.plan is None:
            return base
        return state.plan if state.plan.window <= base.window else RequestPlan(base.window, state.plan.mode)

    def forget(self, request_id: str) -> None:
        """The request ended; unknown ids are ignored."""
        self._set.pop(request_id, None)

    def revise(self, requests: Sequence[RequestView], verify_s: Sequence[float]) -> dict[str, RequestPlan]:
        """Look at all running requests that have a drafter. Returns the plans that changed."""
        if not requests:
            return {}
        average = self._remember_average(requests) if self._base_is_searched else math.inf
        wanted = reconfigure(requests, verify_s, self._modes, average)
        changed = {}
        for view in requests:
            state = self._set.setdefault(view.request_id, _Set())
            now = self.plan(view.request_id, view.base)
            target = self._judge(view, state, now, wanted[view.request_id], verify_s)
            if target != now:
                self._change(view, state, target)
                changed[view.request_id] = target
        return changed

    def _remember_average(self, requests: Sequence[RequestView]) -> float:
        running = fmean(view.probability for view in requests)
        if self._average is None:
            self._average = running
        self._average += len(requests) / (len(requests) + _AVERAGE_MEMORY) * (running - self._average)
        return self._average

    def _judge(
        self, view: RequestView, state: _Set, now: RequestPlan, wanted: RequestPlan, verify_s: Sequence[float]
    ) -> RequestPlan:
        if now.mode is Mode.PLAIN:
            due = view.committed - state.committed >= self._plain_tokens * state.backoff
            return view.base if due else now
        if view.draft_s <= 0.0 or view.verified - state.verified < self._min_verified:
            return now
        if wanted != PLAIN:
            state.backoff = 1  # drafting for it pays: an earlier spell of plain decoding is no hint any more
        before = predicted(now, view.probability, view.draft_s, verify_s)
        after = predicted(wanted, view.probability, view.draft_s, verify_s)
        return wanted if after > (1.0 + self._min_gain) * before else now

    def _change(self, view: RequestView, state: _Set, target: RequestPlan) -> None:
        if state.plan == PLAIN:
            state.backoff = min(2 * state.backoff, _MAX_BACKOFF)
        state.plan = None if target == view.base else target
        state.verified, state.committed = view.verified, view.committed
        self.changes += 1
