"""The verifier's side of drafting: the table of requests, the drafters in its seats, and what travels between them.

Everything here is a matter of speed only. Called from the verifier's one thread, except `inbox.put` and `snapshot`.
What is decided is in `spec/policy.py`, who drafts for what in `spec/assign.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.messages import Features, SamplingParams, TailBatch
from specactor_ray.queues import inbox
from specactor_ray.spec import _kernels
from specactor_ray.spec.acceptance import Acceptance
from specactor_ray.spec.assign import Assigner
from specactor_ray.spec.cost import StepCost
from specactor_ray.spec.policy import Drafter, Policy
from specactor_ray.spec.table import Committed, RequestTable
from specactor_ray.targets.base import TargetRequest
from specactor_ray.verify.seat import DrafterLink, FeatureLog, Seat

WINDOWS_EVERY = 8
"""Steps between two looks at how far drafters run ahead."""


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
        self.tails = dict.fromkeys((*_kernels.FATES, "refuted"), 0)
        """What became of the tails that arrived; refuted: of those that were there, a commit proved them wrong."""
        self._vocab_size, self._clock = vocab_size, clock
        self._seats: list[Seat | None] = []
        self._seat_of: dict[str, int] = {}
        self._features = FeatureLog()
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
        self.policy.suspension.end()

    def _sit_down(self, drafter_id: str, link: DrafterLink) -> None:
        if None in self._seats:
            number = self._seats.index(None)
        else:
            number = len(self._seats)
            self._seats.append(None)
            self.policy.drafters.append(None)
            self.table.fit_seats(number + 1)
        seat = Seat(number, drafter_id, link, self.table, self._features)
        self._seats[number], self.policy.drafters[number] = seat, seat.drafter
        self._seat_of[drafter_id] = number
        self.table.clear_seat(number, self.policy.acceptance.number(link.method))

    def _tell(self, changes: list[tuple[int, int, bool]]) -> None:
        """(seat, row, opened or closed) of the assignment."""
        for number, row, opened in changes:
            seat = self._seats[number]
            if seat is not None and not opened:
                seat.let_go(row, int(self.table.generation[row]))

    # ---- requests ----

    def close(self, row: int, finished: bool) -> None:
        """A request leaves its row."""
        for number in np.flatnonzero(self.table.assigned[:, row]):
            seat = self._seats[number]
            if seat is not None:
                seat.end(row, finished)
        self._features.drop(row)
        self.assigner.remove(row)
        self.table.close(row)

    def keep_features(self, row: int, features: Features) -> None:
        """What a step exported of a request; kept for drafters that join later too."""
        self._features.keep(row, features)

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

    def _take(self, number: int, seat: Seat, batch: TailBatch, arrived_at: float) -> None:
        if 0.0 < batch.token_s < math.inf:
            seat.drafter.token_s = float(batch.token_s)
        seat.forget(batch.lost)
        if not len(batch.rows):
            return
        found = self.table.take(number, batch, self._vocab_size)
        for fate, count in zip(_kernels.FATES, found.tolist(), strict=False):
            self.tails[fate] += count
        if found[_kernels.UNKNOWN]:
            seat.close_unknown(batch)
        if found[_kernels.FRESH]:
            seat.note_answer(arrived_at)

    def note_silence(self, waited_s: float) -> None:
        """A wait of this length was in vain."""
        for seat in self._seats:
            if seat is not None:
                seat.note_silence(waited_s)

    # ---- steps ----

    def revise(self, rows: np.ndarray) -> None:
        """A step over these rows begins: look at who drafts for what, if it is time."""
        self._tell(self.assigner.step(rows))

    def commit(self, step: Committed) -> np.ndarray:
        """A step committed tokens: judge the tails that were there by it, and decide how far drafters run ahead.

        Returns int32 `(n,)` how many tokens there were of the tails that were verified."""
        acceptance = self.policy.acceptance
        refuted, supplied = self.table.commit(step, acceptance)
        self.tails["refuted"] += refuted
        if len(self):
            acceptance.fade(self.table)
            self._steps += 1
            if self._steps % WINDOWS_EVERY == 0:
                self.policy.set_windows(step.rows)
        return supplied

    # ---- what drafters are told ----

    def flush(self) -> None:
        """Tell drafters what they do not know yet, unless they are still busy with the last delivery."""
        for seat in self._seats:
            if seat is not None:
                seat.drafter.able = seat.link.link.failed is None and seat.drafter.drafter_id not in self.inbox.cut_off
                seat.tell(self.verifier_id, self._clock.now())

    def snapshot(self) -> dict[str, Any]:
        """What became of tails, how links fare, malformed messages and what is thought of each method; may be called
        from any thread."""
        seats = [seat for seat in list(self._seats) if seat is not None]
        return {
            "tails": dict(self.tails),
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
