"""Prefix cache of an engine: rows of ended requests stay in the paged cache until their pages are needed, and a new
request forks the row with the longest common prefix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specactor_ray.models.paged_cache import PagedCache

_MOST_ROWS = 512
"""Most rows of ended requests; more would only lengthen the search."""


class PrefixCache:
    """Cached rows by their tokens. Running requests are found, too.

    Args:
        cache: The engine's paged cache. Rows of ended requests belong to the prefix cache from `retain` on.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._tokens: dict[int, Callable[[], np.ndarray]] = {}
        """Row of the cache → its cached tokens."""
        self._by_page: dict[bytes, dict[int, None]] = {}
        """Bytes of the first page's tokens → rows that begin with them."""
        self._page: dict[int, bytes] = {}
        """Row → bytes of its first page's tokens."""
        self._retained: dict[int, None] = {}
        """Rows of ended requests, the least recently used first."""

    def add(self, row: int, context: np.ndarray, tokens: Callable[[], np.ndarray]) -> None:
        """Add the row of a running request; it is found if its context fills a page.

        Args:
            row: Row of the cache.
            context: int32, the first tokens that are cached; only the first page counts.
            tokens: Returns the tokens that are cached by now.
        """
        if len(context) >= self._cache.page_size:
            page = self._page[row] = self._page_of(context)
            self._by_page.setdefault(page, {})[row] = None
            self._tokens[row] = tokens

    def retain(self, row: int, tokens: np.ndarray) -> None:
        """Keep the row of an ended request with these cached tokens, int32, which are copied. The row is freed if they
        do not fill a page."""
        self._forget(row)
        if len(tokens) < self._cache.page_size:
            self._cache.free(row)
            return
        kept = tokens.copy()
        for other in [one for one in self._by_page.get(self._page_of(kept), ()) if one in self._retained]:
            if common_length(shorter := self._tokens[other](), kept) == len(shorter):
                self.free(other)  # an earlier turn of the same conversation
        self.add(row, kept, lambda: kept)
        self._retained[row] = None
        if len(self._retained) > _MOST_ROWS:
            self.evict()

    def free(self, row: int) -> None:
        """Free a row."""
        self._forget(row)
        self._cache.free(row)

    def _forget(self, row: int) -> None:
        self._tokens.pop(row, None)
        self._retained.pop(row, None)
        if (page := self._page.pop(row, None)) is not None:
            rows = self._by_page[page]
            del rows[row]
            if not rows:
                del self._by_page[page]

    def evict(self) -> bool:
        """Free the least recently used row of an ended request; False if there is none."""
        for row in self._retained:
            self.free(row)
            return True
        return False

    def clear(self) -> None:
        """Free the rows of all ended requests."""
        while self.evict():
            pass

    def longest(self, tokens: np.ndarray) -> tuple[int, int]:
        """The row with the longest common prefix with these tokens, int32, and its length; 0 if no row has a whole page
        in common."""
        best, most = -1, 0
        if len(tokens) < self._cache.page_size:
            return best, most
        for row in self._by_page.get(self._page_of(tokens), ()):
            if (common := common_length(self._tokens[row](), tokens)) > most:
                best, most = row, common
        if best in self._retained:
            self._retained[best] = self._retained.pop(best)
        return best, most if most >= self._cache.page_size else 0

    def _page_of(self, tokens: np.ndarray) -> bytes:
        return tokens[: self._cache.page_size].tobytes()


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
