"""How many draft tokens of each request are worth having, and how long a step waits for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.loops.drafter_table import Drafter, DrafterTable
from specactor_ray.loops.planner import DraftPlanner
from specactor_ray.messages import Mode
from specactor_ray.speculation.acceptance import expected_accepted
from specactor_ray.speculation.step_cost import StepCostModel
from specactor_ray.speculation.tails import TailBook
from specactor_ray.speculation.track_record import TrackRecord
from specactor_ray.speculation.wait_cost import WaitCost
from specactor_ray.speculation.window import VerifyCandidate, choose_verify_lengths, choose_wait_s

_PROBE_EVERY = 32
"""Every so many steps a decoupled verifier waits as if drafters always answered in time, to see whether they do, and a
coupled one waits whatever that promises."""
_TRY_EVERY = 4
"""The same of a model that drafts on demand, until `_TRIED` of its tokens were put to the test. A divisor of
`_PROBE_EVERY`."""
_TRIED = 32
_PLAIN_EVERY = (4, 64)
"""One step in so many is plain, to learn what that costs: while too few were seen at this batch, and afterwards."""
_PLAIN_STEPS = 3
_MEMORY = 0.9
"""Weight of the past in the moving share of hopes that came true in time."""


class _Hope(NamedTuple):
    """What a drafter may bring for one request."""

    probability: float
    """Chance that a draft token is right given that those before it are."""
    window: int
    guessing: float
    """Chance that it has a guess at all."""
    drafter_id: str

    def value(self) -> float:
        """Expected accepted tokens of its whole window."""
        return self.guessing * expected_accepted(self.probability, self.window)


class DraftWaits:
    """The waits of one verifier. A wait is a matter of speed only, and is always bounded.

    Args:
        mode: The layout. In a coupled one a step waits for whole tails, at most `coupled_wait_s`, or not at all where
            that promises too little; in a decoupled one as long as pays, also for requests that are in mode `coupled`
            (those count as answered only when their drafters are done with the newest commit).
        waits: What waiting costs in a coupled layout; measured here.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        mode: Mode,
        config: SpeculationConfig,
        table: DrafterTable,
        book: TailBook,
        planner: DraftPlanner,
        track: TrackRecord,
        cost: StepCostModel,
        waits: WaitCost,
        now: Callable[[], float],
    ) -> None:
        self._mode, self._config, self._now = mode, config, now
        self._table, self._book, self._planner, self._track, self._cost = table, book, planner, track, cost
        self._waits, self._began = waits, 0.0
        # Of a lookup that has found a long guess and a model that would take longer for a worse one, the first is
        # enough. Whoever verifies all wants all.
        self._ends_with_the_best = mode is Mode.COUPLED and config.verify != VerifyPolicy.all
        self._worthwhile: dict[str, int] = {}
        """Draft tokens per request that would be verified if they were there; 0: no use in waiting."""
        self._hoped: dict[str, str] = {}
        """Request → the drafter that promises most for it."""
        self._missing: dict[str, tuple[_Hope, float]] = {}
        """Requests that are waited for: what is hoped for, and the tokens that were missing then."""
        self._timely = 1.0
        """Moving share of what was waited for, in expected tokens, that came in time."""
        self._steps = 0
        self._trying = False
        """A model drafts in this step to see how good it is; what is verified of it is another question."""
        self.plain_step = False
        """This step verifies nothing, to learn what that costs: without, drafting is compared with a guess. It waits
        like the others, or drafters that share the verifier's cores would slow it down."""

    def plan(self, decoding: Sequence[str]) -> float:
        """Decide how many draft tokens of each request are worth having, and how long to wait for them.

        Returns:
            Clock time until which the step may wait; now, when no wait pays.
        """
        now = self._now()
        self._steps += 1
        if not len(self._table) or not decoding:
            self._worthwhile, self._missing = {}, {}
            return now
        every = _PLAIN_EVERY[self._cost.seen(len(decoding)) >= _PLAIN_STEPS]
        self.plain_step = self._config.verify != VerifyPolicy.all and self._steps % every == 1
        trials = self._trials(decoding, now)
        hopes = {request_id: self._potential(request_id, now) for request_id in decoding} | trials
        self._hoped = {request_id: hope.drafter_id for request_id, hope in hopes.items()}
        candidates = [VerifyCandidate(request_id, hope.probability, hope.window) for request_id, hope in hopes.items()]
        self._worthwhile = self.verify_lengths(candidates)
        self._worthwhile |= {request_id: hope.window for request_id, hope in trials.items()}
        self._trying = bool(trials)
        self._missing = {
            request_id: (hope, self._lacking(request_id, hope))
            for request_id, hope in hopes.items()
            if not self.answered(request_id, now)
        }
        if self._mode is Mode.COUPLED:
            self._began = now
            if self._coupled_wait_pays(hopes):
                return now + self._config.coupled_wait_s
            self._worthwhile, self._missing = {}, {}
            return now
        if self._config.draft_wait_s is not None:
            return now + self._config.draft_wait_s
        return now + self._worthwhile_wait_s(len(decoding))

    def verify_lengths(self, candidates: Sequence[VerifyCandidate]) -> dict[str, int]:
        """Draft tokens to verify per request, of those that are there."""
        if self._config.verify == VerifyPolicy.all:
            return {candidate.request_id: candidate.supply for candidate in candidates}
        return choose_verify_lengths(candidates, self._cost.seconds)

    def healthy(self, request_id: str, now: float) -> list[str]:
        """Drafters of the request that are reachable and whose breaker lets them be asked."""
        drafters = self._planner.drafters(request_id)
        return [drafter_id for drafter_id in drafters if self._table.reachable(drafter_id, now)]

    def all_answered(self, decoding: Sequence[str]) -> bool:
        """Whether no wait would bring anything: every request has what its drafters can say about its newest commit."""
        if not len(self._table):
            return True
        now = self._now()
        return all(self.answered(request_id, now) for request_id in decoding)

    def answered(self, request_id: str, now: float) -> bool:
        """Whether no wait for this request would bring anything. Coupled: every healthy drafter is done with the newest
        commit, or the one that promises most, or, in a decoupled layout, all tokens that would be verified are there.
        Decoupled: the one that promises most has a token, or it has none and another one has, or none has."""
        worthwhile = self._worthwhile.get(request_id, 0)
        if not worthwhile:
            return True
        healthy = self.healthy(request_id, now)
        if self._planner.mode(request_id) is Mode.COUPLED:
            if self._mode is not Mode.COUPLED and self._supply(request_id) >= worthwhile:
                return True
            if self._ends_with_the_best and self._book.complete(request_id, self._hoped.get(request_id, "")):
                return True
            return all(self._book.complete(request_id, drafter_id) for drafter_id in healthy)
        hoped, usable = self._hoped.get(request_id, ""), self._book.usable(request_id)
        if hoped in usable:
            return True
        if usable.keys() & set(healthy) and (hoped not in healthy or self._book.answered(request_id, hoped)):
            return True
        return all(self._book.answered(request_id, drafter_id) for drafter_id in healthy)

    def record(self, decoding: Sequence[str], answered: bool) -> None:
        """A wait has ended; drafters that were waited for in vain are noted as silent.

        Decoupled waits are short: a drafter that has sent anything since the last one is late, not silent, and the
        waits adapt to that.
        """
        now = self._now()
        self._timely = _MEMORY * self._timely + (1.0 - _MEMORY) * self._fulfilled(now)
        if answered:
            if self._mode is Mode.COUPLED:
                self._waits.record(now - self._began, max(map(self._drafting_s, decoding), default=0.0))
            return
        missed = {  # a dict, not a set: its order does not depend on the hash of strings
            drafter_id: None
            for request_id in decoding
            if self._worthwhile.get(request_id)
            for drafter_id in self.healthy(request_id, now)
            if not self._book.answered(request_id, drafter_id)
        }
        for drafter_id in missed:
            drafter = self._table[drafter_id]
            if self._mode is Mode.COUPLED or not drafter.heard:
                drafter.breaker.record_silence()
            drafter.heard = False

    def _potential(self, request_id: str, now: float) -> _Hope:
        """The most that one of the request's healthy drafters can be hoped to bring, or has brought already."""
        hopes, usable = [_Hope(0.0, 0, 0.0, "")], self._book.usable(request_id)
        for drafter_id in self.healthy(request_id, now):
            known = self._track.estimate(request_id, drafter_id)
            window, guessing = self._planner.plan(request_id, drafter_id).window, known.guessing
            if self._ends_with_the_best and self._book.complete(request_id, drafter_id):
                window = len(usable.get(drafter_id, ()))
                guessing = float(window > 0)
            hopes.append(_Hope(known.probability if window else 0.0, window, guessing, drafter_id))
        return max(hopes, key=_Hope.value)

    def _trials(self, decoding: Sequence[str], now: float) -> dict[str, _Hope]:
        """Request → what its model is to show in this step, of models that draft on demand and are due for a trial."""
        if self._config.verify == VerifyPolicy.all or self._steps % _TRY_EVERY:
            return {}
        trials = {}
        for request_id in decoding:
            for drafter_id in self.healthy(request_id, now):
                window, link = self._planner.plan(request_id, drafter_id).window, self._table[drafter_id].link
                if window and link.on_demand and not link.remembers and self._is_due(link.method):
                    probability = self._track.probability(request_id, drafter_id)
                    trials[request_id] = _Hope(probability, window, 1.0, drafter_id)
                    break
        return trials

    def _is_due(self, method: str) -> bool:
        return self._steps % _PROBE_EVERY == 0 or self._track.ladder.tried(method) < _TRIED

    def _lacking(self, request_id: str, hope: _Hope) -> float:
        """Expected tokens that may still come: those of the tail that would be verified, less those that are there."""
        wanted = self._worthwhile[request_id]
        there = [
            self._track.expected_accepted(request_id, drafter_id, min(len(tail), wanted))
            for drafter_id, tail in self._book.usable(request_id).items()
        ]
        return max(expected_accepted(hope.probability, wanted) - max(there, default=0.0), 0.0)

    def _supply(self, request_id: str) -> int:
        """Length of the longest usable tail."""
        return max((len(tail) for tail in self._book.usable(request_id).values()), default=0)

    def _fulfilled(self, now: float) -> float:
        """Share of what was missing when the wait began that need not be waited for any more."""
        hoped = sum(lacking for _, lacking in self._missing.values())
        if hoped <= 0.0:
            return 1.0
        left = sum(
            self._lacking(request_id, hope)
            for request_id, (hope, _) in self._missing.items()
            if not self.answered(request_id, now)
        )
        return 1.0 - min(left / hoped, 1.0)

    def _drafting_s(self, request_id: str) -> float:
        """What it took to draft the longest tail of a request."""
        tails = self._book.usable(request_id).items()
        return max((len(tail) * self._table[drafter_id].token_s for drafter_id, tail in tails), default=0.0)

    def _hoped_extra(self) -> float:
        """Expected tokens of all that is missing, chances of no guess at all included."""
        return sum(hope.guessing * lacking for hope, lacking in self._missing.values())

    def _step_s(self, num_rows: int) -> float:
        return self._cost.seconds(num_rows, num_rows + sum(self._worthwhile.values()))

    def _coupled_wait_pays(self, hopes: Mapping[str, _Hope]) -> bool:
        """Whether what may come is worth more than the time a wait takes: for lookups by the inequality of
        `choose_wait_s`, for models that draft on demand by what the step would be without them. A model in another
        process is always waited for: it shares the verifier's cores and would slow the step down."""
        if self._config.verify == VerifyPolicy.all or self._trying or self._steps % _PROBE_EVERY == 0:
            return True
        waited_for = dict.fromkeys(hope.drafter_id for hope, _ in self._missing.values())
        models = [drafter for drafter in map(self._table.__getitem__, waited_for) if not drafter.link.remembers]
        if models:
            return not all(drafter.link.on_demand for drafter in models) or self._drafting_pays(hopes, models)
        return self._hoped_extra() * self._step_s(len(hopes)) >= len(hopes) * self._waits.wait_s

    def _drafting_pays(self, hopes: Mapping[str, _Hope], models: Sequence[Drafter]) -> bool:
        """Whether the step commits more tokens per second if these models draft first, for all its rows together, than
        with the guesses that are there.

        They take turns, each for as many forwards as its window is long: what one row gains is paid for by all.
        """
        if any(drafter.token_s <= 0.0 for drafter in models):
            return True  # what a token costs shows when it has drafted
        rounds = [
            max(hope.window for hope, _ in self._missing.values() if self._table[hope.drafter_id] is drafter)
            for drafter in models
        ]
        drafting_s = sum(window * drafter.token_s for window, drafter in zip(rounds, models, strict=True))
        there = {request_id: self._there(request_id) for request_id in hopes}
        lengths = self.verify_lengths([VerifyCandidate(request_id, *there[request_id]) for request_id in hopes])
        before = self._rate(lengths, {request_id: probability for request_id, (probability, _) in there.items()}, 0.0)
        after = self._rate(
            self._worthwhile,
            {request_id: hope.probability for request_id, hope in hopes.items()},
            drafting_s + self._waits.overhead_s,
        )
        return after > before

    def _there(self, request_id: str) -> tuple[float, int]:
        """The best of the guesses that are there: chance that one of its tokens is right, and its length."""
        guesses = [
            (self._track.probability(request_id, drafter_id), len(tail))
            for drafter_id, tail in self._book.usable(request_id).items()
        ]
        return max(guesses, key=lambda guess: expected_accepted(*guess), default=(0.0, 0))

    def _rate(self, lengths: Mapping[str, int], probabilities: Mapping[str, float], before_s: float) -> float:
        """Tokens per second of a step that verifies so many draft tokens per row, after `before_s` seconds."""
        tokens = sum(1.0 + expected_accepted(probabilities[row], length) for row, length in lengths.items())
        return tokens / (before_s + self._cost.seconds(len(lengths), len(lengths) + sum(lengths.values())))

    def _worthwhile_wait_s(self, num_rows: int) -> float:
        timely = 1.0 if self._steps % _PROBE_EVERY == 0 else self._timely
        return choose_wait_s(self._hoped_extra() * timely, float(num_rows), self._step_s(num_rows))
