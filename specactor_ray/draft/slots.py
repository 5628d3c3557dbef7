"""Base classes of proposers: requests in a `MirrorTable`, up to `max_batch` of which are drafted for.

Other requests get empty tails on their commits until a place is free. A user's own proposer derives from `RowProposer`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from specactor_ray.core.ragged import grow
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.chains import BranchTable, MirrorTable, compile_kernels
from specactor_ray.draft.proposer import Failures, Proposer, Tails
from specactor_ray.transport.messages import FinishedOutput


class SlotProposer(Proposer):
    """Implements `Proposer` except `extend`. `max_batch`, `branches`: most requests drafted for at once, and most
    branches of each."""

    _by_slot: tuple[str, ...] = ("_placed", "_waiting", "_unanswered", "_rows")
    """Names of the arrays `(slots,)` that grow with the table, filled with 0."""
    required = (*Proposer.required, "mirrors")

    def __init__(self, max_batch: int = 64, branches: int = 0) -> None:
        self.mirrors = MirrorTable()
        self.branches = BranchTable(self.mirrors, branches)
        self.judged = self.mirrors.judged
        self.request_ids, self.samplings = dict[int, str](), dict[int, SamplingParams]()
        """Request id and sampling parameters of each open slot."""
        self.failures = Failures()
        """Failed guesses."""
        self._places = max_batch
        """Number of free places."""
        self._placed, self._waiting, self._unanswered = np.zeros((3, 0), np.bool_)
        """bool `(slots,)`: has a place; open without a place; has a commit that `extend` has not processed."""
        self._rows = np.zeros(0, np.int64)
        """int64 `(slots,)`: rows of the main chains in the drafter's cache; those of branches: `BranchTable.rows`."""
        compile_kernels(branches=False)

    def _enter(self, slot: int, late: bool) -> bool:
        """Take resources for a request, at its `open` or, if `late`, at a commit. False: there are none now."""
        return True

    def _leave(self, slot: int) -> None:
        """Free what `_enter` took; the mirror is still open. Called for requests with a place only."""
        self._free(self.branches.release(slot))

    def _free(self, rows: np.ndarray) -> None:
        """Free rows of the drafter's cache."""

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        """Called after `commit` for slots with new tokens; their lines are unchanged up to the token `same`."""

    def open(
        self,
        slot: int,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self.close(slot, finished=False)
        self.mirrors.open(slot, prompt_token_ids, committed_token_ids, sampling, window)
        self._fit(len(self.mirrors.known))
        self.request_ids[slot], self.samplings[slot] = request_id, sampling
        self._unanswered[slot] = self._waiting[slot] = True
        self._admit(slot, late=False)

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if self.branches.most:
            self._free(self.branches.settle(self._rows, slots, starts, lengths, tokens))
        same, fresh = self.mirrors.commit(slots, starts, lengths, tokens)
        advanced = fresh > 0
        moved = slots[advanced]
        self._unanswered[moved] = True
        self._advance(moved, same[advanced])
        for slot in moved[self._waiting[moved]].tolist() if self._places else ():
            self._admit(slot, late=True)
        return same >= 0

    def tails(self, slots: np.ndarray) -> Tails:
        return self.branches.tails(slots)

    def close(self, slot: int, finished: bool) -> None:
        if not self.mirrors.is_open(slot):
            return
        try:
            self._give_up(slot)
        finally:
            self._waiting[slot] = self._unanswered[slot] = False
            self.mirrors.close(slot)
            del self.request_ids[slot], self.samplings[slot]

    def _admit(self, slot: int, late: bool) -> None:
        """Give a waiting request a place, if one is free."""
        if self._places and self._waiting[slot] and self._enter(slot, late):
            self._places -= 1
            self._placed[slot], self._waiting[slot] = True, False

    def _give_up(self, slot: int) -> None:
        """Stop drafting for a request and free its place."""
        if self._placed[slot]:
            self._placed[slot] = False
            self._places += 1
            self._leave(slot)

    def _fit(self, slots: int) -> None:
        """Make room for this many slots, and for the longest window."""
        grow(self, self._by_slot, slots)
        self._free(self.branches.fit(slots, int(self.mirrors.windows.max(initial=1))))


class RowProposer(SlotProposer):
    """Base class of proposers that guess for one request at a time: a user's own (`drafters.N.method:
    package.module:Class`) and simple ones of the package.

    It implements `guess`. With the trait `looks_up` a commit leads to one call, else to calls until the window is full
    or the guess is empty. With `keeps_history` it also implements `finish`, which takes the finished outputs, and
    `forget_history`, which clears them.
    """

    def finish(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Take a finished output, its committed tokens alone, and its prompt, int32, with the trait `keeps_history`:
        those of the requests that this proposer has, also without a place, and where it is hosted those of up to seven
        other verifiers. Some may be lost."""

    @abc.abstractmethod
    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int] | np.ndarray:
        """Guess the next tokens of an output: token ids, of which at most `room` (1 or more) are used.

        `prompt` is int32, and so is `output`: the committed tokens and the present tail of the request. So `output[-1]`
        may be a guess; `self.mirrors.committed(slot)` has the committed tokens alone. The tokens are appended to the
        tail; a commit that disagrees with it removes it.
        """

    def close(self, slot: int, finished: bool) -> None:
        try:
            if finished and self.traits.keeps_history and self.mirrors.is_open(slot):
                self.finish(self.mirrors.prompt(slot).copy(), self.mirrors.committed(slot).copy())
        finally:
            super().close(slot, finished)

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        for one in outputs if self.traits.keeps_history else ():
            self.finish(np.array(one.prompt_token_ids, np.int32), one.token_ids)

    def extend(self) -> np.ndarray:
        mirrors, slots = self.mirrors, np.flatnonzero(self._unanswered)
        rooms = (mirrors.limits - mirrors.ends)[slots]
        self._unanswered[slots] = False
        for slot, room in zip(slots.tolist(), rooms.tolist(), strict=True):
            if not self._placed[slot] or room <= 0:
                continue
            begin, end = mirrors.prompts[slot], mirrors.ends[slot]
            try:
                found = self.guess(slot, mirrors.prompt(slot), mirrors.lines[slot, begin:end], room)
                mirrors.lengthen(slot, found)
            except Exception as error:  # noqa: BLE001 - a user's class failed; drafts affect speed only
                self.failures.add(f"{self.method}: no draft for request {self.request_ids[slot]}", error)
                mirrors.ends[slot] = mirrors.known[slot]
            else:
                self._unanswered[slot] = not self.traits.looks_up and 0 < len(found) < room
        return slots.astype(np.int32)
