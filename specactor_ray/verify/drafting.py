"""The verifier's side of drafting: the table of requests, the drafters in its seats, and the messages between them.

Called from the verifier's one thread, except `inbox.put` and `snapshot`. Decisions are in `verify/policy.py` and
`verify/racing.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specactor_ray.config.methods import WINDOW, DrafterSpec
from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.plan.step_cost import StepCost
from specactor_ray.target.base import NO_DRAFTS, Drafts, States, TargetRequest
from specactor_ray.transport import inbox
from specactor_ray.transport.messages import Branches, Features, TailBatch
from specactor_ray.verify._kernels import Committed
from specactor_ray.verify.acceptance import Acceptance
from specactor_ray.verify.policy import Drafter, DraftPolicy
from specactor_ray.verify.racing import Assigner
from specactor_ray.verify.seat import DrafterLink, DrafterSeat, FeatureLog
from specactor_ray.verify.table import RequestTable


class Drafting:
    """Drafting for the requests of one verifier.

    Args:
        verifier_id: Incarnation id of the verifier, to which drafters answer.
        coupled: Whether drafters take turns with the verifier on its cores.
        max_batch: Most requests the verifier runs at once.
        window: Most draft tokens of a request, if a drafter has a larger window than that of `config`.
        branches: Most branches of a tail.
        acceptance, cost: Estimates; default: learned, without a prior.
    """

    def __init__(
        self,
        verifier_id: str,
        coupled: bool,
        config: SpeculationConfig,
        vocab_size: int,
        max_batch: int = 16,
        window: int = 0,
        branches: int = 0,
        acceptance: Acceptance | None = None,
        cost: StepCost | None = None,
    ) -> None:
        warm_up()
        self.verifier_id = verifier_id
        self.inbox = inbox.for_verifier(vocab_size, branches)
        self.table = RequestTable(max(config.window or WINDOW, window), branches)
        self._seats: dict[int, DrafterSeat] = {}
        self._sessions = itertools.count(1)
        self.policy = DraftPolicy(config, self.table, acceptance or Acceptance(), cost or StepCost(), self._seats)
        self.assigner = Assigner(config, self.policy, coupled, max_batch)
        self.features = FeatureLog()
        self._standings: list[dict[str, Any]] = []

    def __len__(self) -> int:
        """Number of drafters."""
        return len(self._seats)

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """Replace the list of drafters."""
        seats, known = self._seats, {seat.drafter_id: seat.number for seat in self._seats.values()}
        for number in [known[drafter_id] for drafter_id in known.keys() - links.keys()]:
            del seats[number]
            self.table.clear_seat(number, 0)
        for drafter_id in [name for name in links if name not in known]:
            number, link = next(n for n in range(len(seats) + 1) if n not in seats), links[drafter_id]
            self.table.fit_seats(number + 1)
            self.table.clear_seat(number, self.policy.acceptance.number(link.spec.method))
            seats[number] = DrafterSeat(number, next(self._sessions), drafter_id, link, self.table, self.features)
        self._let_go(self.assigner.revise(level=True))
        self.policy.suspension.end()

    def _let_go(self, released: list[tuple[int, int]]) -> None:
        for number, row in released:
            self._seats[number].let_go(row, int(self.table.generation[row]))
        self._standings = self.policy.standings()

    def close(self, row: int, finished: bool) -> None:
        """Close the request of a row."""
        for seat in self._seats.values():
            if self.table.assigned[seat.number, row]:
                seat.end(row, finished)
        self.features.drop(row)
        self.table.close(row)

    def take_messages(self) -> None:
        """Process the messages of drafters that arrived since the last call."""
        seats = {seat.drafter_id: seat for seat in self._seats.values()}
        for batch in self.inbox.drain():
            if batch.drafter_id in seats:
                self._take(seats[batch.drafter_id], batch)

    def _take(self, seat: DrafterSeat, batch: TailBatch) -> None:
        if 0.0 < batch.token_s < math.inf:
            seat.token_s, seat.token_rows = float(batch.token_s), self.policy.rows
        seat.forget(batch.lost)
        unknown = self.table.take(seat.number, batch)
        # No other message closes an opening that arrived late, or twice.
        for handle in zip(batch.rows[unknown].tolist(), batch.generations[unknown].tolist(), strict=True):
            seat.let_go(*handle)

    def flush(self, *, models_turn: bool = True) -> None:
        """Send news to drafters, unless the last delivery is under way. Models of the verifier's own thread get them at
        their turn only, all news since the last turn in one message."""
        for seat in self._seats.values():
            seat.able = seat.link.failed is None and seat.drafter_id not in self.inbox.cut_off
            seat.trip_s = seat.link.trip_s
            if models_turn or not seat.takes_turns:
                seat.link.offer(functools.partial(seat.news, self.verifier_id))
            else:
                seat.postponed += 1

    def revise(self, rows: np.ndarray) -> None:
        """Revise the assignments before a step over these rows, if a revision is due."""
        if (released := self.assigner.step(rows)) is not None:
            self._let_go(released)

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, Drafts]:
        """Drafts that a step over these rows verifies: int32 `(rows,)` seats of the tails, -1 for none; the drafts."""
        if not self._seats or not len(rows) or self.policy.suspension.is_on:
            return np.full(len(rows), -1, np.int32), NO_DRAFTS
        seats, lengths = self.policy.choose(rows)
        tokens = self.table.tail[seats, rows][np.arange(self.table.window) < lengths[:, None]]
        return seats, Drafts(rows, lengths, tokens)

    def keep(self, states: States) -> None:
        """Keep the exported hidden states of a step."""
        for row, start, values in states.split():
            request = self.table.requests[row]
            read = len(request.prompt_token_ids) + len(request.committed_token_ids)
            self.features.keep(row, Features(start, values), read)

    def commit(self, step: Committed) -> None:
        """Commit the tokens of a step, and learn from the tails."""
        self.table.commit(step, self.policy.acceptance)
        if self._seats:
            self.policy.acceptance.fade(self.table)

    def snapshot(self) -> dict[str, Any]:
        """Counters of links, malformed messages and the draft ladder; for any thread."""
        links = {seat.drafter_id: seat.link.snapshot() for seat in self._seats.copy().values()}
        return {"links": links, **self.inbox.snapshot(), "ladder": self._standings}


@functools.cache
def warm_up() -> None:
    """Compile the kernels of `verify/` for their argument types: takes seconds where numba's cache is cold."""
    table, acceptance, cost = RequestTable(1), Acceptance(), StepCost()
    hosted = Drafter("", DrafterSpec(window=1, max_batch=1), hosted=True)
    policy = DraftPolicy(SpeculationConfig(window=1), table, acceptance, cost, {0: hosted})
    cost.record(1, 1.0)
    rows = np.array([table.open(TargetRequest(str(i), (0,), SamplingParams())) for i in range(2)], np.int32)
    zero = np.zeros(2, np.int32)
    table.assigned[0] = True
    policy.plan_rounds(rows)
    arriving = inbox.for_verifier(1, 2)
    branches = Branches(zero, zero, zero + 1, zero)
    arriving.put(TailBatch("", rows, table.generation[rows], zero, zero + 1, zero, branches))
    for message in arriving.drain():
        table.take(0, message)
    table.commit(Committed(rows, zero + 1, zero, *policy.choose(rows), zero), acceptance)
    table.untold(0, rows)
