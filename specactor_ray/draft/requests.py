"""Open requests of a draft actor: messages of verifiers to the proposer, and its tails to the verifiers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specactor_ray.core.ragged import grow
from specactor_ray.draft.proposer import Failures, Proposer
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, DraftOpen, States, TailBatch

_NONE = -1


@dataclass(slots=True, eq=False)
class _Verifier:
    """A verifier with open requests."""

    number: int
    """Number of the verifier in `DraftRequests`; never reused."""
    session: int
    """The verifier's newest session; see `CommitBatch`."""
    slots: np.ndarray = field(default_factory=lambda: np.full(1, _NONE, np.int32))
    """Row → slot; the last entry has none."""
    lost: dict[int, int] = field(default_factory=dict)
    """Rows to open again → generation."""


class DraftRequests:
    """Applies messages of verifiers to the proposer and assigns its slots. Not thread-safe."""

    def __init__(self, drafter_id: str, proposer: Proposer) -> None:
        self.counters = dict.fromkeys(("opens", "resyncs", "extends", "tails", "branches"), 0)
        """Totals, those of the loop included."""
        self.failures = Failures()
        """Failed requests and steps."""
        self._drafter_id, self._proposer = drafter_id, proposer
        self._verifiers: dict[str, _Verifier] = {}
        self._next_number = 0
        self._slots: dict[str, int] = {}
        """Request → slot."""
        self._open: dict[int, tuple[str, _Verifier]] = {}
        """Slot → request and its verifier."""
        self._free: list[int] = []
        self._owners, self._rows, self._generations = np.full((3, 1), _NONE, np.int32)
        """int32 `(slots,)`: number of the verifier, row and generation; the last slot stays free."""
        self._changed = np.zeros(1, np.bool_)
        """bool `(slots,)`: whether the tail must be sent."""

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._open)

    # ---- messages ----

    def take(self, message: CommitBatch) -> None:
        """Apply a message; one of an old session is ignored. A failure drops only its request."""
        verifier = self._verifiers.get(message.verifier_id)
        if verifier is None or message.session > verifier.session:
            self._drop(message.verifier_id)
            verifier = self._verifiers[message.verifier_id] = _Verifier(self._next_number, message.session)
            self._next_number += 1
        elif message.session < verifier.session:
            return
        self._commit(verifier, message)
        if message.closed:
            rows, generations, finished = zip(*message.closed, strict=True)
            slots = self._find(verifier, np.array(rows), np.array(generations))
            for slot, is_finished in zip(slots.tolist(), finished, strict=True):
                self._close(slot, is_finished)
        for opened in message.opened:
            self._attempt(opened.request_id, self._start, verifier, opened)
        if message.states is not None:
            self._add_states(verifier, message, message.states)

    def _find(self, verifier: _Verifier, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Slots of handles, int32; `_NONE` where nothing is open."""
        slots: np.ndarray = verifier.slots[np.minimum(rows, len(verifier.slots) - 1)]
        slots[self._generations[slots] != generations] = _NONE
        return slots

    def _start(self, verifier: _Verifier, opened: DraftOpen) -> None:
        self.counters["opens"] += 1
        row, request_id = opened.row, opened.request_id
        if row >= len(verifier.slots) - 1:
            grow(verifier, ("slots",), 2 * row + 2, fill=_NONE)
        # The row's last request has ended, finished or not; the new one may have moved here from another row.
        self._close(int(verifier.slots[row]))
        self._close(self._slots.get(request_id, _NONE))
        verifier.lost.pop(row, None)
        slot = self._take_slot()
        self._slots[request_id], self._open[slot], verifier.slots[row] = slot, (request_id, verifier), slot
        self._owners[slot], self._rows[slot], self._generations[slot] = verifier.number, row, opened.generation
        self._proposer.open(
            slot, request_id, opened.prompt_token_ids, opened.committed_token_ids, opened.sampling, opened.window
        )

    def _take_slot(self) -> int:
        if not self._free:
            last, slots = len(self._owners) - 1, 2 * len(self._owners) + 1
            grow(self, ("_owners", "_rows", "_generations"), slots, fill=_NONE)
            grow(self, ("_changed",), slots)
            self._free = list(range(last, slots - 1))[::-1]
        return self._free.pop()

    def _commit(self, verifier: _Verifier, message: CommitBatch) -> None:
        slots = self._find(verifier, message.rows, message.generations)
        followed = slots != _NONE
        if followed.any():
            tokens = message.tokens[np.repeat(followed, message.lengths)]
            followed[followed] = self._follow(
                slots[followed], message.starts[followed], message.lengths[followed], tokens
            )
        for index in np.flatnonzero(~followed).tolist():
            verifier.lost[int(message.rows[index])] = int(message.generations[index])

    def _add_states(self, verifier: _Verifier, message: CommitBatch, states: States) -> None:
        """Pass hidden states to the requests that the message opened or committed to."""
        handles = dict(zip(message.rows.tolist(), message.generations.tolist(), strict=True))
        handles |= {opened.row: opened.generation for opened in message.opened}
        generations = np.array([handles.get(row, _NONE) for row in states.rows.tolist()], np.int32)
        slots, lengths, values = self._find(verifier, states.rows, generations), states.lengths, states.states
        lost = [verifier.lost.get(row, _NONE) for row in states.rows.tolist()]
        taken = (slots != _NONE) & (generations != lost)  # else it has missed a commit
        if not taken.all():
            values = values[np.flatnonzero(np.repeat(taken, lengths))]
        if taken.any():
            from specactor_ray.models.weight_buckets import from_wire

            self._feed(slots[taken], states.starts[taken], lengths[taken], from_wire(values))

    def _feed(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, states: Any) -> None:
        """`Proposer.add_features`; after a failure once more for each request alone; those that fail are dropped."""
        try:
            self._proposer.add_features(slots, starts, lengths, states)
        except Exception as error:  # noqa: BLE001 - it is logged
            if len(slots) == 1:
                self._fail(self._name(int(slots[0])), error)
                return
            ends = np.cumsum(lengths)
            for i, end in enumerate(ends.tolist()):
                one = slice(i, i + 1)
                self._feed(slots[one], starts[one], lengths[one], states[end - lengths[i] : end])

    def _follow(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """`Proposer.commit`; after a failure once more for each request alone, and failing requests are dropped."""
        try:
            taken = np.asarray(self._proposer.commit(slots, starts, lengths, tokens), np.bool_)
            if taken.shape != slots.shape:
                raise ValueError(f"{len(slots)} commits were answered by an array of shape {taken.shape}")
            return taken
        except Exception as error:  # noqa: BLE001 - it is logged
            if len(slots) > 1:
                parts = np.split(tokens, np.cumsum(lengths)[:-1])
                columns = (np.split(column, len(slots)) for column in (slots, starts, lengths))
                return np.concatenate([self._follow(*one) for one in zip(*columns, parts, strict=True)])
            self._fail(self._name(int(slots[0])), error)
            return np.zeros(1, np.bool_)

    # ---- closing ----

    def _close(self, slot: int, finished: bool = False) -> None:
        """Close a slot, if it is open. `finished`: whether its output is complete."""
        if slot not in self._open:
            return
        request_id, verifier = self._open.pop(slot)
        del self._slots[request_id]
        verifier.slots[self._rows[slot]] = self._owners[slot] = self._generations[slot] = _NONE
        self._changed[slot] = False
        self._free.append(slot)
        self._attempt(request_id, self._proposer.close, slot, finished)

    def _drop(self, verifier_id: str) -> None:
        """Close all requests of a verifier."""
        if (verifier := self._verifiers.pop(verifier_id, None)) is not None:
            for slot in np.flatnonzero(self._owners == verifier.number).tolist():
                self._close(slot)

    def _name(self, slot: int) -> str:
        return self._open[slot][0] if slot in self._open else ""

    def _attempt(self, request_id: str, action: Callable[..., None], *arguments: Any) -> None:
        """Run an action; a failure is logged and drops its request."""
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - it is logged
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        """Log a failure and drop its request."""
        self.failures.add(f"{self._drafter_id}: request {request_id} has failed and is dropped", error)
        self._lose(self._slots.get(request_id, _NONE))

    def lose_all(self) -> None:
        """Drop all requests, which their verifiers open again."""
        for slot in list(self._open):
            self._lose(slot)

    def _lose(self, slot: int) -> None:
        if slot in self._open:
            _, verifier = self._open[slot]
            verifier.lost[int(self._rows[slot])] = int(self._generations[slot])
            self._close(slot)

    # ---- tails ----

    def publish(self, changed: np.ndarray, links: Mapping[str, Link[TailBatch]], token_s: float) -> None:
        """Offer the tails of changed slots to their verifiers; a busy link sends them later.

        Requests of verifiers that are not in `links` are dropped. If the list with a verifier arrives after the
        verifier's messages, its next commits are of unknown requests, which it opens again.
        """
        changed = changed[(changed >= 0) & (changed < len(self._changed))]
        self._changed[changed] = self._owners[changed] != _NONE
        slots = np.flatnonzero(self._changed).astype(np.int32)
        owners = self._owners[slots]
        numbers = set(owners.tolist())
        for verifier_id, verifier in list(self._verifiers.items()):
            link = links.get(verifier_id)
            if link is None:
                self._drop(verifier_id)
            elif verifier.number in numbers or verifier.lost:
                mine = slots if numbers == {verifier.number} else slots[owners == verifier.number]
                link.offer(functools.partial(self._tails, verifier, mine, token_s))

    def _tails(self, verifier: _Verifier, slots: np.ndarray, token_s: float) -> TailBatch:
        """Whole tails of a verifier's changed slots."""
        self._changed[slots] = False
        lost, verifier.lost = verifier.lost, {}
        bases, lengths, tokens, counts = self._proposer.tails(slots)
        owners = slots if counts is None else np.repeat(slots, counts)
        self.counters["tails"] += len(slots)
        self.counters["branches"] += len(owners) - len(slots)
        self.counters["resyncs"] += len(lost)
        handles = self._rows[owners], self._generations[owners]
        return TailBatch(self._drafter_id, *handles, bases, lengths, tokens, token_s, tuple(lost.items()))
