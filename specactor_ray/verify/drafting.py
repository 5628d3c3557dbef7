"""The verifier's side of drafting: the table of requests, the drafters in its seats, and the messages between them.

Called from the verifier's one thread, except `inbox.put` and `snapshot`. Decisions are in `policy.py` and `racing.py`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specactor_ray.config.methods import WINDOW, DrafterSpec
from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.plan.costs import StepCost
from specactor_ray.target.base import NO_DRAFTS, Drafts, States, TargetRequest
from specactor_ray.transport import inbox
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, DraftOpen, Features, TailBatch
from specactor_ray.verify._kernels import Committed
from specactor_ray.verify.policy import Drafter, DraftPolicy
from specactor_ray.verify.racing import Assigner
from specactor_ray.verify.table import Acceptance, RequestTable

_KEPT_POSITIONS = 2048
"""Number of newest positions of each request whose hidden states are kept for drafters that join later."""


@dataclass(slots=True)
class DrafterLink:
    """Link and specification of one drafter."""

    spec: DrafterSpec
    link: Link[CommitBatch]


@dataclass(slots=True)
class HostedDrafter(DrafterLink):
    """A drafter in the verifier's own process, which the verifier's loop runs; `link` leads to it."""

    loop: DraftLoop


class FeatureLog:
    """Newest hidden states of each request of a verifier."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Features]] = {}

    def keep(self, row: int, features: Features, read: int) -> None:
        """Add a step's exported states of a request. Spans of its initial `read` positions expire together."""
        kept = self._kept.setdefault(row, [])
        kept.append(features)
        while features.end - max(kept[0].end, read) >= _KEPT_POSITIONS:
            kept.pop(0)

    def since(self, row: int, position: int) -> tuple[Features, ...]:
        """Spans of states that reach past a sequence position."""
        kept = self._kept.get(row, [])
        return tuple(kept[bisect.bisect_right(kept, position, key=lambda span: span.end) :])

    def drop(self, row: int) -> None:
        """Drop the states of a row whose request has left."""
        self._kept.pop(row, None)


class DrafterSeat(Drafter):
    """A drafter in seat `number` of the table, and the data that is still to be sent to it. `session`: see
    `CommitBatch`."""

    def __init__(
        self, number: int, session: int, drafter_id: str, link: DrafterLink, table: RequestTable, features: FeatureLog
    ) -> None:
        super().__init__(drafter_id, link.spec, hosted=isinstance(link, HostedDrafter))
        self.link, self.number, self._table = link.link, number, table
        self._session, self._begun = session, False
        self._features = features if self.spec.traits.reads_features else FeatureLog()
        # Row and generation of requests to close at the drafter → whether they are finished.
        self._closed: dict[tuple[int, int], bool] = {}
        # Row, generation, output position and tokens of the unsent ends of finished requests.
        self._last: list[tuple[int, int, int, np.ndarray]] = []

    def let_go(self, row: int, generation: int) -> None:
        """Close a request for which the drafter does not draft any more, or should not have drafted."""
        self._closed.setdefault((row, generation), False)

    def end(self, row: int, finished: bool) -> None:
        """Close a request that leaves its row, opened or not: the drafter may keep a place for it."""
        table, told = self._table, int(self._table.told[self.number, row])
        finished = finished and told >= 0
        generation, tokens = int(table.generation[row]), table.output[row, told : table.committed[row]]
        if finished and self.spec.traits.keeps_history and len(tokens):
            self._last.append((row, generation, told, tokens.copy()))
        self._closed[row, generation] = finished

    def forget(self, handles: Sequence[tuple[int, int]]) -> None:
        """Open these requests again, which the drafter has lost."""
        table, number = self._table, self.number
        for row, generation in handles:
            if row < len(table.generation) and table.generation[row] == generation and table.assigned[number, row]:
                table.told[number, row] = -1

    def news(self, verifier_id: str) -> CommitBatch | None:
        """The batch of unsent data, which counts as sent from now on. None if there is none after the first batch."""
        table, number = self._table, self.number
        told, mine = table.told[number], np.flatnonzero(table.assigned[number])
        opened = tuple(map(self._opening, mine[told[mine] < 0].tolist()))
        rows = mine[(told[mine] >= 0) & (told[mine] < table.committed[mine])].astype(np.int32)
        closed, self._closed = tuple((*handle, finished) for handle, finished in self._closed.items()), {}
        last, self._last = self._last, []
        if self._begun and not (opened or closed or len(rows)):
            return None
        self._begun = True
        features = self._untold_features(rows)
        starts, generations = told[rows], table.generation[rows]
        lengths, tokens = table.untold(number, rows)
        if last:
            ended = np.array([(*one[:3], len(one[3])) for one in last], np.int32).T
            pairs = zip(ended, (rows, generations, starts, lengths), strict=True)
            rows, generations, starts, lengths = map(np.concatenate, pairs)
            tokens = np.concatenate([*(one[3] for one in last), tokens])
        arrays = (rows, generations, starts, lengths, tokens)
        return CommitBatch(verifier_id, *arrays, opened, closed, features, self._session)

    def _opening(self, row: int) -> DraftOpen:
        table, request = self._table, self._table.requests[row]
        committed = int(table.committed[row])
        table.told[self.number, row], table.base[self.number, row] = committed, -1
        output = tuple(table.output[row, :committed].tolist())
        handle, features = (row, int(table.generation[row]), request.request_id), self._features.since(row, -1)
        return DraftOpen(*handle, request.prompt_token_ids, output, request.sampling, self.spec.window, features)

    def _untold_features(self, rows: np.ndarray) -> tuple[tuple[int, tuple[Features, ...]], ...]:
        """States from the newest sent token on, whose own state becomes known with the next commit."""
        if not self.spec.traits.reads_features:
            return ()
        requests, told = self._table.requests, self._table.told[self.number]
        known = ((row, len(requests[row].prompt_token_ids) + int(told[row]) - 1) for row in rows.tolist())
        return tuple((row, spans) for row, position in known if (spans := self._features.since(row, position)))


class Drafting:
    """Drafting for the requests of one verifier: drafters answer to its incarnation id, and if `coupled` they take
    turns with it on its cores. `window`: most draft tokens of a request, if a drafter has a larger window than that of
    `config`."""

    def __init__(
        self,
        verifier_id: str,
        coupled: bool,
        config: SpeculationConfig,
        vocab_size: int,
        max_batch: int = 16,
        window: int = 0,
        branches: int = 0,
    ) -> None:
        warm_up()
        self.verifier_id = verifier_id
        self.inbox = inbox.for_verifier(vocab_size)
        self.table = RequestTable(max(config.window or WINDOW, window), branches)
        self._seats: dict[int, DrafterSeat] = {}
        self._sessions = itertools.count(1)
        self.policy = DraftPolicy(config, self.table, Acceptance(), StepCost(), self._seats)
        self.assigner = Assigner(config, self.policy, coupled, max_batch)
        self.features = FeatureLog()
        self._standings: list[dict[str, Any]] = []

    def __len__(self) -> int:
        """Number of drafters."""
        return len(self._seats)

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """Replace the list of drafters."""
        seats, known = self._seats, {seat.drafter_id: seat.number for seat in self._seats.values()}
        for number in [number for drafter_id, number in known.items() if drafter_id not in links]:
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
        if batch.token_s > 0.0:
            seat.token_s, seat.token_rows = float(batch.token_s), self.policy.rows
        seat.forget(batch.lost)
        unknown = self.table.take(seat.number, batch)
        # No other message closes an opening that arrived late, or twice.
        for handle in zip(batch.rows[unknown].tolist(), batch.generations[unknown].tolist(), strict=True):
            seat.let_go(*handle)

    def flush(self, *, models_turn: bool = True) -> None:
        """Send news to drafters, unless the last delivery is under way; models of the verifier's own thread get all
        news since their last turn at their turn only."""
        for seat in self._seats.values():
            seat.able = seat.link.failed is None
            if models_turn or not seat.takes_turns:
                seat.link.offer(functools.partial(seat.news, self.verifier_id))

    def revise(self, rows: np.ndarray) -> None:
        """Revise the assignments before a step over these rows, if a revision is due."""
        if (released := self.assigner.step(rows)) is not None:
            self._let_go(released)

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, Drafts]:
        """Drafts that a step over these rows verifies: int32 `(rows,)` seats of the tails, -1 for none; the drafts."""
        if not self._seats or not len(rows) or self.policy.suspension.is_on:
            return np.full(len(rows), -1, np.int32), NO_DRAFTS
        seats, lengths = self.policy.choose(rows)
        tokens = self.table.tail[seats, rows, 0][np.arange(self.table.window) < lengths[:, None]]
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
    arriving = inbox.for_verifier(1)
    arriving.put(TailBatch("", rows, table.generation[rows], zero, zero + 1, zero))
    for message in arriving.drain():
        table.take(0, message)
    table.commit(Committed(rows, zero + 1, zero, *policy.choose(rows), zero), acceptance)
    table.untold(0, rows)
