"""The requests of one verifier: structure of arrays, one row per request, one seat per drafter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specactor_ray.config.schema import MAX_METHODS
from specactor_ray.ragged import enlarged
from specactor_ray.spec import _kernels
from specactor_ray.spec._kernels import Committed
from specactor_ray.spec.acceptance import Acceptance, bucket_of

if TYPE_CHECKING:
    from specactor_ray.target.base import TargetRequest

_FIRST_ROWS, _FIRST_SEATS, _FIRST_TOKENS = 32, 2, 256


class RequestTable:
    """What a verifier knows of its requests and their drafts. Not thread-safe.

    A request has a row from `open` to `close`; rows are used again under a new `generation`, so that what is said of
    the old request is not taken for the new one. A drafter has a seat.

    Args:
        window: Most draft tokens of a request that are kept.
        branches: Most branches of a tail that are kept.
    """

    def __init__(self, window: int, branches: int = 0) -> None:
        self.window = window
        rows, seats = _FIRST_ROWS, _FIRST_SEATS
        self.requests: list[TargetRequest | None] = [None] * rows
        # Per row.
        self.generation = np.zeros(rows, np.int32)
        """Of the request in the row; 0: the row is free."""
        self.committed = np.zeros(rows, np.int32)
        """Output tokens committed."""
        self.limit = np.zeros(rows, np.int32)
        """Most of them."""
        self.output = np.zeros((rows, _FIRST_TOKENS), np.int32)
        """Committed token ids, `(rows, capacity)`."""
        self.steps = np.zeros(rows, np.int32)
        """In which it committed tokens."""
        self.begun = np.zeros(rows, np.bool_)
        """It has been in a step; before, no drafter is assigned."""
        # Per seat and row.
        self.assigned = np.zeros((seats, rows), np.bool_)
        """The drafter drafts for the request."""
        self.told = np.zeros((seats, rows), np.int32)
        """Committed tokens that it was told; -1: it has yet to be told of the request."""
        self.base = np.full((seats, rows), -1, np.int32)
        """Committed tokens that it knew when it said its newest tail; -1: it has said nothing."""
        self.tail = np.zeros((seats, rows, window), np.int32)
        """The part of that tail that lies past the committed prefix."""
        self.length = np.zeros((seats, rows), np.int32)
        """Its tokens; 0 where the drafter does not draft for the request."""
        # Branches of that tail, where it has tokens.
        self.branch_at = np.full((seats, rows, branches), _kernels.FREE, np.int32)
        """`(seats, rows, branches)`: tokens of the tail before the branch leaves it; `FREE`: no branch."""
        self.branch_length = np.zeros((seats, rows, branches), np.int32)
        self.branch_tail = np.zeros((seats, rows, branches, window), np.int32)
        self.method = np.zeros(seats, np.int32)
        """Draft method of each seat."""
        # Per method and row, so they survive a change of the drafter.
        self.evidence = np.zeros((2, MAX_METHODS, rows))
        """Hits and tries of draft tokens."""
        self.drafts = np.zeros((2, MAX_METHODS, rows), np.int32)
        """Draft tokens that were verified, and right."""
        self.outcomes = np.zeros(3, np.int64)
        """Tails that committed tokens refuted, on arrival or later, and branches that became the tail, on arrival and
        at a commit; counted up until `StepMetrics.count_outcomes` takes them."""
        self._generations = 0
        self._free = list(range(rows))[::-1]

    def __len__(self) -> int:
        """Requests in the table."""
        return len(self.requests) - len(self._free)

    # ---- rows and seats ----

    @property
    def next_row(self) -> int:
        """The row that `open` gives next."""
        if not self._free:
            self._grow_rows()
        return self._free[-1]

    def open(self, request: TargetRequest) -> int:
        """Give a request a row; returns it."""
        row = self.next_row
        self._free.pop()
        self._generations += 1
        known = len(request.committed_token_ids)
        self._fit(known + self.window + 1)
        self.requests[row], self.generation[row] = request, self._generations
        self.committed[row], self.limit[row] = known, request.sampling.max_tokens
        self.output[row, :known] = request.committed_token_ids
        return row

    def close(self, row: int) -> None:
        """Free a row."""
        self.requests[row], self.generation[row], self.begun[row], self.steps[row] = None, 0, False, 0
        for plane in (self.assigned, self.length, self.evidence, self.drafts):
            plane[..., row] = 0
        self._free.append(row)

    def fit_seats(self, count: int) -> None:
        """Make room for this many drafters."""
        seats = len(self.method)
        while seats < count:
            seats *= 2
        if seats > len(self.method):
            for name in (*_BY_SEAT, "method"):
                setattr(self, name, enlarged(getattr(self, name), 0, seats))

    def clear_seat(self, seat: int, method: int) -> None:
        """A drafter of this method takes the seat; nothing is known of it."""
        self.method[seat] = method
        self.assigned[seat], self.length[seat] = False, 0

    def assign(self, seat: int, row: int) -> None:
        """The drafter drafts for the request from now on; it has yet to be told."""
        self.assigned[seat, row], self.told[seat, row] = True, -1
        self.base[seat, row], self.length[seat, row] = -1, 0

    def release(self, seat: int, row: int) -> None:
        """The drafter drafts for the request no more."""
        self.assigned[seat, row], self.length[seat, row] = False, 0

    # ---- what comes in ----

    def take(self, seat: int, tails: Any) -> np.ndarray:
        """Take in the tails of one drafter (`messages.TailBatch`). Returns bool `(n,)`: which of them are of requests
        that it does not draft for."""
        arrays = (tails.rows, tails.generations, tails.bases, tails.lengths, tails.tokens, *tails.branches)
        unknown: np.ndarray = _kernels.take_tails(seat, *arrays, _kernels.Planes(*_PLANES(self)))
        return unknown

    def commit(self, step: Committed, acceptance: Acceptance) -> None:
        """Append what a step committed, and judge the tails that were there by it."""
        start = self.committed[step.rows]
        self._fit(int((start + step.counts).max(initial=0)) + self.window + 1)
        _kernels.commit(step, bucket_of(start), _kernels.Planes(*_PLANES(self)), acceptance.evidence)

    def untold(self, seat: int, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What was committed since the drafter was told last: lengths per row, and all tokens one after the other.
        It counts as told from now on."""
        lengths: np.ndarray
        lengths, tokens = _kernels.untold(np.asarray(rows, np.int32), self.told[seat], self.committed, self.output)
        return lengths, tokens

    # ---- growth ----

    def _fit(self, tokens: int) -> None:
        width = self.output.shape[1]
        if tokens > width:
            while width < tokens:
                width *= 2
            self.output = enlarged(self.output, 1, width)

    def _grow_rows(self) -> None:
        old = len(self.requests)
        for axis, names in enumerate((_BY_ROW, _BY_SEAT, ("evidence", "drafts"))):
            for name in names:
                setattr(self, name, enlarged(getattr(self, name), axis, 2 * old))
        self.requests += [None] * old
        self._free = list(range(old, 2 * old))[::-1]


_PLANES = operator.attrgetter(*_kernels.Planes._fields)
_BY_ROW = ("generation", "committed", "begun", "steps", "limit", "output")
_BY_SEAT = ("assigned", "told", "base", "tail", "length", "branch_at", "branch_length", "branch_tail")
