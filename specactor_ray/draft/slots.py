"""Base classes of proposers: requests in a `MirrorTable`, up to `max_batch` of which are drafted for.

Other requests are mirrored, too, and get empty tails on their commits. Drafting for them begins at their first commit
at which a place is free.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from specactor_ray.core.ragged import enlarged
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.failures import Failures
from specactor_ray.draft.mirror import MirrorTable, warm_up
from specactor_ray.draft.proposer import Proposer, Tails


class SlotProposer(Proposer):
    """Implements `Proposer` except `extend`.

    Args:
        max_batch: Most requests drafted for at once, at least 1.

    Raises:
        ValueError: `max_batch` is out of range.
    """

    _by_slot: tuple[str, ...] = ("_placed", "_waiting", "_unanswered")
    """Names of the arrays `(slots,)` that grow with the table, filled with 0."""
    required = (*Proposer.required, "mirrors")

    def __init__(self, max_batch: int = 64) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch} (1 or more)")
        self.mirrors = MirrorTable()
        self.judged = self.mirrors.judged
        self.request_ids, self.samplings = dict[int, str](), dict[int, SamplingParams]()
        """Request id and sampling parameters of each open slot."""
        self.failures = Failures()
        """Failed guesses."""
        self._places = max_batch
        """Number of free places."""
        self._placed, self._waiting, self._unanswered = np.zeros((3, 0), np.bool_)
        """bool `(slots,)`: has a place; open without a place; has a commit that `extend` has not processed."""
        warm_up()

    def _enter(self, slot: int, late: bool) -> bool:
        """Take resources for a request, at its `open` or, if `late`, at a commit. False: there are none now."""
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        """Free what `_enter` took; the mirror is still open."""

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
        same, fresh = self.mirrors.commit(slots, starts, lengths, tokens)
        advanced = fresh > 0
        moved = slots[advanced]
        self._unanswered[moved] = True
        self._advance(moved, same[advanced])
        for slot in moved[self._waiting[moved]].tolist() if self._places else ():
            self._admit(slot, late=True)
        return same >= 0

    def tails(self, slots: np.ndarray) -> Tails:
        return self.mirrors.tails(slots)

    def close(self, slot: int, finished: bool) -> None:
        if not self.mirrors.is_open(slot):
            return
        try:
            self._give_up(slot, finished)
        finally:
            self._waiting[slot] = self._unanswered[slot] = False
            self.mirrors.close(slot)
            del self.request_ids[slot], self.samplings[slot]

    def _admit(self, slot: int, late: bool) -> None:
        """Give a waiting request a place, if one is free."""
        if self._places and self._waiting[slot] and self._enter(slot, late):
            self._places -= 1
            self._placed[slot], self._waiting[slot] = True, False

    def _give_up(self, slot: int, finished: bool = False) -> None:
        """Stop drafting for a request and free its place."""
        if self._placed[slot]:
            self._placed[slot] = False
            self._places += 1
            self._leave(slot, finished)

    def _fit(self, slots: int) -> None:
        for name in self._by_slot:
            array = getattr(self, name)
            if len(array) < slots:
                setattr(self, name, enlarged(array, 0, slots))


class RowProposer(SlotProposer):
    """Base class of a user's own proposer that implements `guess` for one request.

    With the trait `looks_up` a commit leads to one call of `guess`, else to calls until the window is full or the guess
    is empty.
    """

    @abc.abstractmethod
    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int] | np.ndarray:
        """Guess the next tokens of an output.

        Args:
            slot: Slot of the request.
            prompt: int32, its prompt.
            output: int32, its committed tokens and its present tail.
            room: Most tokens used, at least 1.

        Returns:
            Token ids; those beyond `room` are dropped.
        """

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
