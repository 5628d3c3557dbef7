"""How many draft tokens of each request are worth having, and how long a step waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.loops.drafter_table import DrafterTable
from specactor_ray.loops.planner import DraftPlanner
from specactor_ray.messages import Mode
from specactor_ray.speculation.acceptance import expected_accepted
from specactor_ray.speculation.step_cost import StepCostModel
from specactor_ray.speculation.tails import TailBook
from specactor_ray.speculation.track_record import TrackRecord
from specactor_ray.speculation.window import VerifyCandidate, choose_verify_lengths, choose_wait_s

_PROBE_EVERY = 32
"""Every so many steps a decoupled verifier waits as if drafters always answered in time, to see whether they do."""
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
        mode: The layout. In a coupled one every step may wait `coupled_wait_s`; in a decoupled one as long as
            pays, also for requests that are in mode `coupled` (those count as answered only when their drafters are
            done with the newest commit).
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
        clock: Callable[[], float],
    ) -> None:
        self._mode, self._config, self._clock = mode, config, clock
        self._table, self._book, self._planner, self._track, self._cost = table, book, planner, track, cost
        self._worthwhile: dict[str, int] = {}
        """Draft tokens per request that would be verified if they were there; 0: no use in waiting."""
        self._hoped: dict[str, str] = {}
        """Request → the drafter that promises most for it."""
        self._missing: dict[str, tuple[_Hope, float]] = {}
        """Requests that are waited for: what is hoped for, and the tokens that were missing then."""
        self._timely = 1.0
        """Moving share of what was waited for, in expected tokens, that came in time."""
        self._steps = 0

    def plan(self, decoding: Sequence[str]) -> float:
        """Decide how many draft tokens of each request are worth having, and how long to wait for them.

        Returns:
            Clock time until which the step may wait; now, when no wait pays.
        """
        now = self._clock()
        self._steps += 1
        if not len(self._table) or not decoding:
            self._worthwhile, self._missing = {}, {}
            return now
        hopes = {request_id: self._potential(request_id, now) for request_id in decoding}
        self._hoped = {request_id: hope.drafter_id for request_id, hope in hopes.items()}
        candidates = [VerifyCandidate(request_id, hope.probability, hope.window) for request_id, hope in hopes.items()]
        self._worthwhile = self.verify_lengths(candidates)
        self._missing = {
            request_id: (hope, self._lacking(request_id, hope))
            for request_id, hope in hopes.items()
            if not self.answered(request_id, now)
        }
        if self._mode is Mode.COUPLED:
            return now + self._config.coupled_wait_s
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
        return [drafter_id for drafter_id in drafters if self._table[drafter_id].reachable(now)]

    def all_answered(self, decoding: Sequence[str]) -> bool:
        """Whether no wait would bring anything: every request has what its drafters can say about its newest commit."""
        if not len(self._table):
            return True
        now = self._clock()
        return all(self.answered(request_id, now) for request_id in decoding)

    def answered(self, request_id: str, now: float) -> bool:
        """Whether no wait for this request would bring anything. Coupled: every healthy drafter is done with the newest
        commit, or, in a decoupled layout, all tokens that would be verified are there. Decoupled: the one that
        promises most has a token, or it has none and another one has, or none has."""
        worthwhile = self._worthwhile.get(request_id, 0)
        if not worthwhile:
            return True
        healthy = self.healthy(request_id, now)
        if self._planner.mode(request_id) is Mode.COUPLED:
            if self._mode is not Mode.COUPLED and self._supply(request_id) >= worthwhile:
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
        now = self._clock()
        self._timely = _MEMORY * self._timely + (1.0 - _MEMORY) * self._fulfilled(now)
        if answered:
            return
        missed = {
            drafter_id
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
        """The most that one of the request's healthy drafters can be hoped to bring."""
        hopes = [_Hope(0.0, 0, 0.0, "")]
        for drafter_id in self.healthy(request_id, now):
            known = self._track.estimate(request_id, drafter_id)
            window = self._planner.plan(request_id, drafter_id).window
            hopes.append(_Hope(known.probability if window else 0.0, window, known.guessing, drafter_id))
        return max(hopes, key=_Hope.value)

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

    def _worthwhile_wait_s(self, num_rows: int) -> float:
        extra = sum(hope.guessing * lacking for hope, lacking in self._missing.values())
        timely = 1.0 if self._steps % _PROBE_EVERY == 0 else self._timely
        step_s = self._cost.seconds(num_rows, num_rows + sum(self._worthwhile.values()))
        return choose_wait_s(extra * timely, float(num_rows), step_s)
