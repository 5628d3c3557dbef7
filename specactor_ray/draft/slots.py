"""Base classes of proposers: requests in a `MirrorTable`, up to `max_batch` of which are drafted for.

Other requests get empty tails on their commits until a place is free. A user's own proposer derives from `RowProposer`.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Sequence

import numpy as np

from specactor_ray.core.ragged import enlarged
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft import _kernels
from specactor_ray.draft.proposer import Failures, Proposer, Tails
from specactor_ray.transport.messages import FinishedOutput

_MOST = 2**31 - 1
_CLOSED = {"prompts": 0, "known": -1, "ends": -1, "windows": 0, "lasts": -1}
"""Values of a slot that is not open."""


class MirrorTable:
    """One line of tokens per slot: prompt, committed output, tail."""

    def __init__(self) -> None:
        self.lines = np.zeros((0, 0), np.int32)
        """int32 `(slots, width)` tokens; an open line has room for its committed tokens and a whole tail."""
        self.prompts, self.known, self.ends, self.windows, self.lasts = np.zeros((5, 0), np.int32)
        """int32 `(slots,)`: tokens of the prompt; of prompt and committed output (-1: not open); of these and the tail;
        most tokens of the tail; most tokens of prompt and output."""
        self.judged = np.zeros(2, np.int64)
        """See `Proposer.judged`."""
        self.arrays = _LINES(self)
        """All of these arrays, for kernels."""

    def is_open(self, slot: int) -> bool:
        return slot < len(self.known) and bool(self.known[slot] >= 0)

    @property
    def limits(self) -> np.ndarray:
        """int32 `(slots,)`: index in the line at which each tail ends at the latest; -1 where nothing is open."""
        limits: np.ndarray = np.minimum(self.known + self.windows, self.lasts)
        return limits

    def prompt(self, slot: int) -> np.ndarray:
        """The prompt, int32, a view."""
        return self.lines[slot, : self.prompts[slot]]

    def committed(self, slot: int) -> np.ndarray:
        """The final output tokens, int32, a view."""
        return self.lines[slot, self.prompts[slot] : self.known[slot]]

    def open(
        self, slot: int, prompt: Sequence[int], committed: Sequence[int], sampling: SamplingParams, window: int
    ) -> None:
        tokens = np.array([*prompt, *committed], np.int32)  # raises before any change
        begin, known = len(prompt), len(tokens)
        self._fit(slot + 1, known + window)
        self.lines[slot, :known] = tokens
        self.prompts[slot], self.windows[slot] = begin, window
        self.lasts[slot] = min(begin + sampling.max_tokens, _MOST)
        self.known[slot] = self.ends[slot] = known

    def close(self, slot: int) -> None:
        for name, closed in _CLOSED.items():
            getattr(self, name)[slot] = closed

    def commit(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Proposer.commit`; a tail that disagrees is dropped as a whole. Returns int32 `(n,)` each: the token up
        to which the line, tail included, is unchanged (-1: the commit does not fit); new output tokens."""
        # Copies: kernels are compiled for writable arrays, and those of a message may be read-only.
        slots, starts, lengths, tokens = (np.array(array, np.int32) for array in (slots, starts, lengths, tokens))
        self._fit(0, _kernels.reach(self.arrays, slots, starts, lengths, len(tokens)))
        same: np.ndarray
        same, fresh = _kernels.commit(self.arrays, slots, starts, lengths, tokens)
        return same, fresh

    def lengthen(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to a tail, up to its limit. Raises TypeError or ValueError if they are no int32 token ids."""
        tokens = np.asarray(tokens)
        if len(tokens) and tokens.dtype.kind not in "iu":
            raise TypeError(f"guesses are token ids, not {tokens.dtype}")
        begin = int(self.ends[slot])
        tokens = tokens[: max(int(self.limits[slot]) - begin, 0)]
        if len(tokens) and tokens.dtype != np.int32 and int(tokens.max()) > _MOST:
            raise ValueError(f"guesses are token ids, not {tokens.max()}")
        self.lines[slot, begin : begin + len(tokens)] = tokens
        self.ends[slot] = begin + len(tokens)

    def tails(self, slots: np.ndarray) -> Tails:
        return Tails(*_kernels.tails(self.arrays, np.asarray(slots, np.int32)))

    def _fit(self, slots: int, width: int) -> None:
        """Grow to at least `slots` lines of `width` tokens by doubling."""
        have, wide = self.lines.shape
        if slots <= have and width <= wide:
            return
        slots, width = _doubled(have, slots), _doubled(wide, width)
        old, self.lines = self.lines, np.zeros((slots, width), np.int32)
        for slot, end in enumerate(self.ends.tolist()):  # pages behind the ends stay untouched
            if end > 0:
                self.lines[slot, :end] = old[slot, :end]
        for name, closed in _CLOSED.items():
            setattr(self, name, enlarged(getattr(self, name), 0, slots))
            getattr(self, name)[have:] = closed
        self.arrays = _LINES(self)


_LINES = operator.attrgetter(*_kernels.Lines._fields)


def _doubled(have: int, wanted: int) -> int:
    return have if wanted <= have else 1 << (wanted - 1).bit_length()


@functools.cache
def _warm_up() -> None:
    """Compile or load the kernels."""
    table, zero = MirrorTable(), np.zeros(1, np.int32)
    table.open(0, (1,), (), SamplingParams(), 1)
    table.commit(zero, zero, zero, zero[:0])
    table.tails(zero)


class SlotProposer(Proposer):
    """Implements `Proposer` except `extend`. `max_batch`: most requests drafted for at once."""

    _by_slot: tuple[str, ...] = ("_placed", "_waiting", "_unanswered")
    """Names of the arrays `(slots,)` that grow with the table, filled with 0."""
    required = (*Proposer.required, "mirrors")

    def __init__(self, max_batch: int = 64) -> None:
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
        _warm_up()

    def _enter(self, slot: int, late: bool) -> bool:
        """Take resources for a request, at its `open` or, if `late`, at a commit. False: there are none now."""
        return True

    def _leave(self, slot: int) -> None:
        """Free what `_enter` took; the mirror is still open. Called for requests with a place only."""

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
        for name in self._by_slot:
            array = getattr(self, name)
            if len(array) < slots:
                setattr(self, name, enlarged(array, 0, slots))


class RowProposer(SlotProposer):
    """Base class of proposers that guess for one request at a time: a user's own (`drafters.N.method:
    package.module:Class`) and simple ones of the package.

    It implements `guess`. With the trait `looks_up` a commit leads to one call, else to calls until the window is full
    or the guess is empty. With `keeps_history` it also implements `finish`, which takes the finished outputs, and
    `forget_history`, which clears them.
    """

    def finish(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Take a finished output and its prompt, int32, with the trait `keeps_history`: those of the requests that this
        proposer has, also without a place, and where it is hosted those of other verifiers. Some may be lost."""

    @abc.abstractmethod
    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int] | np.ndarray:
        """Guess the next tokens of an output: token ids, of which at most `room` (1 or more) are used.

        `prompt` is int32, and so is `output`: the committed tokens and the present tail of the request. So `output[-1]`
        may be a guess; `self.mirrors.committed(slot)` has the committed tokens alone.
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
