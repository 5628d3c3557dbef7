"""Requests of one verifier, a structure of arrays, and the chance that their draft tokens are right."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specactor_ray.config.schema import MAX_METHODS
from specactor_ray.core.ragged import grow
from specactor_ray.verify import _kernels
from specactor_ray.verify._kernels import Committed
from specactor_ray.verify.metrics import COUNTS

if TYPE_CHECKING:
    from specactor_ray.target.base import TargetRequest


BUCKET_NAMES = ("0-63", "64-127", "128-255", "256-511", "512-1023", "1024-2047", "2048-4095", "4096+")
"""Names of the ranges of output positions."""
BUCKETS = len(BUCKET_NAMES)
_BUCKET_BEGINS = 64 << np.arange(BUCKETS - 1)
PRIOR = 0.6
"""Chance that a draft token is right where nothing is known."""
PRIOR_TRIES = 4.0
"""Tries for which a prior counts, such as that of a method for its requests: about one window."""


def bucket_of(positions: np.ndarray) -> np.ndarray:
    """The range of each output position."""
    return _BUCKET_BEGINS.searchsorted(positions, side="right")


class Acceptance:
    """Estimates for the rows of a table, shrunk to those of their method, and these to `PRIOR`."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.evidence = np.zeros((2, MAX_METHODS, BUCKETS))
        """`(2, methods, BUCKETS)`: hits and tries by range of output positions."""
        self.overall = np.zeros((5, MAX_METHODS))
        """`(5, methods)`: as `RequestTable.evidence`, and steps since the acceptance of the method changed."""

    def number(self, method: str) -> int:
        """Index of a method in the arrays, assigned at the first call for the method."""
        if method not in self.methods:
            self.methods.append(method)
        return self.methods.index(method)

    def of_method(self) -> np.ndarray:
        """`(methods, BUCKETS)`: chance that a token is right given that those before it are."""
        return _draw(self.evidence, _draw(self.overall, PRIOR)[:, None])

    def probability(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)`: the same chance for single requests at their output positions."""
        at_positions = self.of_method().take(bucket_of(table.committed[rows]), axis=1)
        return _draw(table.evidence.take(rows, axis=2), at_positions)

    def doubt(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """`(methods, rows)`: standard deviation of this estimate."""
        tries = self.overall[1][:, None] + table.evidence[1].take(rows, axis=1)
        chances = self.probability(table, rows)
        deviation: np.ndarray = np.sqrt(chances * (1.0 - chances) / (tries + PRIOR_TRIES))
        return deviation


def _draw(evidence: np.ndarray, prior: np.ndarray | float) -> np.ndarray:
    chances: np.ndarray = (evidence[0] + PRIOR_TRIES * prior) / (evidence[1] + PRIOR_TRIES)
    return chances


class RequestTable:
    """Requests and their drafts. Not thread-safe.

    A request has a row from `open` to `close`; a row is used again with a new `generation` (0: free). A drafter has a
    seat. Arrays, int32 if no other type is stated:

    - by row: number of `committed` output tokens, their maximum (`limit`), their ids (`output`, `(rows, capacity)`),
      and bool `begun`: it has been in a step, so drafters may be assigned;
    - by seat and row: bool `assigned`; `sent`: committed tokens sent to the drafter, -1: the request is not open there;
      `streamed`: sequence positions with hidden states that were sent;
      `base` of its newest tails, -1: none; `tail`, `(seats, rows, tails, window)`: the parts past the committed prefix,
      the one to verify first; their `length`, `(seats, rows, tails)`, 0 for none and where the drafter is not assigned;
    - by method and row, so that it outlasts a change of the drafter: `evidence`, float64 hits and tries of draft
      tokens, and of the newest ones (`_kernels._observe`);
    - `method` by seat; int64 `counts` (`COUNTS`) and `reached`, how often the 1st, 2nd, ... draft token of a
      tail was verified, and was right, until `StepMetrics` takes them.

    `window` and `branches`: most tokens of a tail, and most tails of a request beside the first one, that are kept.
    """

    def __init__(self, window: int, branches: int = 0) -> None:
        self.window, rows, seats = window, 32, 2
        self.requests: dict[int, TargetRequest] = {}
        self.generation, self.committed, self.limit = np.zeros((3, rows), np.int32)
        self.output, self.begun = np.zeros((rows, 256), np.int32), np.zeros(rows, np.bool_)
        self.assigned = np.zeros((seats, rows), np.bool_)
        self.sent, self.base, self.streamed = np.zeros((3, seats, rows), np.int32)
        self.length = np.zeros((seats, rows, 1 + branches), np.int32)
        self.tail = np.zeros((seats, rows, 1 + branches, window), np.int32)
        self.method = np.zeros(seats, np.int32)
        self.evidence = np.zeros((4, MAX_METHODS, rows))
        self.counts = np.zeros(len(COUNTS), np.int64)
        self.reached = np.zeros((2, window), np.int64)
        self._generations = 0
        self._free = list(range(rows))[::-1]

    def __len__(self) -> int:
        """Number of requests in the table."""
        return len(self.requests)

    @property
    def next_row(self) -> int:
        """The row that `open` will return next."""
        if not self._free:
            old = len(self.generation)
            grow(self, _BY_ROW, 2 * old)
            grow(self, _BY_SEAT, 2 * old, axis=1)
            grow(self, _BY_METHOD, 2 * old, axis=2)
            self._free = list(range(old, 2 * old))[::-1]
        return self._free[-1]

    def open(self, request: TargetRequest) -> int:
        """Assign a row to a request; returns the row."""
        row, known = self.next_row, len(request.committed_token_ids)
        self._free.pop()
        self._generations += 1
        self._fit(known)
        self.requests[row], self.generation[row] = request, self._generations
        self.committed[row], self.limit[row] = known, request.sampling.max_tokens
        self.output[row, :known] = request.committed_token_ids
        return row

    def close(self, row: int) -> None:
        """Free a row."""
        del self.requests[row]
        for name in _RESET:
            getattr(self, name)[..., row] = 0
        self.length[:, row] = 0
        self._free.append(row)

    def fit_seats(self, count: int) -> None:
        """Make room for this many drafters."""
        grow(self, (*_BY_SEAT, "method"), 1 << (count - 1).bit_length())

    def clear_seat(self, seat: int, method: int) -> None:
        """Reset a seat for a drafter of this method."""
        self.method[seat] = method
        self.assigned[seat], self.length[seat] = False, 0

    def assign(self, seat: int, row: int) -> None:
        """Assign the request to the drafter."""
        self.assigned[seat, row], self.length[seat, row] = True, 0
        self.sent[seat, row] = self.base[seat, row] = -1

    def release(self, seat: int, row: int) -> None:
        """End the assignment of the request to the drafter."""
        self.assigned[seat, row], self.length[seat, row] = False, 0

    def take(self, seat: int, tails: Any) -> np.ndarray:
        """Process a `TailBatch`. Returns bool `(n,)`: whether the tail's request is not assigned to the drafter."""
        arrays = (tails.rows, tails.generations, tails.bases, tails.lengths, tails.tokens)
        unknown: np.ndarray = _kernels.take_tails(seat, *arrays, _kernels.Planes(*_PLANES(self)))
        return unknown

    def commit(self, step: Committed, acceptance: Acceptance) -> None:
        """Append the committed tokens of a step, and compare the tails with them."""
        start = self.committed[step.rows]
        self._fit(int((start + step.counts).max(initial=0)))
        _kernels.commit(
            step, bucket_of(start), _kernels.Planes(*_PLANES(self)), acceptance.evidence, acceptance.overall
        )

    def unsent(self, seat: int, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Committed tokens that count as sent to the drafter from now on: lengths by row, and all tokens."""
        lengths: np.ndarray
        lengths, tokens = _kernels.unsent(np.asarray(rows, np.int32), self.sent[seat], self.committed, self.output)
        return lengths, tokens

    def _fit(self, tokens: int) -> None:
        """Make room for outputs of this many tokens and a tail."""
        if (tokens := tokens + self.window + 1) > self.output.shape[1]:
            grow(self, ("output",), 1 << (tokens - 1).bit_length(), axis=1)


_PLANES = operator.attrgetter(*_kernels.Planes._fields)
# Arrays that grow, by their first dimensions. An array that kernels use is named in `_kernels.Planes`, too.
_BY_ROW = ("generation", "committed", "begun", "limit", "output")
_BY_SEAT = ("assigned", "sent", "base", "streamed", "tail", "length")
_BY_METHOD = ("evidence",)
_RESET = ("generation", "begun", "assigned", *_BY_METHOD)
"""Arrays that are 0 in the row of a new request."""
