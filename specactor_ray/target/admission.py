"""Requests of an engine in its paged cache: admission, preemption, and prefixes.

Rows of ended requests stay in the cache until their pages are needed, and a new request forks the row with the longest
common prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container

import numpy as np

from specactor_ray.core.ragged import common_prefix
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.table.table import RequestTable

_FIRST_RESERVATION = 128
"""Output tokens for which cache is reserved when a request is admitted; the reservation grows later."""
_LEAST_SHARED = 32
"""Least remaining tokens of a prefill for which another request with the same context waits."""
_MOST_ROWS = 512
"""Most rows of ended requests; more would only lengthen the search."""


class Admission:
    """The queue of an engine and the cache rows of its admitted requests, at most `max_batch`, which use each other's
    prefixes."""

    def __init__(self, table: RequestTable, cache: PagedCache, max_batch: int) -> None:
        self._table, self._cache, self._max_batch = table, cache, max_batch
        self.prefixes = PrefixCache(cache)
        self._cached: dict[int, int] = {}
        """Admitted row → its row in the cache, in the order of admission."""
        self._waiting: deque[int] = deque()

    def __len__(self) -> int:
        """Number of rows, admitted and waiting."""
        return len(self._cached) + len(self._waiting)

    def rows(self) -> list[int]:
        """All rows, admitted and waiting."""
        return [*self._cached, *self._waiting]

    def add(self, row: int) -> None:
        """Queue a row."""
        self._waiting.append(row)

    def remove(self, row: int) -> None:
        """Drop a row, admitted or waiting; others are ignored."""
        if row in self._cached:
            self.release(row, self._num_cached(row))
        elif row in self._waiting:
            self._waiting.remove(row)

    def release(self, row: int, tokens: int) -> None:
        """End an admitted row, and keep this many tokens of it in the cache for requests that begin with them."""
        cached = self._cached.pop(row)
        self._cache.truncate(np.array([cached]), tokens)
        self.prefixes.retain(cached, self._table.lines[row, :tokens])

    def discard(self, row: int) -> None:
        """End an admitted row and free its cache."""
        self.prefixes.free(self._cached.pop(row))

    def admitted(self) -> tuple[np.ndarray, np.ndarray]:
        """Admitted rows, int32, and the number of their tokens in the cache."""
        rows = np.fromiter(self._cached, np.int32, len(self._cached))
        return rows, self._cache.lengths[self.cache_rows(rows)]

    def num_cached(self, rows: np.ndarray) -> np.ndarray:
        """Number of tokens of each row in the cache, int64 `(n,)`; 0 where the row is not admitted."""
        held = [self._cached.get(row, -1) for row in rows.tolist()]
        return np.where(np.array(held) < 0, 0, self._cache.lengths[held])

    def cache_rows(self, rows: np.ndarray) -> np.ndarray:
        """Cache rows of admitted rows, int64 `(n,)`."""
        return np.array([self._cached[row] for row in rows.tolist()], np.int64)

    def admit(self, alone: Container[int]) -> None:
        """Admit waiting requests in order; rows in `alone` compute every position themselves."""
        later, prefilling = list[int](), self._prefilling() if self._waiting else set[bytes]()
        while self._waiting and len(self._cached) < self._max_batch:
            row = self._waiting.popleft()
            tokens, shares = self._table.lines[row, : self._table.lengths[row] - 1], row not in alone
            if (key := tokens.tobytes()) in prefilling and shares:
                later.append(row)  # forks the prefix that another request is computing
            elif not self._open(row, tokens, shares):
                later.append(row)
                break
            elif len(tokens) - self._num_cached(row) >= _LEAST_SHARED:
                prefilling.add(key)
        self._waiting.extendleft(reversed(later))

    def reserve(self, rows: np.ndarray, tokens: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Make room in the cache: drop tails, then preempt the newest requests. Returns bool `(n,)`: admitted `rows`
        with room. `tokens`: of their contexts, in the cache and in this forward; `drafted`: draft tokens after them,
        set to 0 where they are dropped."""
        short = tokens + drafted > self._cache.room(self.cache_rows(rows))
        for i in np.flatnonzero(short).tolist():
            cached = self._cached.get(row := int(rows[i]))
            if cached is None or self._make_room(cached, int(tokens[i] + drafted[i])):
                continue
            drafted[i] = 0
            while not self._make_room(cached, int(tokens[i])) and self._preempt_newest() != row:
                pass
        if not short.any():
            return np.ones(len(rows), np.bool_)
        return np.array([row in self._cached for row in rows.tolist()], np.bool_)

    def _prefilling(self) -> set[bytes]:
        """Contexts of admitted requests with much prefill left."""
        rows, cached = self.admitted()
        rows = rows[self._table.lengths[rows] - 1 - cached >= _LEAST_SHARED]
        return {self._table.lines[row, : self._table.lengths[row] - 1].tobytes() for row in rows.tolist()}

    def _open(self, row: int, tokens: np.ndarray, shares: bool) -> bool:
        """Assign a cache row to a request, with as many of its tokens as are cached. False: there is no room."""
        cache, room = self._cache, min(int(self._table.limits[row]), len(tokens) + 1 + _FIRST_RESERVATION)
        source, common = self.prefixes.longest(tokens) if shares else (-1, 0)
        cached = int(cache.fork(np.array([source]), np.array([common]))[0]) if common else cache.new_row()
        if not self._make_room(cached, room):
            cache.free(cached)
            return False
        self._cached[row] = cached
        self.prefixes.add(cached, tokens, lambda: self._table.lines[row, : cache.lengths[cached]])
        return True

    def _num_cached(self, row: int) -> int:
        return int(self._cache.lengths[self._cached[row]])

    def _make_room(self, cached: int, tokens: int) -> bool:
        """`PagedCache.reserve`, which evicts rows of ended requests if necessary."""
        while not self._cache.reserve(cached, tokens):
            if not self.prefixes.evict():
                return False
        return True

    def _preempt_newest(self) -> int:
        """Return the newest running request to the queue, and its row; its tokens stay, and its cache is recomputed.
        With keyed sampling the continuation is the same."""
        row, cached = self._cached.popitem()
        self.prefixes.free(cached)
        self._waiting.appendleft(row)
        return row


class PrefixCache:
    """Rows of the engine's paged cache by their tokens; those of running requests are found, too. Rows of ended
    requests belong to the prefix cache from `retain` on."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._rows: dict[int, tuple[bytes, Callable[[], np.ndarray]]] = {}
        """Row of the cache → its first page's tokens, and its cached tokens."""
        self._retained: dict[int, None] = {}
        """Rows of ended requests, the least recently used first."""

    def add(self, row: int, context: np.ndarray, tokens: Callable[[], np.ndarray]) -> None:
        """Add the row of a running request, which is found if its context, int32, fills a page. `tokens`: returns those
        that are cached by now."""
        if len(context) >= self._cache.page_size:
            self._rows[row] = self._page_of(context), tokens

    def retain(self, row: int, tokens: np.ndarray) -> None:
        """Keep the row of an ended request with these cached tokens, int32, which are copied. The row is freed if they
        do not fill a page."""
        self._rows.pop(row, None)
        if len(tokens) < self._cache.page_size:
            self._cache.free(row)
            return
        kept = tokens.copy()
        for other, shorter in self._like(kept):
            if other in self._retained and common_prefix(shorter, kept) == len(shorter):
                self.free(other)  # an earlier turn of the same conversation
        self.add(row, kept, lambda: kept)
        self._retained[row] = None
        if len(self._retained) > _MOST_ROWS:
            self.evict()

    def free(self, row: int) -> None:
        """Free a row."""
        self._rows.pop(row, None)
        self._retained.pop(row, None)
        self._cache.free(row)

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
        lengths = {row: common_prefix(cached, tokens) for row, cached in self._like(tokens)}
        best = max(lengths, key=lengths.__getitem__, default=-1)
        if best in self._retained:
            self._retained[best] = self._retained.pop(best)
        most = lengths.get(best, 0)
        return best, most if most >= self._cache.page_size else 0

    def _like(self, tokens: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Rows, and their tokens, that begin with the first page of these."""
        wanted = self._page_of(tokens)
        return [(row, cached()) for row, (page, cached) in self._rows.items() if page == wanted]

    def _page_of(self, tokens: np.ndarray) -> bytes:
        return tokens[: self._cache.page_size].tobytes()
