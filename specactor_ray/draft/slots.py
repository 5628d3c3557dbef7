"""Base classes of proposers: requests in a `MirrorTable`, of which some are drafted for.

Requests beyond `max_batch` are mirrored, too. Their commits are answered with empty tails, so that no verifier waits
for drafts or opens them again; they are drafted for from the first of their commits at which a place is free.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence

import numpy as np

from specactor_ray.draft.mirror import MirrorTable, warm_up
from specactor_ray.draft.proposer import Proposer, Tails
from specactor_ray.messages import SamplingParams
from specactor_ray.ragged import enlarged

logger = logging.getLogger(__name__)


class SlotProposer(Proposer):
    """Implements `Proposer` but for `extend`.

    Args:
        max_batch: Most requests drafted for at once, at least 1.

    Raises:
        ValueError: `max_batch` is out of range.
    """

    _by_slot: tuple[str, ...] = ("_placed", "_waiting", "_unanswered")
    """Names of the arrays `(slots,)` that grow with the table; new slots begin with 0."""

    def __init__(self, max_batch: int = 64) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch} (1 or more)")
        self.mirrors = MirrorTable()
        self.request_ids, self.samplings = dict[int, str](), dict[int, SamplingParams]()
        """By open slot."""
        self._places = max_batch
        """Requests that may yet be drafted for."""
        self._placed, self._waiting, self._unanswered = np.zeros((3, 0), np.bool_)
        """Slots that are drafted for, that found no place, and whose newest commit `extend` has not answered."""
        warm_up()

    def _enter(self, slot: int, late: bool) -> bool:
        """There is a place for this request, at its `open` or `late`, at a commit. False: it cannot be used now."""
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        """Give back what `_enter` took. The mirror is still there."""

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        """These mirrors took new tokens; up to the token `same` their lines are what they were."""

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
        for slot in moved[self._waiting[moved]].tolist():
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
        """Draft for a request that waits, if there is a place."""
        if self._places and self._waiting[slot] and self._enter(slot, late):
            self._places -= 1
            self._placed[slot], self._waiting[slot] = True, False

    def _give_up(self, slot: int, finished: bool = False) -> None:
        """Draft no more for this request: another one may have its place."""
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
    """Goes from request to request: the base class of most proposers of a user's own, which implement `guess`.

    Where the traits say `looks_up` a commit is answered by one call of `guess`, else by calls until the window is full
    or nothing more is guessed: a model guesses a token per call.
    """

    @abc.abstractmethod
    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int] | np.ndarray:
        """Guess how an output goes on.

        Args:
            slot: The request.
            prompt: int32, its prompt.
            output: int32, its committed tokens and what was guessed after them so far.
            room: Most tokens wanted, at least 1.

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
            except Exception:
                logger.exception("%s: no draft for request %s", self.method, self.request_ids[slot])
                mirrors.ends[slot] = mirrors.known[slot]
            else:
                self._unanswered[slot] = not self.traits.looks_up and 0 < len(found) < room
        return slots.astype(np.int32)
