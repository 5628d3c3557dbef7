"""The verifier's book of draft tails: which guesses are still worth verifying.

A `DraftTail` is a claim about absolute output positions. It is held against what was committed: equal as far as both
reach, the rest is usable; different, it is dropped. That check alone makes loss, repetition and reordering of
messages harmless, so there are no epochs and no acknowledgements. (SpecActor, arXiv 2511.16193, streams tokens and
discards those with a stale base; whole tails make that bookkeeping unnecessary.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specactor_ray.messages import DraftTail


@dataclass(slots=True)
class TailCounters:
    """What became of the tails."""

    taken: int = 0
    """Arrived and were kept."""
    stale: int = 0
    """Arrived too late: nothing past the committed prefix, or older than the tail that is there."""
    mismatch: int = 0
    """Arrived and differed from what had been committed meanwhile."""
    ahead: int = 0
    """Claimed a base longer than the committed prefix, which cannot come from this verifier's truth."""
    unknown: int = 0
    """Arrived for a request that is not open."""
    truncated: int = 0
    """Were longer than allowed and were cut (counted beside `taken`)."""
    refuted: int = 0
    """Were there, and a commit proved them wrong."""


@dataclass(slots=True)
class _Tail:
    """The newest valid tail of a drafter, cut to what lies past the committed prefix."""

    base_len: int
    """Committed length the drafter knew when it drafted this."""
    token_ids: tuple[int, ...]
    complete: bool
    weight_version: int = 0


@dataclass(slots=True)
class _Book:
    committed: list[int]
    tails: dict[str, _Tail] = field(default_factory=dict)


class TailBook:
    """Committed output and the newest valid tail per drafter, for every open request. Not thread-safe.

    Methods other than `commit` take ids of requests that are not open for requests without tails.
    """

    def __init__(self) -> None:
        self.counters = TailCounters()
        self._books: dict[str, _Book] = {}

    def open(self, request_id: str, committed: Sequence[int] = ()) -> None:
        """Start a book with these output tokens committed, replacing one of the same id."""
        self._books[request_id] = _Book(list(committed))

    def close(self, request_id: str) -> None:
        """Forget the request; unknown ids are ignored."""
        self._books.pop(request_id, None)

    def forget_drafter(self, drafter_id: str) -> None:
        """Drop all tails of a drafter that is gone."""
        for book in self._books.values():
            book.tails.pop(drafter_id, None)

    def forget_tail(self, request_id: str, drafter_id: str) -> None:
        """Drop the tail of a drafter that drafts for this request no more; unknown ids are ignored."""
        book = self._books.get(request_id)
        if book is not None:
            book.tails.pop(drafter_id, None)

    def commit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append committed output tokens; tails that agree keep the rest, the others go.

        Raises:
            KeyError: The request is not open.
        """
        book, fresh = self._books[request_id], tuple(token_ids)
        book.committed.extend(fresh)
        for drafter_id, tail in list(book.tails.items()):
            guessed, rest = tail.token_ids[: len(fresh)], tail.token_ids[len(fresh) :]
            if guessed != fresh[: len(guessed)]:
                self.counters.refuted += 1
                del book.tails[drafter_id]
            elif not rest:
                # It was right to its end; what it still says, that there is no more, was about an older prefix.
                if fresh:
                    del book.tails[drafter_id]
            else:
                tail.token_ids = rest

    def offer(self, tail: DraftTail, max_len: int) -> bool:
        """Take in a tail that arrived and is well-formed (`queues/screening.py`). Tokens beyond `max_len` past the
        committed prefix are cut off.

        Returns:
            True if it became the drafter's tail of the request; else one of the counters says why not.
        """
        book = self._books.get(tail.request_id)
        counters = self.counters
        if book is None:
            counters.unknown += 1
        elif tail.base_len > len(book.committed):
            counters.ahead += 1
        else:
            return self._offer(book, tail, max_len)
        return False

    def _offer(self, book: _Book, tail: DraftTail, max_len: int) -> bool:
        behind = len(book.committed) - tail.base_len
        guessed = tail.token_ids[:behind]
        if guessed != tuple(book.committed[tail.base_len : tail.base_len + len(guessed)]):
            self.counters.mismatch += 1
            return False
        rest = tail.token_ids[behind:]
        if (behind and not rest) or _is_older(tail.base_len, rest, book.tails.get(tail.drafter_id)):
            self.counters.stale += 1
            return False
        if len(rest) > max_len:
            self.counters.truncated += 1
            rest = rest[: max(0, max_len)]
        self.counters.taken += 1
        book.tails[tail.drafter_id] = _Tail(tail.base_len, rest, tail.complete, tail.weight_version)
        return True

    def usable(self, request_id: str) -> dict[str, tuple[int, ...]]:
        """Drafter id → draft tokens for the output positions from the committed length on; without empty ones."""
        book = self._books.get(request_id)
        return {drafter: tail.token_ids for drafter, tail in book.tails.items() if tail.token_ids} if book else {}

    def answered(self, request_id: str, drafter_id: str) -> bool:
        """The drafter has said something of use for the next step: its tail covers at least one token past the
        committed prefix, or was drafted in knowledge of all of it (also if that was "no guess")."""
        book = self._books.get(request_id)
        tail = book.tails.get(drafter_id) if book else None
        return book is not None and tail is not None and (bool(tail.token_ids) or tail.base_len == len(book.committed))

    def weight_version(self, request_id: str, drafter_id: str) -> int:
        """Version of the weights that the drafter's tail was drafted with, as it says; 0 without a tail."""
        book = self._books.get(request_id)
        tail = book.tails.get(drafter_id) if book else None
        return tail.weight_version if tail is not None else 0

    def complete(self, request_id: str, drafter_id: str) -> bool:
        """The drafter knew the whole committed prefix and will add nothing before the next commit: waiting longer
        is useless. A coupled verifier waits for this."""
        book = self._books.get(request_id)
        tail = book.tails.get(drafter_id) if book else None
        return book is not None and tail is not None and tail.complete and tail.base_len == len(book.committed)

    def committed_len(self, request_id: str) -> int:
        """Output tokens committed so far. Raises KeyError for an unknown id."""
        return len(self._books[request_id].committed)

    def committed(self, request_id: str) -> tuple[int, ...]:
        """Output tokens committed so far. Raises KeyError for an unknown id."""
        return tuple(self._books[request_id].committed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._books

    def __len__(self) -> int:
        """Open requests."""
        return len(self._books)


def _is_older(base_len: int, rest: tuple[int, ...], held: _Tail | None) -> bool:
    """A drafter's base only grows, and between two commits its tail does: whatever is less arrived out of order."""
    if held is None or base_len > held.base_len:
        return False
    if base_len < held.base_len:
        return True
    return len(rest) < len(held.token_ids) and held.token_ids[: len(rest)] == rest
