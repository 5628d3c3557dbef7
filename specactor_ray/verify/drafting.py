"""The verifier's side of drafting: drafters in the seats of the table, called or reached by messages.

Called from the verifier's one thread, except `inbox.put` and `snapshot`. Decisions are in `policy.py` and `racing.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specactor_ray.config.methods import WINDOW, DrafterSpec
from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.core.step_cost import StepCost
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.table._kernels import Committed, moves
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.target.base import NO_DRAFTS, STATES_UNDER_WAY, Drafts
from specactor_ray.transport import inbox
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, DraftOpen, States, TailBatch
from specactor_ray.verify.acceptance import Acceptance
from specactor_ray.verify.policy import Drafter, DraftPolicy
from specactor_ray.verify.racing import Assigner

StatesOf = Callable[[np.ndarray, np.ndarray, int], States]
"""`TargetEngine.states`."""


@dataclass(slots=True)
class DrafterLink:
    """Specification of a drafter in another process, and the link to it."""

    spec: DrafterSpec
    link: Link[CommitBatch]


@dataclass(slots=True)
class HostedDrafter:
    """A drafter in the verifier's own process."""

    spec: DrafterSpec
    runner: DraftRunner


class DrafterSeat(Drafter):
    """A drafter in seat `number` of the table."""

    def __init__(
        self, number: int, drafter_id: str, spec: DrafterSpec, table: RequestTable, states_of: StatesOf | None
    ) -> None:
        super().__init__(drafter_id, spec, hosted=isinstance(self, HostedSeat))
        self.number, self._table, self._states_of = number, table, states_of
        self.opened = 0
        """Tokens of the requests that the newest batch, or turn, opens."""

    @property
    def rows(self) -> np.ndarray:
        """int32 `(n,)`: rows of the requests assigned to the drafter."""
        return np.flatnonzero(self._table.assigned[self.number]).astype(np.int32)

    def release(self, row: int) -> None:
        """End the drafter's work for a request that goes on."""

    def end(self, row: int, finished: bool) -> None:
        """End the drafter's work for a request that leaves its row. `finished`: whether its output is complete."""

    def _unsent_states(self, rows: np.ndarray, unread: int) -> States | None:
        """Hidden states that count as sent from now on; a drafter with `unread` ones gets fewer."""
        if not self.spec.traits.reads_features or self._states_of is None or not len(rows):
            return None
        streamed = self._table.streamed[self.number]
        states = self._states_of(rows, streamed[rows], max(STATES_UNDER_WAY - unread, 0))
        if not len(states.rows):
            return None
        streamed[states.rows] = states.starts + states.lengths
        return states


class HostedSeat(DrafterSeat):
    """A drafter of this process, which reads the table and writes its tails into it."""

    def __init__(self, number: int, drafter: HostedDrafter, table: RequestTable, states_of: StatesOf | None) -> None:
        super().__init__(number, drafter.runner.drafter_id, drafter.spec, table, states_of)
        self.runner = drafter.runner
        self._view = TableView(table, number, drafter.spec.window, drafter.runner.proposer.vocab_size)

    def draft(self, most: int = 1, goes_on: bool = False) -> int:
        """Let it draft up to `most` tokens for each request. Returns their number, at least 1; 0: nothing to do.
        `goes_on`: no step was made since the last call."""
        table, number, rows = self._table, self.number, self.rows
        sent = table.sent[number]
        if len(new := rows[sent[rows] < 0]):
            table.streamed[number, new] = 0
            self.opened = int(table.lengths[new].sum())
            self.runner.counters["opens"] += len(new)
        sent[rows] = table.committed[rows]
        states = None if goes_on else self._unsent_states(rows, self.runner.proposer.unread)
        if states is not None:
            self._view.states.append(states)
        changed = self.runner.run(self._view, rows, most)
        self.token_s = self.runner.token_s or self.token_s
        if self._view.lost:
            sent[list(self._view.lost)] = -1
            self._view.lost.clear()
        if not len(changed):
            return 0
        table.publish(number, changed)
        counters = self.runner.counters
        counters["tails"] += len(changed)
        counters["branches"] += int(np.count_nonzero(table.length[number, changed, 1:]))
        return max(self.runner.proposer.drafted, 1)

    def end(self, row: int, finished: bool) -> None:
        if finished and self.spec.traits.keeps_history:
            self.runner.learn([self._view.finished(row)])


class RemoteSeat(DrafterSeat):
    """A drafter of another process, and the data that is still to be sent to it. `session`: see `CommitBatch`."""

    def __init__(
        self,
        number: int,
        drafter_id: str,
        drafter: DrafterLink,
        table: RequestTable,
        states_of: StatesOf | None,
        session: int,
    ) -> None:
        super().__init__(number, drafter_id, drafter.spec, table, states_of)
        self.link, self._session, self._begun = drafter.link, session, False
        # Row and generation of requests to close at the drafter → whether they are finished.
        self._closed: dict[tuple[int, int], bool] = {}
        # Row, generation, output position and tokens of the unsent ends of finished requests.
        self._last: list[tuple[int, int, int, np.ndarray]] = []

    def release(self, row: int) -> None:
        self.let_go(row, int(self._table.generation[row]))

    def let_go(self, row: int, generation: int) -> None:
        """Close a request for which the drafter does not draft any more, or should not have drafted."""
        self._closed.setdefault((row, generation), False)

    def end(self, row: int, finished: bool) -> None:
        # Opened or not: the drafter may keep a place for it.
        table, sent = self._table, int(self._table.sent[self.number, row])
        finished = finished and sent >= 0
        generation, tokens = int(table.generation[row]), table.output(row)[max(sent, 0) :]
        if finished and self.spec.traits.keeps_history and len(tokens):
            self._last.append((row, generation, sent, tokens.copy()))
        self._closed[row, generation] = finished

    def forget(self, handles: Sequence[tuple[int, int]]) -> None:
        """Open these requests again, which the drafter has lost."""
        table, number = self._table, self.number
        for row, generation in handles:
            if row < len(table.generation) and table.generation[row] == generation and table.assigned[number, row]:
                table.sent[number, row] = -1

    def news(self, verifier_id: str) -> CommitBatch | None:
        """The batch of unsent data, which counts as sent from now on. None if there is none after the first batch."""
        table, number = self._table, self.number
        sent, mine = table.sent[number], self.rows
        begun = sent[mine] >= 0
        opened = tuple(map(self._opening, mine[~begun].tolist()))
        self.opened = sum(len(one.prompt_token_ids) + len(one.committed_token_ids) for one in opened)
        states = self._unsent_states(mine, 0)
        fresh = sent[mine] < table.committed[mine]
        if states is not None:  # those without new tokens come with a commit of none
            from specactor_ray.models.weight_buckets import to_wire

            fresh |= np.isin(mine, states.rows)
            states = replace(states, states=to_wire(states.states))
        rows = mine[begun & fresh]
        closed, self._closed = tuple((*handle, finished) for handle, finished in self._closed.items()), {}
        last, self._last = self._last, []
        if self._begun and not (opened or closed or len(rows)):
            return None
        self._begun = True
        starts, generations = sent[rows], table.generation[rows]
        lengths, tokens = table.unsent(number, rows)
        if last:
            ended = np.array([(*one[:3], len(one[3])) for one in last], np.int32).T
            pairs = zip(ended, (rows, generations, starts, lengths), strict=True)
            rows, generations, starts, lengths = map(np.concatenate, pairs)
            tokens = np.concatenate([*(one[3] for one in last), tokens])
        arrays = (rows, generations, starts, lengths, tokens)
        return CommitBatch(verifier_id, *arrays, opened, closed, states, self._session)

    def _opening(self, row: int) -> DraftOpen:
        table, request = self._table, self._table.requests[row]
        committed = int(table.committed[row])
        table.sent[self.number, row], table.base[self.number, row] = committed, -1
        table.streamed[self.number, row] = 0
        output = tuple(table.output(row).tolist())
        handle = row, int(table.generation[row]), request.request_id
        return DraftOpen(*handle, request.prompt_token_ids, output, request.sampling, self.spec.window)


class Drafting:
    """Drafting for the requests of one verifier, in the `table` of its engine: drafters answer to its incarnation id,
    and if `coupled` they take turns with it on its cores. `window`: most draft tokens of a request, if a drafter has a
    larger window than that of `config`. `states_of`: of the engine, for drafters that read hidden states."""

    def __init__(
        self,
        verifier_id: str,
        coupled: bool,
        config: SpeculationConfig,
        table: RequestTable,
        max_batch: int = 16,
        window: int = 0,
        branches: int = 0,
        states_of: StatesOf | None = None,
    ) -> None:
        warm_up()
        self.verifier_id = verifier_id
        self.inbox = inbox.for_verifier(table.vocab_size)
        self.table = table
        table.fit_tails(max(config.window or WINDOW, window), branches)
        self._seats: dict[int, HostedSeat | RemoteSeat] = {}
        self._sessions = itertools.count(1)
        self.policy = DraftPolicy(config, self.table, Acceptance(), StepCost(), self._seats)
        self.assigner = Assigner(config, self.policy, coupled, max_batch)
        self._states_of = states_of
        self._standings: list[dict[str, Any]] = []

    def __len__(self) -> int:
        """Number of drafters."""
        return len(self._seats)

    @property
    def _hosted(self) -> list[HostedSeat]:
        return [seat for seat in self._seats.values() if isinstance(seat, HostedSeat)]

    @property
    def _remote(self) -> list[RemoteSeat]:
        return [seat for seat in self._seats.values() if isinstance(seat, RemoteSeat)]

    def set_drafters(self, drafters: Mapping[str, DrafterLink | HostedDrafter]) -> None:
        """Replace the list of drafters, by id."""
        seats, known = self._seats, {seat.drafter_id: seat.number for seat in self._seats.values()}
        for number in [number for drafter_id, number in known.items() if drafter_id not in drafters]:
            del seats[number]
            self.table.clear_seat(number, 0)
        for drafter_id in [name for name in drafters if name not in known]:
            number, drafter = next(n for n in range(len(seats) + 1) if n not in seats), drafters[drafter_id]
            self.table.fit_seats(number + 1)
            self.table.clear_seat(number, self.policy.acceptance.number(drafter.spec.method))
            where = self.table, self._states_of
            if isinstance(drafter, HostedDrafter):
                seats[number] = HostedSeat(number, drafter, *where)
            else:
                seats[number] = RemoteSeat(number, drafter_id, drafter, *where, next(self._sessions))
        self._release(self.assigner.revise(level=True))
        self.policy.suspension.end()

    def _release(self, released: list[tuple[int, int]]) -> None:
        for number, row in released:
            self._seats[number].release(row)
        self._standings = self.policy.standings()

    def close(self, row: int, finished: bool) -> None:
        """Close the request of a row."""
        for seat in self._seats.values():
            if self.table.assigned[seat.number, row]:
                seat.end(row, finished)
        self.table.close(row)

    # ---- drafters of other processes ----

    def take_messages(self) -> None:
        """Process the messages of drafters that arrived since the last call."""
        if not (batches := self.inbox.drain()):
            return
        seats = {seat.drafter_id: seat for seat in self._remote}
        for batch in batches:
            if batch.drafter_id in seats:
                self._take(seats[batch.drafter_id], batch)

    def _take(self, seat: RemoteSeat, batch: TailBatch) -> None:
        if batch.token_s > 0.0:
            seat.token_s, seat.token_rows = float(batch.token_s), self.policy.rows
        seat.forget(batch.lost)
        unknown = self.table.take(seat.number, batch)
        # No other message closes an opening that arrived late, or twice.
        for handle in zip(batch.rows[unknown].tolist(), batch.generations[unknown].tolist(), strict=True):
            seat.let_go(*handle)

    def flush(self) -> None:
        """Send news to drafters, unless the last delivery is under way."""
        for seat in self._remote:
            seat.able = seat.link.failed is None
            seat.link.offer(functools.partial(seat.news, self.verifier_id))

    # ---- drafters of this process ----

    def look_up(self) -> None:
        """Let lookups fill the tails."""
        for seat in self._hosted:
            if seat.spec.traits.looks_up:
                seat.draft()

    def take_turns(self, rows: np.ndarray, now: Callable[[], float]) -> None:
        """Let models draft for these rows, as far as that pays or is tried."""
        for number, most in self.policy.turns(rows).items():
            seat, left, begin = self._seats[number], most, now()
            assert isinstance(seat, HostedSeat)
            while left > 0 and (drafted := seat.draft(left, goes_on=left < most)):
                left -= drafted
            seat.token_rows = self.policy.rows
            self.policy.spent(number, now() - begin, most - left, seat.opened)
            seat.opened = 0

    def rest(self) -> None:
        """Let drafters free what they hold for ended requests."""
        for seat in self._hosted:
            seat.draft()

    # ---- steps ----

    def revise(self, rows: np.ndarray) -> None:
        """Revise the assignments before a step over these rows, if a revision is due."""
        if (released := self.assigner.step(rows)) is not None:
            self._release(released)

    @property
    def window(self) -> int:
        """Most draft tokens of a request in the next step; 0 where it verifies none."""
        return self.table.window if self._seats and not self.policy.suspension.is_on else 0

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, Drafts]:
        """Drafts that a step over these rows verifies: int32 `(rows,)` seats of the tails, -1 for none; the drafts."""
        if not self.window or not len(rows):
            return np.full(len(rows), -1, np.int32), NO_DRAFTS
        seats, lengths = self.policy.choose(rows)
        tokens = self.table.tail[seats, rows, 0][np.arange(self.table.window) < lengths[:, None]]
        return seats, Drafts(rows, lengths, tokens)

    def snapshot(self) -> dict[str, Any]:
        """Counters of links, malformed messages and the draft ladder; for any thread."""
        seats = self._seats.copy().values()
        links = {seat.drafter_id: seat.link.snapshot() for seat in seats if isinstance(seat, RemoteSeat)}
        return {"links": links, **self.inbox.snapshot(), "ladder": self._standings}


@functools.cache
def warm_up() -> None:
    """Compile the kernels of `table/` and `verify/`: takes seconds where numba's cache is cold."""
    table, acceptance, cost = RequestTable(1), Acceptance(), StepCost()
    hosted = Drafter("", DrafterSpec(window=1, max_batch=1), hosted=True)
    policy = DraftPolicy(SpeculationConfig(window=1), table, acceptance, cost, {0: hosted})
    cost.record(1, 1.0)
    rows = np.array([table.open(TargetRequest(str(i), (0,), SamplingParams())) for i in range(2)], np.int32)
    zero = np.zeros(2, np.int32)
    table.append(rows, zero + 1, zero)
    table.assigned[0] = True
    policy.plan_rounds(rows)
    arriving = inbox.for_verifier(1)
    arriving.put(TailBatch("", rows, table.generation[rows], zero, zero + 1, zero))
    for message in arriving.drain():
        table.take(0, message)
    acceptance.settle(table, Committed(rows, zero + 1, *policy.choose(rows), zero))
    table.unsent(0, rows)
    table.publish(0, rows)
    moves(zero, rows, table.generation, table.kept[0])
    table.tails(0, rows)
    table.follow(rows, zero, zero, zero[:0])
