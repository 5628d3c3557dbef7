"""The verifier's side of drafting: the table of requests, the drafters in its seats, and what travels between them.

Everything here is a matter of speed only. Called from the verifier's one thread, except `inbox.put` and `snapshot`.
What is decided is in `spec/policy.py`, who drafts for what in `spec/assign.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.messages import CommitBatch, DraftOpen, Features, SamplingParams, TailBatch
from specactor_ray.queues import inbox
from specactor_ray.queues.link import Link
from specactor_ray.spec import _kernels
from specactor_ray.spec.acceptance import Acceptance
from specactor_ray.spec.assign import Assigner
from specactor_ray.spec.cost import StepCost
from specactor_ray.spec.policy import Drafter, Policy
from specactor_ray.spec.table import Committed, RequestTable
from specactor_ray.targets.base import TargetRequest

_KEPT_POSITIONS = 2048
"""Hidden states kept per request, at least those of so many of the newest positions, for drafters that join later."""
WINDOWS_EVERY = 8
"""Steps between two looks at how far drafters run ahead."""
_ANSWER_WEIGHT = 0.25
"""Weight of the newest answer in the moving mean of how long drafters take."""


@dataclass(slots=True)
class DrafterLink:
    """How to reach one drafter, and what it is."""

    method: str
    window: int
    link: Link[CommitBatch]
    max_batch: int = 64
    reads_features: bool = False
    """It is sent the target's hidden states."""
    looks_up: bool = False
    """It looks guesses up and learns from the outputs it follows."""
    inline: bool = False
    """It runs in the verifier's process and drafts only while a step waits for it."""


@dataclass(slots=True)
class TailCounters:
    """What became of the tails that arrived, and of those that were there."""

    taken: int = 0
    stale: int = 0
    """Nothing past the committed prefix, or older than the tail that is there."""
    mismatch: int = 0
    """Differed from what had been committed meanwhile."""
    ahead: int = 0
    """Claimed a base longer than the committed prefix, which cannot come from this verifier's truth."""
    unknown: int = 0
    """For a request that is not open, or not with this drafter."""
    truncated: int = 0
    """Were longer than allowed and were cut (counted beside `taken`)."""
    malformed: int = 0
    refuted: int = 0
    """Were there, and a commit proved them wrong."""


@dataclass(slots=True)
class _Seat:
    """A drafter and what it has yet to be told."""

    link: DrafterLink
    drafter: Drafter
    told_at: float | None = None
    """When it was told of the newest commits; None: it has answered since."""
    closed: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Row and generation of requests that it has to let go → whether they are finished."""
    told_windows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    told_features: dict[int, int] = field(default_factory=dict)
    """Row → sequence position up to which it has the target's states."""


class Drafting:
    """Drafting for the requests of one verifier.

    Args:
        verifier_id: Incarnation id of the verifier; drafters answer to it.
        coupled: Drafters take turns with the verifier on its own cores.
        config: Windows, waits, races.
        vocab_size: Of the target.
        clock: What waits are measured by; the same as of the loop that calls it.
        max_batch: Most requests the verifier runs at once.
        priors: Draft method → chance that a token is right, as measured offline.
    """

    def __init__(
        self,
        verifier_id: str,
        coupled: bool,
        config: SpeculationConfig,
        vocab_size: int,
        clock: Clock = SYSTEM,
        max_batch: int = 16,
        priors: Mapping[str, float] | None = None,
    ) -> None:
        warm_up()
        self.verifier_id = verifier_id
        self.inbox = inbox.for_verifier(vocab_size, clock)
        self.table = RequestTable(config.window)
        self.policy = Policy(config, self.table, Acceptance(priors), StepCost(), coupled)
        self.assigner = Assigner(config, self.policy, coupled, max_batch)
        self.counters = TailCounters()
        self._vocab_size, self._clock = vocab_size, clock
        self._seats: list[_Seat | None] = []
        self._seat_of: dict[str, int] = {}
        self._features: dict[int, list[Features]] = {}
        self._steps = 0

    def __len__(self) -> int:
        """Drafters."""
        return len(self._seat_of)

    # ---- drafters ----

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """The complete list of drafters now."""
        for drafter_id in [name for name in self._seat_of if name not in links]:
            seat = self._seat_of.pop(drafter_id)
            self._seats[seat] = self.policy.drafters[seat] = None
            self.table.clear_seat(seat, 0)
        for drafter_id, link in links.items():
            if drafter_id not in self._seat_of:
                self._sit_down(drafter_id, link)
        self._tell(self.assigner.set_drafters())

    def _sit_down(self, drafter_id: str, link: DrafterLink) -> None:
        drafter = Drafter(drafter_id, link.method, link.window, link.max_batch, link.looks_up, link.inline)
        if None in self._seats:
            seat = self._seats.index(None)
        else:
            seat = len(self._seats)
            self._seats.append(None)
            self.policy.drafters.append(None)
            self.table.fit_seats(seat + 1)
        self._seats[seat], self.policy.drafters[seat] = _Seat(link, drafter), drafter
        self._seat_of[drafter_id] = seat
        self.table.clear_seat(seat, self.policy.acceptance.number(link.method))

    def _tell(self, changes: list[tuple[int, int, bool]]) -> None:
        """(seat, row, opened or closed) of the assignment."""
        for seat_number, row, opened in changes:
            seat = self._seats[seat_number]
            if seat is None:
                continue
            if opened:
                self.table.told[seat_number, row] = -1
            else:
                seat.closed[row, int(self.table.generation[row])] = False
                seat.told_features.pop(row, None)

    # ---- requests ----

    def close(self, row: int, finished: bool) -> None:
        """A request leaves its row."""
        generation = int(self.table.generation[row])
        for number in np.flatnonzero(self.table.assigned[:, row]):
            seat = self._seats[number]
            if seat is not None:
                if self.table.told[number, row] >= 0:
                    seat.closed[row, generation] = finished
                seat.told_features.pop(row, None)
        self._features.pop(row, None)
        self.assigner.remove(row)
        self.table.close(row)

    # ---- what drafters say ----

    def take_messages(self) -> bool:
        """Take in what drafters sent since the last call. Returns whether there was anything."""
        batches = self.inbox.drain()
        for batch, arrived_at in batches:
            number = self._seat_of.get(batch.drafter_id)
            seat = self._seats[number] if number is not None else None
            if number is not None and seat is not None:
                self._take(number, seat, batch, arrived_at)
        return bool(batches)

    def _take(self, number: int, seat: _Seat, batch: TailBatch, arrived_at: float) -> None:
        table, counters = self.table, self.counters
        if 0.0 < batch.token_s < math.inf:
            seat.drafter.token_s = float(batch.token_s)
        for row, generation in batch.lost:
            if row < len(table.generation) and table.generation[row] == generation and table.assigned[number, row]:
                table.told[number, row] = -1
        if not len(batch.rows):
            return
        found = table.take(number, batch, self._vocab_size)
        counters.taken += int(found[_kernels.TAKEN])
        counters.stale += int(found[_kernels.STALE])
        counters.mismatch += int(found[_kernels.MISMATCH])
        counters.ahead += int(found[_kernels.AHEAD])
        counters.unknown += int(found[_kernels.UNKNOWN])
        counters.truncated += int(found[_kernels.TRUNCATED])
        counters.malformed += int(found[_kernels.MALFORMED])
        if found[_kernels.UNKNOWN]:
            self._close_unknown(number, seat, batch)
        if seat.told_at is not None and found[_kernels.FRESH] and not seat.drafter.inline:
            took_s = max(arrived_at - seat.told_at - seat.drafter.token_s, 0.0)
            seat.drafter.answer_s += _ANSWER_WEIGHT * (took_s - seat.drafter.answer_s)
            seat.told_at = None

    def _close_unknown(self, number: int, seat: _Seat, batch: TailBatch) -> None:
        """Let the drafter close what it should not have open: an open that came late, or twice, is closed by nobody
        else."""
        table = self.table
        within = (batch.rows >= 0) & (batch.rows < len(table.generation))
        rows, generations = batch.rows[within], batch.generations[within]
        unwanted = (table.generation[rows] != generations) | ~table.assigned[number, rows]
        for handle in zip(rows[unwanted].tolist(), generations[unwanted].tolist(), strict=True):
            seat.closed.setdefault(handle, False)

    def note_silence(self, waited_s: float) -> None:
        """A wait of this length was in vain."""
        for seat in self._seats:
            if seat is not None and seat.told_at is not None and not seat.drafter.inline:
                seat.drafter.answer_s = max(2.0 * seat.drafter.answer_s, waited_s)

    # ---- steps ----

    def revise(self, rows: np.ndarray) -> None:
        """A step over these rows begins: look at who drafts for what, if it is time."""
        self._tell(self.assigner.step(rows))

    def commit(self, step: Committed) -> np.ndarray:
        """A step committed tokens: judge the tails that were there by it, and decide how far drafters run ahead.

        Returns int32 `(n,)` how many tokens there were of the tails that were verified."""
        acceptance = self.policy.acceptance
        refuted, supplied = self.table.commit(step, acceptance)
        self.counters.refuted += refuted
        if len(self):
            acceptance.fade(self.table)
            self._steps += 1
            if self._steps % WINDOWS_EVERY == 0:
                self.policy.set_windows(step.rows)
        return supplied

    # ---- what drafters are told ----

    def flush(self, lookups_only: bool = False) -> None:
        """Tell drafters what they do not know yet, unless they are still busy with the last delivery."""
        for number, seat in enumerate(self._seats):
            if seat is None or (lookups_only and seat.drafter.inline and not seat.drafter.looks_up):
                continue
            seat.drafter.able = seat.link.link.failed is None and seat.drafter.drafter_id not in self.inbox.cut_off
            if seat.link.link.offer(functools.partial(self._news, number, seat)):
                seat.told_at = self._clock.now()

    def _news(self, number: int, seat: _Seat) -> CommitBatch | None:
        """What this drafter has yet to be told."""
        table = self.table
        mine = np.flatnonzero(table.assigned[number])
        told = table.told[number]
        opened = tuple(self._opening(number, seat, int(row)) for row in mine[told[mine] < 0])
        if len(seat.told_windows) < len(told):
            seat.told_windows = np.concatenate(
                [seat.told_windows, np.zeros(len(told) - len(seat.told_windows), np.int16)]
            )
        windows = table.windows[number]
        news = mine[(told[mine] < table.committed[mine]) | (seat.told_windows[mine] != windows[mine])].astype(np.int32)
        closed, seat.closed = tuple((*handle, finished) for handle, finished in seat.closed.items()), {}
        if not (opened or closed or len(news)):
            return None
        starts = told[news]
        lengths, tokens = table.untold(number, news)
        seat.told_windows[news] = windows[news]
        features = self._untold_features(seat, news) if seat.link.reads_features else ()
        return CommitBatch(
            self.verifier_id,
            news,
            table.generation[news],
            starts,
            lengths,
            windows[news].astype(np.int32),
            tokens,
            opened,
            closed,
            features,
        )

    def _opening(self, number: int, seat: _Seat, row: int) -> DraftOpen:
        table, request = self.table, self.table.requests[row]
        assert request is not None
        committed, window = int(table.committed[row]), int(table.windows[number, row])
        table.told[number, row], table.base[number, row] = committed, -1
        if len(seat.told_windows) > row:
            seat.told_windows[row] = window
        features: tuple[Features, ...] = ()
        if seat.link.reads_features:
            features = tuple(self._features.get(row, ()))
            seat.told_features[row] = features[-1].end if features else 0
        return DraftOpen(
            row,
            int(table.generation[row]),
            request.request_id,
            request.prompt_token_ids,
            tuple(table.output[row, :committed].tolist()),
            request.sampling,
            window,
            features,
        )

    def keep_features(self, row: int, features: Features) -> None:
        """What a step exported of a request; kept for drafters that join later too."""
        kept = self._features.setdefault(row, [])
        kept.append(features)
        while features.end - kept[0].end >= _KEPT_POSITIONS:
            kept.pop(0)

    def _untold_features(self, seat: _Seat, rows: np.ndarray) -> tuple[tuple[int, tuple[Features, ...]], ...]:
        news = []
        for row in rows.tolist():
            known = seat.told_features.get(row, 0)
            spans = tuple(span for span in self._features.get(row, ()) if span.end > known)
            if spans:
                seat.told_features[row] = spans[-1].end
                news.append((row, spans))
        return tuple(news)

    def snapshot(self) -> dict[str, Any]:
        """What became of tails, how links fare, malformed messages and what is thought of each method; may be called
        from any thread."""
        seats = [seat for seat in list(self._seats) if seat is not None]
        return {
            "tails": asdict(self.counters),
            "links": {seat.drafter.drafter_id: seat.link.link.snapshot() for seat in seats},
            **self.inbox.snapshot(),
            "ladder": self.assigner.standings,
        }


@functools.cache
def warm_up() -> None:
    """Compile the kernels of `spec/` for the types they are called with: seconds where numba's cache is cold, which a
    running step should not wait for."""
    table, acceptance, cost = RequestTable(1), Acceptance(), StepCost()
    policy = Policy(SpeculationConfig(window=1), table, acceptance, cost, coupled=False)
    policy.drafters.append(Drafter("", "", 1, 1))
    cost.record(1, 1.0)
    rows = np.array([table.open(TargetRequest(str(i), (0,), SamplingParams())) for i in range(2)], np.int32)
    zero = np.zeros(2, np.int32)
    table.assigned[0], table.windows[0] = True, 1
    policy.plan_wait(rows)
    table.take(0, TailBatch("", rows, table.generation[rows], zero, zero + 1, zero > 0, zero), 1)
    seats, lengths = policy.choose(rows)
    table.commit(Committed(rows, zero + 1, zero, seats, lengths, zero), acceptance)
    table.untold(0, rows)
