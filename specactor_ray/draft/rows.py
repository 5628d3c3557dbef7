"""Base classes of proposers: up to `max_batch` requests of a table are drafted for.

Other requests are answered with empty tails until a place is free. A user's own proposer derives from `RowProposer`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from specactor_ray.core.ragged import grow, places
from specactor_ray.draft.chains import BranchTable
from specactor_ray.draft.proposer import Failures, Proposer
from specactor_ray.table._kernels import UNCHANGED, moves
from specactor_ray.table.view import TableView
from specactor_ray.transport.messages import FinishedOutput


class BatchProposer(Proposer):
    """Implements `propose` by `extend`. `max_batch`, `branches`: most requests drafted for at once, and most branches
    of each."""

    _by_row: tuple[str, ...] = ("_generations", "_known", "_ends", "_placed", "_waiting", "_unanswered", "_cached")
    """Names of the arrays `(rows,)` that grow with the table, filled with 0."""
    required = (*Proposer.required, "branches")
    view: TableView
    """The view of the newest call."""

    def __init__(self, max_batch: int = 64, branches: int = 0) -> None:
        self.branches = BranchTable(branches)
        self.failures = Failures()
        """Failed guesses."""
        self._places, self._fitted = max_batch, (0, 0)
        """Number of free places; numbers of rows and tokens of a tail for which there is room."""
        self._seen: tuple[TableView | None, int] = None, 0
        """View and `RequestTable.changes` of the newest call."""
        self._generations, self._known, self._ends = np.zeros((3, 0), np.int32)
        """int32 `(rows,)`, by the newest call: generation of the request, 0 without one; tokens of line; of line and
        tail."""
        self._placed, self._waiting, self._unanswered = np.zeros((3, 0), np.bool_)
        """bool `(rows,)`: has a place; open without a place; has a commit that `extend` has not processed."""
        self._cached = np.zeros(0, np.int64)
        """int64 `(rows,)`: rows of the main chains in the drafter's cache; those of branches: `BranchTable.rows`."""

    @abc.abstractmethod
    def extend(self) -> np.ndarray:
        """Lengthen tails that have room; see `propose`."""

    def _enter(self, row: int) -> bool:
        """Take resources for a request. False: there are none now."""
        return True

    def _leave(self, row: int) -> None:
        """Free what `_enter` took; the row may have another request. Called for requests with a place only."""
        self._free(self.branches.release(row))

    def _free(self, rows: np.ndarray) -> None:
        """Free rows of the drafter's cache."""

    def _advance(self, rows: np.ndarray, same: np.ndarray) -> None:
        """Called for rows whose texts have changed, mostly by a commit. They are unchanged up to the token `same`, at
        most the newest one."""

    def propose(self, view: TableView, rows: np.ndarray) -> np.ndarray:
        self.view = view
        if self._seen != (seen := (view, view.table.changes)):
            self._seen = seen
            self._follow(rows)
        for states in view.states:
            self.add_features(states.rows, states.starts, states.lengths, states.states)
        view.states.clear()
        changed = self.extend()
        self.branches.publish(view, changed)
        self._ends[rows] = view.ends[rows]
        return changed

    def _follow(self, rows: np.ndarray) -> None:
        """Close requests that have left their rows, take the new commits of the others, and open new ones."""
        view, table = self.view, self.view.table
        if self._fitted != (sizes := (len(table.generation), view.window)):
            self._fit(sizes[0])
            self._fitted = sizes
        gone, moved, new = moves(self._generations, rows, table.generation, table.kept[view.seat])
        for row in gone.tolist():
            self._close(row)
        if self.traits.reads_features:  # a tail that was dropped without a commit has no states to be drafted again by
            is_cut = table.lengths[moved] == self._known[moved]
            for row in moved[is_cut].tolist():
                self._lose(row)
            moved = moved[~is_cut]
        if len(moved):
            if self.vocab_size is not None:
                for row in self._unreadable(moved, self._known[moved], self.vocab_size).tolist():
                    self._give_up(row)
            if self.branches.most:
                befores = self._known[moved], self._ends[moved]
                self._free(self.branches.settle(view, self._cached, moved, *befores))
            self._unanswered[moved] = True
            self._known[moved] = table.lengths[moved]
            kept = np.minimum(view.take_kept(moved), self._ends[moved])
            self._advance(moved, np.minimum(kept, view.ends[moved] - 1))  # the newest token is read for its logits
            for row in moved[self._waiting[moved]].tolist() if self._places else ():
                self._admit_late(row)
        for row in new.tolist():
            self._open(row)

    def _open(self, row: int) -> None:
        table = self.view.table
        table.kept[self.view.seat, row] = UNCHANGED
        self._generations[row], self._known[row] = table.generation[row], table.lengths[row]
        self._ends[row] = table.lengths[row]
        self._unanswered[row] = self._waiting[row] = True
        self._admit(row)

    def _close(self, row: int) -> None:
        try:
            self._give_up(row)
        finally:
            self._waiting[row] = self._unanswered[row] = False
            self._generations[row] = 0

    def reset(self) -> None:
        self._seen = None, 0
        for row in np.flatnonzero(self._generations).tolist():
            self._close(row)

    def _admit(self, row: int) -> None:
        """Give a waiting request a place, if one is free and the drafter's vocabulary has its tokens."""
        if not (self._places and self._waiting[row]):
            return
        one, size = np.array([row], np.int32), self.vocab_size
        if size is not None and len(self._unreadable(one, np.zeros_like(one), size)):
            self._waiting[row] = False  # further tokens do not change that
        elif self._enter(row):
            self._places -= 1
            self._placed[row], self._waiting[row] = True, False

    def _admit_late(self, row: int) -> None:
        """`_admit` after the opening; a reader of hidden states needs those that it has missed."""
        self._admit(row)
        if self._placed[row] and self.traits.reads_features:
            self._lose(row)

    def _unreadable(self, rows: np.ndarray, begins: np.ndarray, vocab_size: int) -> np.ndarray:
        """Rows with a token from index `begins` on, `(n,)`, that is not in the drafter's vocabulary: the embedding of
        a model may have fewer rows than the target's, which is padded further."""
        table = self.view.table
        if vocab_size >= table.vocab_size:
            return rows[:0]
        counts = table.lengths[rows] - begins
        owners = np.repeat(rows, counts)
        return np.unique(owners[table.lines[owners, places(begins, counts)] >= vocab_size])

    def _lose(self, row: int) -> None:
        """Close a request, and ask for it again with all its hidden states."""
        self._close(row)
        self._seen = None, 0
        self.view.lost.add(row)

    def _give_up(self, row: int) -> None:
        """Stop drafting for a request and free its place."""
        if self._placed[row]:
            self._placed[row] = False
            self._places += 1
            self._leave(row)

    def _fit(self, rows: int) -> None:
        """Make room for this many rows, and for the window."""
        grow(self, self._by_row, rows)
        self._free(self.branches.fit(rows, self.view.window))


class RowProposer(BatchProposer):
    """Base class of proposers that guess for one request at a time: a user's own (`drafters.N.method:
    package.module:Class`) and simple ones of the package.

    It implements `guess`. With the trait `looks_up` a commit leads to one call, else to calls until the window is full
    or the guess is empty. With `keeps_history` it also implements `finish`, which takes the finished outputs, and
    `forget_history`, which clears them.
    """

    def finish(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Take a finished output, its committed tokens alone, and its prompt, int32, with the trait `keeps_history`:
        see `learn`."""

    @abc.abstractmethod
    def guess(self, row: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int] | np.ndarray:
        """Guess the next tokens of an output: token ids, of which at most `room` (1 or more) are used.

        `prompt` is int32, and so is `output`: the committed tokens and the present tail of the request. So `output[-1]`
        may be a guess; `self.view.output(row)` has the committed tokens alone. The tokens are appended to the tail; a
        commit that disagrees with it removes it.
        """

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        for one in outputs if self.traits.keeps_history else ():
            self.finish(np.array(one.prompt_token_ids, np.int32), one.token_ids)

    def extend(self) -> np.ndarray:
        view, rows = self.view, np.flatnonzero(self._unanswered)
        self._unanswered[rows] = False
        for row in rows.tolist():
            tail = view.tail(row)
            room = view.room(row) - len(tail)
            if not self._placed[row] or room <= 0:
                continue
            try:
                found = self.guess(row, view.prompt(row), np.concatenate([view.output(row), tail]), room)
                view.write(row, np.concatenate([tail, np.asarray(found)]) if len(tail) else found)
            except Exception as error:  # noqa: BLE001 - a user's class failed; drafts affect speed only
                self.failures.add(f"{self.method}: no draft for request {view.request_id(row)}", error)
                view.write(row, ())
            else:
                self._unanswered[row] = not self.traits.looks_up and 0 < len(found) < room
        return rows.astype(np.int32)
