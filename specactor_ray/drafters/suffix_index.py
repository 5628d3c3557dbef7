"""Where did these tokens occur before? An incremental index over one growing text.

Every position is chained to the previous one that follows the same `min_match` tokens (the hash chains of LZ77), so
appending a token costs one dictionary update and the memory is that of a few integers per token. A look-up
walks one chain backwards, at most `MAX_CANDIDATES` links.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_CANDIDATES = 64
"""Most recent occurrences of the last `min_match` tokens that a look-up compares. Bounds its cost in texts that
repeat a short phrase very often."""

SEPARATOR = -1
"""Stands between the pieces of a text; no token id equals it, so no match reaches across."""


class SuffixIndex:
    """A text of token ids, append at the end and forget at the front.

    An *occurrence* of a suffix is a position `e` of the text such that the `n` tokens before `e` equal the last `n`
    of the suffix, with `min_match <= n <= max_match`, and the text has a token (no separator) at `e`: the guess.

    Args:
        min_match: Shortest match, at least 1.
        max_match: Longest match that is told apart from longer ones.
    """

    __slots__ = ("_last", "_max", "_min", "_previous", "floor", "tokens")

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        self._last: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []
        self.tokens: list[int] = []
        self.floor = 0
        """Text before this position is forgotten."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Lengthen the text."""
        tokens, last, previous, width = self.tokens, self._last, self._previous, self._min
        for token in token_ids:
            end = len(tokens)
            tokens.append(token)
            older = -1
            if token != SEPARATOR and end - width >= self.floor:
                key = tuple(tokens[end - width : end])
                older = last.get(key, -1)
                last[key] = end
            previous.append(older)

    def find(self, suffix: Sequence[int], latest_only: bool = False) -> tuple[int, list[int]]:
        """The occurrences with the longest match among the `MAX_CANDIDATES` latest ones.

        Args:
            suffix: End of a text; only its last `max_match` tokens count.
            latest_only: Look no further once a match cannot be beaten by an earlier one; then only the first of
                the positions returned can be relied on.

        Returns:
            (match length, positions with that match from the latest to the earliest); `(0, [])` without any.
        """
        best, found = 0, list[int]()
        if len(suffix) < self._min:
            return best, found
        position = self._last.get(tuple(suffix[-self._min :]), -1)
        for _ in range(MAX_CANDIDATES):
            if position < self.floor + self._min:
                break
            length = self._match(position, suffix)
            if length > best:
                best, found = length, [position]
            elif length == best:
                found.append(position)
            if latest_only and length == self._max:
                break
            position = self._previous[position]
        return best, found

    def _match(self, position: int, suffix: Sequence[int]) -> int:
        """Tokens before `position` that equal the end of `suffix`, at most `max_match`."""
        tokens, length = self.tokens, self._min
        limit = min(self._max, len(suffix), position - self.floor)
        while length < limit and tokens[position - 1 - length] == suffix[-1 - length]:
            length += 1
        return length

    def forget_front(self, length: int) -> None:
        """Drop the first `length` tokens that are still known. Rebuilds once half of the text is dead, so the cost per
        token is constant and the memory at most twice that of what is known."""
        self.floor += length
        if 2 * self.floor >= len(self.tokens):
            alive = self.tokens[self.floor :]
            self._last, self._previous, self.tokens, self.floor = {}, [], [], 0
            self.append(alive)
