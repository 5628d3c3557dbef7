"""A policy that knows: what the product's own is judged by.

It knows how likely each guess is to be right (all but the draw of the single position), what every step and every
draft costs, and how long every output is. It cannot know more than that without knowing the tokens themselves. It runs
in the product's loops, with the product's messages and drafters; only the decisions are others:

- who drafts: the method whose tokens promise most per second at the load it has, and once the drafters have room, all;
- how far: twice what a step would verify if it were there, since a drafter runs ahead while the verifier works;
- what is verified: the lengths with the most expected tokens per second, by the true cost of the step;
- how long a step waits: for as many further draft tokens as raise that quotient;
- which request is handed out first, where all are there at once: the longest.

Decisions are the best ones step by step, not over the whole rollout: a policy that knows less can be a little faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.controller.state import VerifierSpec
from specactor_ray.loops.assignment import AssignmentChange
from specactor_ray.loops.drafter_table import DrafterTable
from specactor_ray.loops.speculator import Speculator
from specactor_ray.messages import Mode
from specactor_ray.simulation.engine import SimulatedEngine
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.world import World
from specactor_ray.speculation.acceptance import expected_accepted
from specactor_ray.speculation.ladder import Estimate
from specactor_ray.speculation.reconfigure import PLAIN, RequestPlan
from specactor_ray.speculation.tails import TailBook
from specactor_ray.speculation.window import VerifyCandidate, choose_verify_lengths
from specactor_ray.targets.base import TargetRequest

_REVISE_EVERY = 8
_MOST_ROUNDS = 4
"""Further draft tokens that a decoupled step may wait for."""


class Knowledge:
    """What the policy of one verifier knows. Stands in for the product's track record and its learned step cost."""

    num_ranges = 2

    def __init__(self, world: World, engine: SimulatedEngine, clock: VirtualClock, table: DrafterTable) -> None:
        self._world, self._engine, self._clock, self._table = world, engine, clock, table
        self._requests: dict[str, tuple[int, int]] = {}
        """Request → its seed and output position."""

    def open(self, request: TargetRequest) -> None:
        self._requests[request.request_id] = (request.sampling.seed, len(request.committed_token_ids))

    # ---- as a track record ----

    def probability(self, request_id: str, drafter_id: str) -> float:
        drafter = self._table.get(drafter_id)
        seed, position = self._requests.get(request_id, (None, 0))
        if drafter is None or seed is None:
            return 0.0
        return self._world.text.probability(drafter.link.method, seed, position)

    def estimate(self, request_id: str, drafter_id: str) -> Estimate:
        return Estimate(self.probability(request_id, drafter_id), 1.0)

    def expected_accepted(self, request_id: str, drafter_id: str, length: int) -> float:
        return expected_accepted(self.probability(request_id, drafter_id), length)

    def reach(self, request_id: str, position: int) -> None:
        if request_id in self._requests:
            self._requests[request_id] = (self._requests[request_id][0], position)

    def forget_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def record(self, request_id: str, drafter_id: str, drafted: int, accepted: int) -> None:
        """There is nothing to learn."""

    def record_answer(self, request_id: str, drafter_id: str, guessed: bool) -> None:
        """There is nothing to learn."""

    # ---- as a cost ----

    def seconds(self, rows: int, positions: int) -> float:
        """Of a step, our Python included."""
        process = self._clock.process
        forward = self._world.target.seconds(rows, positions, self._engine.cached_tokens)
        return forward * process.slowness + self._world.python.verify_s(process, rows, speculates=True)

    def plain_seconds(self, rows: int) -> float:
        return self.seconds(rows, rows)

    def draft_seconds(self, drafter_id: str, rows: int) -> float:
        """Of one token for each of `rows` requests."""
        method = self._table[drafter_id].link.method
        mean = self._engine.cached_tokens / max(len(self._requests), 1)
        forward = self._world.draft_time(method).forward.seconds(rows, rows, round(rows * mean))
        return forward + self._world.python.draft_s(self._clock.process, rows)


class _Planner:
    """Who drafts for which request, and how far."""

    def __init__(self, mode: Mode, table: DrafterTable, knowledge: Knowledge) -> None:
        self.mode_of_all, self._table, self._knowledge = mode, table, knowledge
        self._of: dict[str, list[str]] = {}
        self._loads: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        """Request → draft tokens that a step would verify if they were there."""
        self._steps = 0
        self.standings: dict[str, Any] = {}

    def drafters(self, request_id: str) -> list[str]:
        return self._of.get(request_id, [])

    def mode(self, request_id: str) -> Mode:
        return self.mode_of_all if self.wanted(request_id) else Mode.PLAIN

    def wanted(self, request_id: str) -> int:
        return self._lengths.get(request_id, 1)

    def plan(self, request_id: str, drafter_id: str) -> RequestPlan:
        wanted, drafter = self.wanted(request_id), self._table.get(drafter_id)
        if not wanted or drafter is None:
            return PLAIN
        ahead = wanted if self.mode_of_all is Mode.COUPLED else 2 * wanted + 1
        return RequestPlan(min(ahead, drafter.link.window), self.mode_of_all)

    def set_drafters(self) -> AssignmentChange:
        known = self._table.methods
        self._of = {name: [one for one in drafters if one in known] for name, drafters in self._of.items()}
        self._loads = {name: sum(name in drafters for drafters in self._of.values()) for name in known}
        return self._assign(list(self._of))

    def add(self, request_id: str) -> AssignmentChange:
        self._of[request_id] = []
        return self._assign([request_id])

    def remove(self, request_id: str) -> AssignmentChange:
        drafters = self._of.pop(request_id)
        self._lengths.pop(request_id, None)
        for drafter_id in drafters:
            self._loads[drafter_id] -= 1
        return AssignmentChange(closed=[(drafter_id, request_id) for drafter_id in drafters])

    def step(self, decoding: Sequence[str], committed_len: object) -> AssignmentChange | None:
        self._steps += 1
        if self._steps % _REVISE_EVERY != 1:
            return None
        self._lengths = self._choose_lengths(decoding)
        change = self._assign([name for name in self._of if not self._of[name]])
        if self._has_room():
            change.opened += self._assign(list(self._of), more=True).opened
        return change

    def _has_room(self) -> bool:
        return len(self._table) > 1 and 2 * len(self._of) <= sum(link.max_batch for _, link in self._table.links())

    def _assign(self, request_ids: Sequence[str], more: bool = False) -> AssignmentChange:
        """Give each of these the drafter that promises most, of a method that it has not."""
        change, links = AssignmentChange(), dict(self._table.links())
        for request_id in request_ids:
            mine = self._of[request_id]
            if mine and not more:
                continue
            methods = {links[drafter_id].method for drafter_id in mine}
            able = [
                name
                for name, link in links.items()
                if link.method not in methods and self._loads[name] < link.max_batch
            ]
            if able:
                best = max(able, key=lambda name: self._rate(request_id, name))
                mine.append(best)
                self._loads[best] += 1
                change.opened.append((best, request_id))
        return change

    def _rate(self, request_id: str, drafter_id: str) -> float:
        """Expected tokens per second of a request at this drafter."""
        knowledge, load = self._knowledge, self._loads[drafter_id] + 1
        probability = knowledge.probability(request_id, drafter_id)
        step_s, token_s = knowledge.plain_seconds(max(len(self._of), 1)), knowledge.draft_seconds(drafter_id, load)
        rounds = max(1, min(int(step_s / max(token_s, 1e-9)), self._table[drafter_id].link.window))
        return (1.0 + expected_accepted(probability, rounds)) / max(step_s, token_s)

    def _choose_lengths(self, decoding: Sequence[str]) -> dict[str, int]:
        """Draft tokens of each row that would be verified if all were there. Where drafting takes turns with verifying,
        its time counts: rows draft together, as long as the longest."""
        rows = {name: self._best_of(name) for name in decoding}
        widest = max((link.window for _, link in self._table.links()), default=0)
        if not rows or not widest:
            return {}
        knowledge = self._knowledge
        if self.mode_of_all is not Mode.COUPLED:
            full = [VerifyCandidate(name, probability, widest) for name, (probability, _) in rows.items()]
            return choose_verify_lengths(full, knowledge.seconds)
        drafter_id = next((drafter_id for _, drafter_id in rows.values() if drafter_id), "")
        token_s = knowledge.draft_seconds(drafter_id, len(rows)) if drafter_id else 0.0
        best, chosen = len(rows) / knowledge.plain_seconds(len(rows)), dict.fromkeys(rows, 0)
        for width in range(1, widest + 1):
            capped = [VerifyCandidate(name, probability, width) for name, (probability, _) in rows.items()]
            lengths = choose_verify_lengths(capped, knowledge.seconds)
            expected = sum(1.0 + expected_accepted(rows[name][0], length) for name, length in lengths.items())
            drafting_s = max(lengths.values()) * token_s
            rate = expected / (knowledge.seconds(len(rows), len(rows) + sum(lengths.values())) + drafting_s)
            if rate > best:
                best, chosen = rate, lengths
        return chosen

    def _best_of(self, request_id: str) -> tuple[float, str]:
        """The best of its drafters: probability and id."""
        return max(
            ((self._knowledge.probability(request_id, one), one) for one in self.drafters(request_id)),
            default=(0.0, ""),
        )


class _Waits:
    """How long a step waits, and what it verifies."""

    plain_step = False

    def __init__(
        self,
        table: DrafterTable,
        book: TailBook,
        planner: _Planner,
        knowledge: Knowledge,
        clock: VirtualClock,
        call_s: float,
    ) -> None:
        self._table, self._book, self._planner, self._knowledge = table, book, planner, knowledge
        self._clock, self._call_s = clock, call_s
        self._wanted: dict[str, int] = {}

    def plan(self, decoding: Sequence[str]) -> float:
        now, planner = self._clock.now(), self._planner
        self._wanted = {}
        if not decoding or not len(self._table):
            return now
        if planner.mode_of_all is Mode.COUPLED:
            self._wanted = {name: planner.wanted(name) for name in decoding}
            return now + (60.0 if any(self._wanted.values()) else 0.0)
        return now + self._worthwhile_wait(decoding)

    def _worthwhile_wait(self, decoding: Sequence[str]) -> float:
        """Compare taking the step now with waiting for one more draft token of each request, two, ..."""
        knowledge = self._knowledge
        there = {name: self._there(name) for name in decoding}
        token_s = max(
            (knowledge.draft_seconds(name, max(self._planner._loads[name], 1)) for name in self._table.methods),
            default=0.0,
        )
        best, best_rounds = 0.0, 0
        for rounds in range(_MOST_ROUNDS + 1):
            candidates = [
                VerifyCandidate(name, probability, max(supply, min(supply + rounds, self._planner.wanted(name))))
                for name, (probability, supply) in there.items()
            ]
            lengths = choose_verify_lengths(candidates, knowledge.seconds)
            expected = sum(1.0 + expected_accepted(there[name][0], length) for name, length in lengths.items())
            waiting_s = rounds * token_s + (2.0 * self._call_s if rounds else 0.0)
            rate = expected / (knowledge.seconds(len(decoding), len(decoding) + sum(lengths.values())) + waiting_s)
            if rate > best:
                best, best_rounds = rate, rounds
                self._wanted = lengths if rounds else {}
        return best_rounds * token_s + (3.0 * self._call_s if best_rounds else 0.0)

    def _there(self, request_id: str) -> tuple[float, int]:
        """Probability and length of the tail that promises most."""
        usable = self._book.usable(request_id)
        drafters = self._planner.drafters(request_id)
        known = [(self._knowledge.probability(request_id, one), len(usable.get(one, ()))) for one in drafters]
        return max(known, key=lambda pair: (expected_accepted(*pair), pair[0]), default=(0.0, 0))

    def verify_lengths(self, candidates: Sequence[VerifyCandidate]) -> dict[str, int]:
        return choose_verify_lengths(candidates, self._knowledge.seconds)

    def healthy(self, request_id: str, now: float) -> list[str]:
        return [one for one in self._planner.drafters(request_id) if self._table.get(one) is not None]

    def all_answered(self, decoding: Sequence[str]) -> bool:
        return all(self._answered(name) for name in decoding)

    def _answered(self, request_id: str) -> bool:
        if self._there(request_id)[1] >= self._wanted.get(request_id, 0):
            return True
        return all(self._book.complete(request_id, one) for one in self._planner.drafters(request_id))

    def record(self, decoding: Sequence[str], answered: bool) -> None:
        """There is nothing to learn."""


class ClairvoyantSpeculator(Speculator):
    """The product's bookkeeping of tails and messages, with the decisions of one who knows.

    Args:
        spec: Of the verifier.
        engine: Its engine.
        clock: Time of its process.
        world: What there is to know.
        call_s: Seconds of a call between actors, one way.
    """

    def __init__(
        self, spec: VerifierSpec, engine: SimulatedEngine, clock: VirtualClock, world: World, call_s: float
    ) -> None:
        super().__init__(
            spec.actor_id, spec.mode, spec.speculation, engine.vocab_size, clock, max_batch=spec.target.max_batch
        )
        table, book = self._drafters, self._book
        self._knowledge: Any = Knowledge(world, engine, clock, table)
        planner: Any = _Planner(spec.mode, table, self._knowledge)
        waits: Any = _Waits(table, book, planner, self._knowledge, clock, call_s)
        self._acceptance: Any = self._knowledge
        self._planner, self._waits = planner, waits

    def open(self, request: TargetRequest) -> None:
        self._knowledge.open(request)
        super().open(request)
