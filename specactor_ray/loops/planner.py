"""Who drafts for which request, how far and in which mode: revised every few steps, and when something happens.

Brings together the draft ladder (which method), Algorithm 2 (window and mode per request) and Algorithm 3 (who races
for the stragglers) with what a verifier measures while it runs. Nothing here knows a message or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.loops.assignment import AssignmentChange, DrafterAssignment, Wish
from specactor_ray.loops.drafter_table import DrafterLink, DrafterTable
from specactor_ray.messages import Mode
from specactor_ray.speculation.ladder import Estimate, Rung
from specactor_ray.speculation.race import Straggler
from specactor_ray.speculation.reconfigure import (
    MIN_GAIN,
    PLAIN,
    Reconfigurator,
    RequestPlan,
    RequestView,
    useful_window,
)
from specactor_ray.speculation.step_cost import StepCostModel
from specactor_ray.speculation.tgs import best_window
from specactor_ray.speculation.track_record import TrackRecord
from specactor_ray.speculation.wait_cost import WaitCost

REVISE_EVERY = 16
"""Steps between two looks at everything. A look costs about as much as a few messages, and acceptance moves slowly."""
SWITCH_GAIN = 0.15
"""Part by which another method must promise to be faster: a new drafter first has to read the whole request."""
SWITCH_STEPS = 2 * REVISE_EVERY
"""Steps that a method is given before a request may leave it for a better one."""


TRY_EVERY = 8
"""Where plain decoding promises more than drafting does, one request in so many is drafted for anyway: without drafts
nobody would notice that this has changed."""


@dataclass(slots=True)
class _Request:
    switched_at: int
    """Step at which its base drafter was chosen."""
    tries: bool
    """It is drafted for at first even where that does not seem to pay."""


class DraftPlanner:
    """Assignment, windows and modes of one verifier's requests.

    Args:
        mode: The layout: how all requests are drafted for unless Algorithm 2 finds better.
        config: When to race.
        max_batch: Most requests the verifier runs at once.
        table: Its drafters.
        track: What is known about their guesses.
        cost: What a verify step costs.
        waits: What waiting for drafts costs in a coupled layout.
    """

    def __init__(
        self,
        mode: Mode,
        config: SpeculationConfig,
        max_batch: int,
        table: DrafterTable,
        track: TrackRecord,
        cost: StepCostModel,
        waits: WaitCost,
    ) -> None:
        # Drafters of a coupled layout share cores with the verifier: running ahead would only take turns from it.
        modes = (Mode.COUPLED,) if mode is Mode.COUPLED else (Mode.DECOUPLED, Mode.COUPLED)
        self._mode, self._modes, self._race = mode, modes, config.race
        self._race_below = max(1, max_batch // 4) if config.race_below is None else config.race_below
        self._table, self._track, self._cost, self._waits = table, track, cost, waits
        self._assignment = DrafterAssignment()
        self._searches = config.verify is not VerifyPolicy.all
        # Nobody has searched the base plan of a coupled layout, whose windows cost the verifier time.
        self._reconfigurator = Reconfigurator(modes, base_is_searched=mode is not Mode.COUPLED or not self._searches)
        self._requests: dict[str, _Request] = {}
        self._bases: dict[str, RequestPlan] = {}
        """Drafter id → its window in the base mode."""
        self._starts: dict[str, tuple[RequestPlan, RequestPlan]] = {}
        """Coupled: drafter id → plan of requests that Algorithm 2 has not judged yet (of most, of those that try), or
        does not judge: of drafters that work on demand each step asks anew whether drafts for all its rows pay."""
        self._rows = 1
        self._opened = 0
        self._steps = 0
        self._due = False
        self._racing = False
        self._off: tuple[bool, ...] = ()
        self._verify_s = [1.0]
        self.standings: dict[str, Any] = {}
        """Plain data for status displays, made anew with every look: other threads may read it at any time."""

    # ---- what is set ----

    def drafters(self, request_id: str) -> list[str]:
        """Drafters of a request, its base drafter first; empty for unknown ids."""
        return self._assignment.of(request_id)

    def plan(self, request_id: str, drafter_id: str) -> RequestPlan:
        """Window and mode of a request at one of its drafters."""
        base = self._bases[drafter_id]
        plan = self._reconfigurator.plan(request_id, base)
        if plan == base and drafter_id in self._starts:
            return self._starts[drafter_id][self._requests[request_id].tries]
        if self._searches and plan.mode is Mode.DECOUPLED and not self._table[drafter_id].link.remembers:
            known = self._track.probability(request_id, drafter_id)
            return RequestPlan(useful_window(known, plan.window), plan.mode)
        return plan

    def mode(self, request_id: str) -> Mode:
        """Mode of a request; `plain` also for one without drafters."""
        drafters = self._assignment.of(request_id)
        return self.plan(request_id, drafters[0]).mode if drafters else Mode.PLAIN

    # ---- what happens ----

    def set_drafters(self) -> AssignmentChange:
        """The table of drafters has changed."""
        self._track.set_drafters(self._table.methods)
        self._bases = {drafter_id: RequestPlan(link.window, self._mode) for drafter_id, link in self._table.links()}
        change = self._revise(list(self._requests), level=True)
        self._publish()
        return change

    def add(self, request_id: str) -> AssignmentChange:
        """A new request."""
        self._assignment.add(request_id)
        self._requests[request_id] = _Request(self._steps, tries=self._opened % TRY_EVERY == 0)
        self._opened += 1
        return self._revise([request_id])

    def remove(self, request_id: str) -> AssignmentChange:
        """A request ended. Its place is given away at the next step, if somebody waits for one."""
        del self._requests[request_id]
        self._reconfigurator.forget(request_id)
        self._due = self._due or self._racing or any(not self._assignment.of(other) for other in self._requests)
        return self._assignment.remove(request_id)

    def step(self, decoding: Sequence[str], committed_len: Callable[[str], int]) -> AssignmentChange | None:
        """A step begins.

        Args:
            decoding: Requests that will be verified in it.
            committed_len: Request id → output tokens committed so far.

        Returns:
            What has to be told to drafters; None where nothing was looked at.
        """
        self._steps += 1
        self._rows = max(1, len(decoding))
        off = self._table.states()
        event = self._due or off != self._off or self._update_race(decoding)
        early = self._steps < REVISE_EVERY and self._steps.bit_count() == 1
        if not event and not early and self._steps % REVISE_EVERY:
            return None
        self._due, self._off = False, off
        change = self._revise(list(self._requests))
        self._reconfigure(decoding, committed_len)
        self._publish()
        return change

    # ---- the ladder's choice, and the race ----

    def _revise(self, request_ids: Sequence[str], level: bool = False) -> AssignmentChange:
        self._assignment.set_seats(self._table.seats())
        self._learn_costs()
        usable = [seat.method for seat in self._assignment.seats.values() if seat.usable]
        methods = list(dict.fromkeys(usable))
        bases = {request_id: self._assignment.base_method(request_id) for request_id in self._requests}
        wishes = self._wishes(request_ids, methods, bases)
        racing = self._racing or self._race is RaceName.always
        others = methods if racing else [method for method in methods if method in self._table.remembering]
        racers = self._racers() if len(methods) > 1 and others else []
        ranking = [rung.method for rung in self._track.ladder.rank(0, others, self._rate)] if racers else []
        change = self._assignment.revise(wishes, racers, ranking, level)
        for request_id, base in bases.items():
            if self._assignment.base_method(request_id) != base:
                self._requests[request_id].switched_at = self._steps
        return change

    def _wishes(
        self, request_ids: Sequence[str], methods: Sequence[str], bases: Mapping[str, str | None]
    ) -> list[Wish]:
        """Methods by what they promise for each request. The one it has counts for more, and is given some time."""
        pending = Counter(base for base in bases.values() if base is not None)
        wishes = []
        for request_id in request_ids:
            base = bases[request_id]
            if base is not None:
                pending[base] -= 1
            ranked = self._rank(request_id, methods, base, pending)
            wishes.append(Wish(request_id, ranked))
            if ranked:
                pending[ranked[0]] += 1
        return wishes

    def _rank(
        self, request_id: str, methods: Sequence[str], base: str | None, pending: Mapping[str, int]
    ) -> Sequence[str]:
        if len(methods) <= 1:
            return methods
        free = self._table.remembering  # they follow the request whoever is its base
        settling = self._steps - self._requests[request_id].switched_at < SWITCH_STEPS
        if base is not None and base in methods and settling and base not in free:
            return [base, *(method for method in methods if method != base)]
        bucket = self._track.bucket(request_id)
        rungs = self._track.ladder.rank(
            bucket, methods, self._rate, lambda method: self._track.estimate(request_id, method), pending
        )
        held = {rung.method: rung.tgs * (1.0 + SWITCH_GAIN * (rung.method == base)) for rung in rungs}
        if self._mode is Mode.COUPLED:
            # Lookups cost no wait: a model that is worth one drafts where they have found nothing.
            first = {rung.method for rung in rungs if rung.method not in free and self._may_draft(rung)}
            return sorted(held, key=lambda method: (method not in first, -held[method]))
        return sorted(held, key=lambda method: -held[method])

    def _may_draft(self, rung: Rung) -> bool:
        """Coupled: whether a model is given requests. One that drafts on demand costs nothing where no step waits."""
        links = [drafter.link for drafter in self._table.of_method(rung.method)]
        return self._pays(rung.tgs) or all(link.on_demand for link in links)

    def _update_race(self, decoding: Sequence[str]) -> bool:
        """Whether the race begins or ends with this step.

        The tail has come when few requests are left and none of them waits or still reads its prompt. One that does so
        later (it was moved here, or preempted) does not end the race; more requests than `race_below` do.
        """
        few = 0 < len(self._requests) <= self._race_below
        match self._race:
            case RaceName.off:
                racing = False
            case RaceName.always:
                racing = True
            case _ if self._mode is Mode.COUPLED:
                racing = False  # the tail frees nobody: racers would take turns on the verifier's own cores
            case _:
                racing = few and (self._racing or len(decoding) == len(self._requests))
        changed, self._racing = racing != self._racing, racing
        return changed

    def _racers(self) -> list[Straggler]:
        return [Straggler(request_id, self._acceptance(request_id)) for request_id in self._requests]

    def _acceptance(self, request_id: str) -> float:
        """The best that one of its drafters does for it."""
        drafters = self._assignment.of(request_id)
        return max((self._track.probability(request_id, drafter_id) for drafter_id in drafters), default=0.0)

    # ---- Algorithm 2 ----

    def _reconfigure(self, decoding: Sequence[str], committed_len: Callable[[str], int]) -> None:
        if self._cost.num_ranges < 2:
            return  # V(w) is not known yet: all windows would seem to cost the same
        views = []
        for request_id in decoding:
            drafters = self._assignment.of(request_id)
            if drafters and not self._table[drafters[0]].link.on_demand:
                views.append(self._view(request_id, drafters, committed_len(request_id)))
        self._reconfigurator.revise(views, self._verify_s)

    def _view(self, request_id: str, drafters: Sequence[str], committed: int) -> RequestView:
        def promise(drafter_id: str) -> float:
            drafter = self._table[drafter_id]
            return self._rate(drafter.link.method, self._track.estimate(request_id, drafter_id), drafter.token_s)

        best = max(drafters, key=promise) if len(drafters) > 1 else drafters[0]
        probability, verified = self._track.probability(request_id, best), self._track.verified(request_id)
        return RequestView(request_id, probability, self._table[best].token_s, self._bases[best], verified, committed)

    # ---- what is known ----

    def _publish(self) -> None:
        loads = dict.fromkeys(self._table.methods, 0)
        for request_id in self._requests:
            for drafter_id in self._assignment.of(request_id):
                loads[drafter_id] += 1
        self.standings = {
            "methods": self._track.ladder.standings(self._methods(), self._rate),
            "racing": self._racing,
            "plan_changes": self._reconfigurator.changes,
            "loads": loads,
        }

    def _methods(self) -> list[str]:
        return list(dict.fromkeys(self._table.methods.values()))

    def _learn_costs(self) -> None:
        """D per method (the mean of its drafters) and V(w) at the present batch, as they are now; what follows for
        requests that begin."""
        for method in self._methods():
            heard = [drafter for drafter in self._table.of_method(method) if drafter.cost_is_new]
            for drafter in heard:
                drafter.cost_is_new = False
            if heard:
                self._track.ladder.record_cost(method, fmean(drafter.token_s for drafter in heard))
        widest = max((drafter.link.window for drafter in self._table), default=0)
        rows = self._rows
        step_s = [self._cost.seconds(rows, rows * (1 + window)) for window in range(widest + 1)]
        self._verify_s = [step_s[0], *(seconds + self._waits.overhead_s for seconds in step_s[1:])]
        if self._mode is Mode.COUPLED and self._searches and self._cost.num_ranges > 1:
            self._starts = dict(self._find_starts())

    def _find_starts(self) -> Iterator[tuple[str, tuple[RequestPlan, RequestPlan]]]:
        for drafter_id, link in self._table.links():
            token_s = self._table[drafter_id].token_s
            if token_s <= 0.0 or link.window < 1 or (link.on_demand and link.remembers):
                continue
            probability = self._mean_probability(drafter_id, link)
            rate, window = best_window(Mode.COUPLED, probability, token_s, self._verify_s, link.window)
            drafted = RequestPlan(window, Mode.COUPLED)
            yield drafter_id, (drafted if link.on_demand or self._pays(rate) else PLAIN, drafted)

    def _mean_probability(self, drafter_id: str, link: DrafterLink) -> float:
        """That of requests that begin; of one that drafts on demand, whose window is the same for all, that of its
        requests."""
        own = [
            self._track.probability(request_id, drafter_id)
            for request_id in (self._requests if link.on_demand else ())
            if drafter_id in self._assignment.of(request_id)
        ]
        return fmean(own) if own else self._track.ladder.probability(link.method, 0)

    def _pays(self, rate: float) -> bool:
        """Whether this many tokens per second are so many more than plain decoding's that drafting is begun."""
        return rate > (1.0 + MIN_GAIN) / self._verify_s[0]

    def _rate(self, method: str, known: Estimate, token_s: float) -> float:
        """Predicted TGS of a method: its best window and mode where it has a guess, plain decoding where not."""
        window = max((drafter.link.window for drafter in self._table.of_method(method)), default=0)
        plain = 1.0 / self._verify_s[0]
        if window < 1 or window >= len(self._verify_s):
            return plain
        drafted = max(best_window(mode, known.probability, token_s, self._verify_s, window)[0] for mode in self._modes)
        return known.guessing * drafted + (1.0 - known.guessing) * plain
