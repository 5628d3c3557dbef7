"""A drafter's view of a table of requests: it reads prompts and outputs, and writes tails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.table._kernels import UNCHANGED, Texts
from specactor_ray.table.table import RequestTable
from specactor_ray.transport.messages import FinishedOutput, States


class TableView:
    """The view of the drafter in a seat, with tails of up to `window` tokens, ids of which are below `vocab_size`.
    Arrays of `table` are for reading."""

    def __init__(self, table: RequestTable, seat: int, window: int, vocab_size: int | None = None) -> None:
        self.table, self.seat, self.window = table, seat, window
        self.vocab_size = table.vocab_size if vocab_size is None else min(vocab_size, table.vocab_size)
        self.states: list[States] = []
        """Hidden states since the drafter's last turn, for drafters with the trait `reads_features`."""
        self.lost: set[int] = set()
        """Rows whose hidden states the drafter needs again from the first position on."""

    # ---- one request ----

    def prompt(self, row: int) -> np.ndarray:
        """The prompt, int32, read-only."""
        return _read_only(self.table.lines[row, : self.table.prompts[row]])

    def output(self, row: int) -> np.ndarray:
        """The committed output tokens, int32, read-only."""
        return _read_only(self.table.output(row))

    def tail(self, row: int) -> np.ndarray:
        """The present draft tokens, int32, read-only: those that no commit has refuted."""
        return _read_only(self.table.tail[self.seat, row, 0, : self.table.length[self.seat, row, 0]])

    def room(self, row: int) -> int:
        """Number of tokens that the tail may have in all, present ones included."""
        return max(min(self.window, int(self.table.limits[row] - self.table.lengths[row])), 0)

    def write(self, row: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Replace the tail by these token ids, of which the first `room` are used. TypeError or ValueError: they are
        no token ids. A draft actor has the vocabulary only if `Proposer.vocab_size` is set; else a message with an id
        outside the target's vocabulary is dropped by the verifier."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise TypeError(f"draft tokens are a list of token ids, not {tokens.dtype} {tokens.shape}")
        tokens = tokens[: self.room(row)]
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"draft tokens are ids below {self.vocab_size}, not {tokens.min()} to {tokens.max()}")
        self.table.length[self.seat, row] = 0
        self.table.tail[self.seat, row, 0, : len(tokens)] = tokens
        self.table.length[self.seat, row, 0] = len(tokens)

    def sampling(self, row: int) -> SamplingParams:
        """The sampling parameters of a row's request."""
        return self.table.requests[row].sampling

    def request_id(self, row: int) -> str:
        """Id of the request of a row; empty for a free row."""
        request = self.table.requests.get(row)
        return "" if request is None else request.request_id

    def finished(self, row: int) -> FinishedOutput:
        """The output of a row and its prompt, for the histories of drafters; a copy."""
        request = self.table.requests[row]
        return FinishedOutput(request.request_id, request.prompt_token_ids, self.table.output(row).copy())

    def forget(self, row: int) -> None:
        """Drop the hidden states of a request that leaves its row before they are read."""
        for at, states in enumerate(self.states):
            if row in states.rows:
                kept = states.rows != row
                values = states.states[np.flatnonzero(np.repeat(kept, states.lengths))]
                self.states[at] = States(states.rows[kept], states.starts[kept], states.lengths[kept], values)
        self.lost.discard(row)

    # ---- all requests ----

    @property
    def texts(self) -> tuple[np.ndarray | int, ...]:
        """The arrays for kernels, in the order of `Texts`."""
        table, seat = self.table, self.seat
        shared = table.lines, table.prompts, table.lengths, table.limits
        return *shared, table.length[seat], table.tail[seat], table.kept[seat], self.window

    @property
    def ends(self) -> np.ndarray:
        """int32 `(rows,)`: number of tokens of line and first tail."""
        ends: np.ndarray = self.table.lengths + self.table.length[self.seat, :, 0]
        return ends

    @property
    def limits(self) -> np.ndarray:
        """int32 `(rows,)`: number of tokens of line and tail at most."""
        limits: np.ndarray = np.minimum(self.table.lengths + self.window, self.table.limits)
        return limits

    def take_kept(self, rows: np.ndarray) -> np.ndarray:
        """int32 `(n,)`: number of tokens of line and first tail of each row that no commit has changed since the last
        call for the row."""
        kept: np.ndarray = self.table.kept[self.seat, rows]
        self.table.kept[self.seat, rows] = UNCHANGED
        return kept

    def clear(self) -> None:
        """Drop all tails of the drafter."""
        self.table.length[self.seat] = 0
        self.states.clear()


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False  # of this view
    return array


__all__ = ["TableView", "Texts"]
