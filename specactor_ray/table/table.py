"""The table of requests: the tokens of each request, and the draft tails of each drafter."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from specactor_ray.config.schema import MAX_METHODS
from specactor_ray.core.ragged import grow, places
from specactor_ray.sampling.rules import Rules
from specactor_ray.table import _kernels
from specactor_ray.table._kernels import Committed
from specactor_ray.table.requests import COUNTS, Finish, TargetRequest, refuse_impossible

ANY = 2**31 - 1
_FIRST_ROWS = 32


class RequestTable:
    """Requests of one target engine: a structure of arrays. Not thread-safe.

    The engine appends what it commits, drafters write tails, and the verifier compares them. A request has a row from
    `open` to `close`; a row is used again with a new `generation` (0: free). A drafter has a seat. Arrays, int32 if no
    other type is stated:

    - by row: `lines`, `(rows, width)`: prompt and committed output; `prompts`: number of prompt tokens; `lengths`:
      number of prompt and output tokens; `limits`: largest length, by max_tokens and by the context; `exported`: number
      of positions whose hidden states were recorded (`target.rows.export`); bool `begun`: the request has been in a
      step, so drafters may be assigned;
    - by seat and row: bool `assigned`; `sent`: committed tokens sent to the drafter, -1: the request is not open there;
      `streamed`: sequence positions with hidden states that were sent; `base` of its newest tails, -1: none; `kept`:
      number of tokens of line and first tail that no commit has changed since the drafter's last turn (`UNCHANGED`:
      all); `tail`, `(seats, rows, tails, window)`: the parts past the committed prefix, the one to verify first; their
      `length`, `(seats, rows, tails)`, 0 for none and where the drafter is not assigned;
    - by method and row, so that it outlasts a change of the drafter: `evidence`, float64 hits and tries of draft
      tokens, and of the newest ones (`_kernels._observe`);
    - `method` by seat, and int64 `judged`, `(seats, 2)`: draft tokens of first tails that commits tested after right
      ones, and how many were right;
    - int64 `counts` (`COUNTS`) and `reached`, how often the 1st, 2nd, ... draft token of a tail was verified, and was
      right, until `StepMetrics` takes them.

    `changes` counts openings, commits, assignments and closings. `eos_token_ids` end outputs of requests that do not
    ignore them; `device`: of the sampling `rules` (by row, with positions in the sequence); for `window` and `branches`
    see `fit_tails`.
    """

    def __init__(
        self,
        window: int = 1,
        branches: int = 0,
        *,
        vocab_size: int = ANY,
        max_model_len: int = ANY,
        eos_token_ids: Collection[int] = (),
        device: Any = None,
    ) -> None:
        rows, seats = _FIRST_ROWS, 2
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.eos_token_ids = np.array(sorted(eos_token_ids), np.int64)
        self.requests: dict[int, TargetRequest] = {}
        """Row → its request, in the order of `open`."""
        self.row_of: dict[str, int] = {}
        """Request id → row."""
        self.stops: dict[int, Sequence[int]] = {}
        """Row → its own stop ids, if it has any."""
        self.rules = Rules(rows, device)
        self.generation, self.prompts, self.lengths, self.limits, self.exported = np.zeros((5, rows), np.int32)
        self.lines = np.zeros((rows, 256), np.int32)
        self.begun, self.minds_eos = np.zeros((2, rows), np.bool_)
        self.assigned = np.zeros((seats, rows), np.bool_)
        self.sent, self.base, self.streamed, self.kept = np.zeros((4, seats, rows), np.int32)
        self.method, self.judged = np.zeros(seats, np.int32), np.zeros((seats, 2), np.int64)
        self.evidence = np.zeros((4, MAX_METHODS, rows))
        self.counts = np.zeros(len(COUNTS), np.int64)
        self.changes = self._generations = 0
        self._free = list(range(rows))  # a heap: the lowest one is taken
        self.fit_tails(window, branches)

    def __len__(self) -> int:
        """Number of requests in the table."""
        return len(self.requests)

    @property
    def committed(self) -> np.ndarray:
        """int32 `(rows,)`: number of committed output tokens."""
        committed: np.ndarray = self.lengths - self.prompts
        return committed

    def output(self, row: int) -> np.ndarray:
        """The committed output tokens of a row, int32, a view."""
        return self.lines[row, self.prompts[row] : self.lengths[row]]

    # ---- requests ----

    def open(self, request: TargetRequest) -> int:
        """Assign the lowest free row to a request; returns the row. InputError: the request can never run."""
        refuse_impossible(request, self.vocab_size, self.max_model_len)
        sampling, prompt, known = request.sampling, len(request.prompt_token_ids), len(request.committed_token_ids)
        if not self._free:
            self._fit_rows(2 * len(self.generation))
        row, known = heapq.heappop(self._free), prompt + known
        self._fit_lines(known)
        self._generations += 1
        self.changes += 1
        self.requests[row], self.row_of[request.request_id] = request, row
        self.generation[row] = self._generations
        self.lines[row, :prompt], self.lines[row, prompt:known] = request.prompt_token_ids, request.committed_token_ids
        self.prompts[row], self.lengths[row] = prompt, known
        self.limits[row] = min(prompt + sampling.max_tokens, self.max_model_len)
        self.minds_eos[row] = not sampling.ignore_eos
        if sampling.stop_token_ids:
            self.stops[row] = sampling.stop_token_ids
        self.rules.write([row], [sampling], [-prompt])
        return row

    def end_of(self, row: int) -> Finish | None:
        """The end of a request that its committed tokens end when it is opened; None: it can go on."""
        if self.lengths[row] == self.prompts[row]:
            return None
        last = self.lines[row, self.lengths[row] - 1]
        if last in self.stops.get(row, ()) or (self.minds_eos[row] and last in self.eos_token_ids):
            return Finish.STOP
        return Finish.LENGTH if self.lengths[row] >= self.limits[row] else None

    def append(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Commit tokens, `counts` of each row, int32 `(n,)`, row by row."""
        self.changes += 1
        before = self.lengths[rows]
        self.lengths[rows] = after = before + counts
        self._fit_lines(int(after.max(initial=0)))
        self.lines[np.repeat(rows, counts), places(before, counts)] = tokens

    def close(self, row: int) -> None:
        """Free a row."""
        self.changes += 1
        request_id = self.requests.pop(row).request_id
        if self.row_of.get(request_id) == row:
            del self.row_of[request_id]
        self.stops.pop(row, None)
        for name in _RESET:
            getattr(self, name)[..., row] = 0
        self.length[:, row] = 0
        heapq.heappush(self._free, row)

    def clear(self) -> None:
        """Close all requests."""
        for row in list(self.requests):
            self.close(row)

    # ---- drafters ----

    def fit_tails(self, window: int, branches: int) -> None:
        """Keep up to `window` tokens of a tail, and `branches` tails of a request beside the first one. Tails end."""
        seats, rows = self.assigned.shape
        self.window = window
        self.length = np.zeros((seats, rows, 1 + branches), np.int32)
        self.tail = np.zeros((seats, rows, 1 + branches, window), np.int32)
        self.reached = np.zeros((2, window), np.int64)
        np.minimum(self.kept, self.lengths, out=self.kept)

    def fit_seats(self, count: int) -> None:
        """Make room for this many drafters."""
        grow(self, (*_BY_SEAT, "method", "judged"), 1 << (count - 1).bit_length())

    def clear_seat(self, seat: int, method: int) -> None:
        """Reset a seat for a drafter of this method."""
        self.method[seat], self.judged[seat] = method, 0
        self.assigned[seat], self.length[seat] = False, 0

    def assign(self, seat: int, row: int) -> None:
        """Assign the request to the drafter."""
        self.changes += 1
        self.assigned[seat, row], self.length[seat, row] = True, 0
        self.kept[seat, row] = min(self.kept[seat, row], self.lengths[row])
        self.sent[seat, row] = self.base[seat, row] = -1

    def release(self, seat: int, row: int) -> None:
        """End the assignment of the request to the drafter."""
        self.changes += 1
        self.assigned[seat, row], self.length[seat, row] = False, 0

    def take(self, seat: int, tails: Any) -> np.ndarray:
        """Process a `TailBatch`. Returns bool `(n,)`: whether the tail's request is not assigned to the drafter."""
        arrays = (tails.rows, tails.generations, tails.bases, tails.lengths, tails.tokens)
        unknown: np.ndarray = _kernels.take_tails(seat, *arrays, self._arrays)
        return unknown

    def settle(self, step: Committed, ranges: np.ndarray, evidence: np.ndarray, overall: np.ndarray) -> None:
        """Compare the tails with the newest tokens of the rows of a step; see `_kernels.settle`."""
        _kernels.settle(step, ranges, self._arrays, evidence, overall)

    def follow(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Take output tokens that another table has committed, idempotently: int32 `(n,)` each, rows, output positions
        of the first tokens, lengths; and all tokens. Returns bool `(n,)`: False, and nothing is taken, where the row is
        free, tokens before the start are missing (a gap), or tokens contradict committed ones."""
        arrays = [np.array(one, np.int32) for one in (rows, starts, lengths, tokens)]  # those of messages are read-only
        ends = self.prompts[arrays[0]] + arrays[1]
        ends = np.minimum(ends, self.lengths[arrays[0]]) + arrays[2]
        self._fit_lines(int(ends.max(initial=0)))
        self.changes += 1
        taken: np.ndarray = _kernels.follow(*arrays, self._arrays)
        return taken

    def publish(self, seat: int, rows: np.ndarray) -> None:
        """Mark rows as answered by a drafter of this process; tails end before tokens outside the vocabulary."""
        _kernels.publish(seat, rows, self.vocab_size, self._arrays)

    def tails(self, seat: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number of tails of each row, at least 1, as an empty first one counts; lengths of these tails, the one to
        verify first ahead; and all their tokens. int32."""
        counts, lengths, tokens = _kernels.collect(seat, rows, self._arrays)
        return counts, lengths, tokens

    def unsent(self, seat: int, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Committed tokens that count as sent to the drafter from now on: lengths by row, and all tokens."""
        arrays = self.sent[seat], self.prompts, self.lengths, self.lines
        lengths: np.ndarray
        lengths, tokens = _kernels.unsent(np.asarray(rows, np.int32), *arrays)
        return lengths, tokens

    # ---- room ----

    @property
    def _arrays(self) -> _kernels.TableArrays:
        return _kernels.TableArrays(*_ARRAYS(self))

    def _fit_rows(self, rows: int) -> None:
        old = len(self.generation)
        grow(self, _BY_ROW, rows)
        grow(self, _BY_SEAT, rows, axis=1)
        grow(self, _BY_METHOD, rows, axis=2)
        self._free = list(range(old, rows))

    def _fit_lines(self, tokens: int) -> None:
        if tokens > self.lines.shape[1]:
            grow(self, ("lines",), 1 << (tokens - 1).bit_length(), axis=1)


_ARRAYS = operator.attrgetter(*_kernels.TableArrays._fields)
# Arrays that grow, by their first dimensions. An array that kernels use is named in `_kernels.TableArrays`, too.
_BY_ROW = ("generation", "prompts", "lengths", "limits", "exported", "lines", "begun", "minds_eos")
_BY_SEAT = ("assigned", "sent", "base", "streamed", "kept", "tail", "length")
_BY_METHOD = ("evidence",)
_RESET = ("generation", "exported", "begun", "assigned", *_BY_METHOD)
"""Arrays that are 0 in the row of a new request."""
