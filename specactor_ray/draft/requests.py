"""Open requests of a draft actor: a replica of their rows, kept by messages of verifiers, and its tails for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.ragged import grow
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, DraftOpen, States, TailBatch

_NONE = -1
_SEAT = 0
"""The drafter's seat in the replica."""


@dataclass(slots=True, eq=False)
class _Verifier:
    """A verifier with open requests."""

    number: int
    """Number of the verifier in `DraftRequests`; never reused."""
    session: int
    """The verifier's newest session; see `CommitBatch`."""
    rows: np.ndarray = field(default_factory=lambda: np.full(1, _NONE, np.int32))
    """Row of the verifier → row of the replica; the last entry has none."""
    lost: dict[int, int] = field(default_factory=dict)
    """Rows of the verifier to open again → generation."""


class DraftRequests:
    """A table of the requests of all verifiers. Not thread-safe.

    A *handle* is a row and a generation of a verifier; rows without that name are those of the replica.
    """

    def __init__(self, runner: DraftRunner) -> None:
        self._runner, proposer = runner, runner.proposer
        branches = getattr(getattr(proposer, "branches", None), "most", 0)
        self.table = RequestTable(1, branches)
        self.view = TableView(self.table, _SEAT, 1, proposer.vocab_size)
        self._verifiers: dict[str, _Verifier] = {}
        self._next_number = 0
        self._owners, self._handles, self._generations = np.full((3, len(self.table.generation)), _NONE, np.int32)
        """int32 `(rows,)`: number of the verifier, its row and generation."""
        self._changed = np.zeros(len(self._owners), np.bool_)
        """bool `(rows,)`: whether the tail must be sent."""

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self.table)

    @property
    def rows(self) -> np.ndarray:
        """int32 `(n,)`: rows of the open requests."""
        return np.flatnonzero(self._owners != _NONE).astype(np.int32)

    # ---- messages ----

    def take(self, message: CommitBatch) -> None:
        """Apply a message; one of an old session is ignored."""
        verifier = self._verifiers.get(message.verifier_id)
        if verifier is None or message.session > verifier.session:
            self._drop(message.verifier_id)
            verifier = self._verifiers[message.verifier_id] = _Verifier(self._next_number, message.session)
            self._next_number += 1
        elif message.session < verifier.session:
            return
        self._follow(verifier, message)
        for handle, generation, finished in message.closed:
            (row,) = self._find(verifier, np.array([handle]), np.array([generation]))
            self._close(int(row), finished)
        for opened in message.opened:
            self._open(verifier, opened)
        if message.states is not None:
            self._add_states(verifier, message, message.states)

    def _find(self, verifier: _Verifier, handles: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Rows of handles, int32; `_NONE` where nothing is open."""
        rows: np.ndarray = verifier.rows[np.minimum(handles, len(verifier.rows) - 1)]
        rows[self._generations[rows] != generations] = _NONE
        return rows

    def _open(self, verifier: _Verifier, opened: DraftOpen) -> None:
        self._runner.counters["opens"] += 1
        handle, request_id = opened.row, opened.request_id
        if handle >= len(verifier.rows) - 1:
            grow(verifier, ("rows",), 2 * handle + 2, fill=_NONE)
        # The row's last request has ended, finished or not; the new one may have moved here from another row.
        self._close(int(verifier.rows[handle]))
        self._close(self.table.row_of.get(request_id, _NONE))
        verifier.lost.pop(handle, None)
        if opened.window > self.table.window:
            self.table.fit_tails(opened.window, self.table.length.shape[2] - 1)
        self.view.window = self.table.window
        request = TargetRequest(request_id, opened.prompt_token_ids, opened.sampling, opened.committed_token_ids)
        try:
            row = self.table.open(request)
        except (InputError, OverflowError) as error:
            self._runner.failures.add(f"{self._runner.drafter_id}: request {request_id} cannot be drafted for", error)
            return
        grow(self, ("_owners", "_handles", "_generations"), len(self.table.generation), fill=_NONE)
        grow(self, ("_changed",), len(self.table.generation))
        verifier.rows[handle] = row
        self._owners[row], self._handles[row], self._generations[row] = verifier.number, handle, opened.generation

    def _follow(self, verifier: _Verifier, message: CommitBatch) -> None:
        rows = self._find(verifier, message.rows, message.generations)
        known = rows != _NONE
        if known.any():
            tokens = message.tokens[np.repeat(known, message.lengths)]
            known[known] = self.table.follow(rows[known], message.starts[known], message.lengths[known], tokens)
        for index in np.flatnonzero(~known).tolist():
            verifier.lost[int(message.rows[index])] = int(message.generations[index])

    def _add_states(self, verifier: _Verifier, message: CommitBatch, states: States) -> None:
        """Pass on hidden states of requests that the message opened or committed to."""
        handles = dict(zip(message.rows.tolist(), message.generations.tolist(), strict=True))
        handles |= {opened.row: opened.generation for opened in message.opened}
        generations = np.array([handles.get(row, _NONE) for row in states.rows.tolist()], np.int32)
        rows, lengths, values = self._find(verifier, states.rows, generations), states.lengths, states.states
        lost = [verifier.lost.get(row, _NONE) for row in states.rows.tolist()]
        taken = (rows != _NONE) & (generations != lost)  # else it has missed a commit
        if not taken.all():
            values = values[np.flatnonzero(np.repeat(taken, lengths))]
        if taken.any():
            from specactor_ray.models.weight_buckets import from_wire

            self.view.states.append(States(rows[taken], states.starts[taken], lengths[taken], from_wire(values)))

    # ---- closing ----

    def _close(self, row: int, finished: bool = False) -> None:
        """Close a row, if it is open. `finished`: whether its output is complete."""
        table = self.table
        if row not in table.requests:
            return
        if finished and self._runner.proposer.traits.keeps_history:
            self._runner.learn([self.view.finished(row)])
        table.close(row)
        self.view.forget(row)
        for verifier in self._verifiers.values():
            if verifier.number == self._owners[row]:
                verifier.rows[self._handles[row]] = _NONE
        self._owners[row] = self._generations[row] = _NONE
        self._changed[row] = False

    def _drop(self, verifier_id: str) -> None:
        """Close all requests of a verifier."""
        if (verifier := self._verifiers.get(verifier_id)) is not None:
            for row in np.flatnonzero(self._owners == verifier.number).tolist():
                self._close(row)
            del self._verifiers[verifier_id]

    def _lose(self) -> None:
        """Close requests that the drafter needs again from their beginning."""
        for row in sorted(self.view.lost):
            for verifier in self._verifiers.values():
                if row in self.table.requests and verifier.number == self._owners[row]:
                    verifier.lost[int(self._handles[row])] = int(self._generations[row])
                    self._close(row)
        self.view.lost.clear()

    # ---- tails ----

    def publish(self, changed: np.ndarray, links: Mapping[str, Link[TailBatch]], token_s: float) -> None:
        """Offer the tails of changed rows to their verifiers; a busy link sends them later.

        Requests of verifiers that are not in `links` are dropped. If the list with a verifier arrives after the
        verifier's messages, its next commits are of unknown requests, which it opens again.
        """
        self._lose()
        self._changed[changed] = self._owners[changed] != _NONE
        rows = np.flatnonzero(self._changed).astype(np.int32)
        owners = self._owners[rows]
        numbers = set(owners.tolist())
        for verifier_id, verifier in list(self._verifiers.items()):
            link = links.get(verifier_id)
            if link is None:
                self._drop(verifier_id)
            elif verifier.number in numbers or verifier.lost:
                mine = rows if numbers == {verifier.number} else rows[owners == verifier.number]
                link.offer(functools.partial(self._tails, verifier, mine, token_s))

    def _tails(self, verifier: _Verifier, rows: np.ndarray, token_s: float) -> TailBatch:
        """Whole tails of a verifier's changed rows."""
        self._changed[rows] = False
        lost, verifier.lost = verifier.lost, {}
        counts, lengths, tokens = self.table.tails(_SEAT, rows)
        owners, counters = np.repeat(rows, counts), self._runner.counters
        counters["tails"] += len(rows)
        counters["branches"] += len(owners) - len(rows)
        counters["resyncs"] += len(lost)
        handles, bases = (self._handles[owners], self._generations[owners]), self.table.committed[owners]
        return TailBatch(self._runner.drafter_id, *handles, bases, lengths, tokens, token_s, tuple(lost.items()))
