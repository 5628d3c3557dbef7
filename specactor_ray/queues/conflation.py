"""Conflation: what becomes of messages that wait together for the same consumer.

Messages with one key share one slot, so what waits is bounded by the number of keys however slow the consumer is.
The rules below say what a slot keeps. They rest on two facts of the protocol: a `DraftTail` repeats the whole tail,
and a drafter that misses a commit notices the gap and asks to be opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from specactor_ray.messages import Commit, DraftClose, DraftOpen, DraftTail, ToDrafter, ToVerifier

T = TypeVar("T")

DEFAULT_MAX_KEYS = 65_536
"""Slots of a buffer: far above any number of (request, drafter) pairs that run at once."""
MAX_PER_SENDER = DEFAULT_MAX_KEYS // 8
"""Slots of one sender in a mailbox that several send to."""


@dataclass(frozen=True, slots=True)
class Rules(Generic[T]):
    """How messages of one direction conflate."""

    key: Callable[[T], Hashable]
    """Messages of equal key share a slot."""
    merge: Callable[[tuple[T, ...], T], tuple[T, ...]]
    """(what the slot holds, the newcomer) → what the slot holds from now on, in the order of delivery."""
    droppable: Callable[[tuple[T, ...]], bool]
    """May this slot be lost when there are too many?"""
    sender: Callable[[T], Hashable]
    """Who sent a message; equal for all messages of a slot."""


class ConflatingBuffer(Generic[T]):
    """Slots in the order in which their keys first arrived. Not thread-safe: `Mailbox` and `Outbox` lock around it.

    Beyond a bound the oldest droppable slot is dropped and counted. Slots that may not be lost stay, even if that
    exceeds the bound.

    Args:
        rules: How messages conflate.
        max_keys: Most slots.
        max_per_sender: Most slots of one sender, so that none can take the place of all others; None: `max_keys`.
    """

    def __init__(self, rules: Rules[T], max_keys: int = DEFAULT_MAX_KEYS, max_per_sender: int | None = None) -> None:
        self._rules, self._max_keys = rules, max_keys
        self._max_per_sender = max_keys if max_per_sender is None else max_per_sender
        self._free = min(self._max_keys, self._max_per_sender)
        """Up to so many slots no bound can be exceeded, and nobody has to be counted."""
        if self._free < 1:
            raise ValueError(f"max_keys is {max_keys} and max_per_sender {max_per_sender}; they must be 1 or more")
        self._slots: dict[Hashable, tuple[T, ...]] = {}
        self._keys_of: dict[Hashable, dict[Hashable, None]] = {}
        """Sender → keys of its slots, in the order of arrival; empty while no bound is near."""
        self.conflated = 0
        """Messages that a later one made superfluous."""
        self.dropped = 0
        """Messages lost because there were too many slots."""

    def __len__(self) -> int:
        """Number of occupied slots."""
        return len(self._slots)

    def add(self, messages: Iterable[T]) -> None:
        for message in messages:
            key = self._rules.key(message)
            queued = self._slots.get(key)
            if queued is None:
                self._slots[key] = (message,)
                if len(self._slots) > self._free:
                    self._bound(key, message)
            else:
                merged = self._rules.merge(queued, message)
                self.conflated += len(queued) + 1 - len(merged)
                self._slots[key] = merged

    def take(self) -> list[T]:
        """Everything that waits; the buffer is empty afterwards."""
        slots, self._slots, self._keys_of = self._slots, {}, {}
        return [message for slot in slots.values() for message in slot]

    def _bound(self, key: Hashable, message: T) -> None:
        """A slot was added, and now some sender may have too many. Counts slots per sender from here on."""
        sender_of = self._rules.sender
        if not self._keys_of:
            for other, slot in self._slots.items():
                self._keys_of.setdefault(sender_of(slot[0]), {})[other] = None
        own = self._keys_of.setdefault(sender_of(message), {})
        own[key] = None
        if len(own) > self._max_per_sender:
            self._drop_oldest(own)
        elif len(self._slots) > self._max_keys:
            self._drop_oldest(self._slots)

    def _drop_oldest(self, keys: Iterable[Hashable]) -> None:
        """Drop the first droppable one of these slots."""
        key = next((key for key in keys if self._rules.droppable(self._slots[key])), None)
        if key is None:
            return
        slot = self._slots.pop(key)
        self.dropped += len(slot)
        del self._keys_of[self._rules.sender(slot[0])][key]


def for_verifier() -> Rules[ToVerifier]:
    """Drafter → verifier: the newest `DraftTail` of a (request, drafter) replaces the older one.

    `DraftResync` has a key of its own, so that a tail does not hide it. Both may be lost: a tail is only ever a
    matter of speed, and a drafter that still has a gap asks again at the next commit.
    """

    def key(message: ToVerifier) -> Hashable:
        return isinstance(message, DraftTail), message.request_id, message.drafter_id

    return Rules(
        key, lambda _queued, newest: (newest,), droppable=lambda _slot: True, sender=lambda message: message.drafter_id
    )


def for_drafter() -> Rules[ToDrafter]:
    """Verifier → drafter: one slot per (verifier, request), with at most an open and a commit, or a commit and a close.

    - `DraftOpen` replaces whatever waits, also a `DraftClose`: opening starts the mirror afresh anyway.
    - `Commit`s that touch or overlap become one. With a gap between them the one that reaches further stays; the
      drafter either knows the tokens before it or notices the gap and asks for a `DraftOpen`.
    - A `Commit` behind a waiting `DraftOpen` is folded into its committed tokens and features. If it leaves a gap, it
      waits beside the open.
    - `DraftClose` replaces whatever waits. A finished output may be learned from, so its last `Commit` stays in front.
    - A `Commit` behind a `DraftClose` is late and is dropped.

    Slots with a `DraftClose` are never dropped, since a drafter would mirror that request for ever.
    """

    def key(message: ToDrafter) -> Hashable:
        return message.verifier_id, message.request_id

    return Rules(
        key,
        _merge_for_drafter,
        droppable=lambda slot: not isinstance(slot[-1], DraftClose),
        sender=lambda message: message.verifier_id,
    )


def _merge_for_drafter(queued: tuple[ToDrafter, ...], new: ToDrafter) -> tuple[ToDrafter, ...]:
    if isinstance(new, DraftOpen):
        return (new,)
    if isinstance(new, DraftClose):
        opened = isinstance(queued[0], DraftOpen)
        learned = () if opened or not new.finished else tuple(m for m in queued if isinstance(m, Commit))
        return (*learned, new)
    if isinstance(queued[-1], DraftClose):
        return queued
    commit = merge_commits(queued[-1], new) if isinstance(queued[-1], Commit) else new
    first = queued[0]
    return _fold(first, commit) if isinstance(first, DraftOpen) else (commit,)


def _fold(opening: DraftOpen, commit: Commit) -> tuple[ToDrafter, ...]:
    known = opening.committed_token_ids
    agrees = known[commit.start : commit.end] == commit.token_ids[: max(0, len(known) - commit.start)]
    if commit.end < len(known) and agrees:
        return (opening,)
    if commit.start > len(known) or not agrees:
        return opening, commit
    rest, features = commit.token_ids[len(known) - commit.start :], opening.features + commit.features
    return (
        replace(opening, committed_token_ids=known + rest, window=commit.window, mode=commit.mode, features=features),
    )


def merge_commits(old: Commit, new: Commit) -> Commit:
    """Two commits of one request as one.

    Window and mode are those of the commit that reaches further. Features say themselves which positions they are of,
    so those of both are kept, in the order of positions.

    Returns:
        The union if they touch or overlap and agree; else the one that reaches further (`new` if neither does).
    """
    low, high = (old, new) if old.start <= new.start else (new, old)
    last = old if old.end > new.end else new
    overlap = low.end - high.start
    if overlap < 0 or low.token_ids[high.start - low.start :][: len(high.token_ids)] != high.token_ids[:overlap]:
        return last
    features = low.features + high.features
    if high.end <= low.end:
        return replace(low, window=last.window, mode=last.mode, features=low.features)
    if high.start == low.start:
        return high
    return replace(last, start=low.start, token_ids=low.token_ids + high.token_ids[overlap:], features=features)
