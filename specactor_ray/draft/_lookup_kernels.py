"""Kernels of `lookup.py`, compiled by numba: logs of tokens, and drafts from them.

A log is a ring of rows, one per token, the oldest overwritten first. A row is one line of an int32 table:

    TOKEN  the token id
    BACK   slot of the token before it in the same text, -1 without one
    NEXT   slot of the token after it in the same text, -1 while it is the last
    GROUP  number of the text's prompt; CONTEXT_ONLY for tokens that are never a guess
    links  per scope and level: slot of the previous row of the same hash bucket, -1 at the end

Level `l` hashes the `levels[l]` tokens before a row. In scope 0 rows share a bucket with rows of their group, in scope
1 with all rows. As in LZ77 dictionaries links are not repaired when their slot is overwritten: a link leads to an older
row, so a walk ends when age does not increase. A bucket may hold rows of other contexts; rows are compared token by
token.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.table import _kernels
from specactor_ray.table._kernels import Texts
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView

TOKEN, BACK, NEXT, GROUP, LINKS = 0, 1, 2, 3, 4
CONTEXT_ONLY = ALL = -1
"""Group of rows that are never a guess; as an argument of a look-up: all groups."""
MAX_VOTES = 64
"""Number of latest rows of a bucket that a look-up compares, and most occurrences that vote. It bounds the cost of a
look-up, and occurrences of older policies fade."""
DOUBT = 0.5
"""Votes that always count for none of the tokens seen, because one occurrence alone is no certainty."""

_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)

_jit: Any = kernel(sources=(_kernels,))


class Log(NamedTuple):
    """Arrays of a log, passed as those of `Texts`: `rows`, int32 `(capacity, LINKS + scopes * levels)`; `heads`, int32
    `(scopes * levels * buckets,)`, slot + 1 of the newest row, 0 without one, of 2**n buckets; `levels`, int32, context
    lengths, ascending; `scopes`, 1 (group) or 2 (group and all)."""

    rows: np.ndarray
    heads: np.ndarray
    levels: np.ndarray
    scopes: int


class Indexes(NamedTuple):
    """Arrays of `LookupProposer` by row: logs of each request's own text, and its place in the log of the run.

    `own_rows`, int32 `(rows, width, LINKS + levels)`, `own_heads`, int32 `(rows, levels * width)`: logs of the own
    text, with `indexed` tokens (0 begins a new log). In the log of the run: `groups` (-1: it does not use that log),
    numbers of the last rows, output tokens `written`.
    """

    own_rows: np.ndarray
    own_heads: np.ndarray
    indexed: np.ndarray
    groups: np.ndarray
    lasts: np.ndarray
    written: np.ndarray


@_jit
def _hash(line: Any, end: Any, length: Any) -> Any:
    """Hash of the `length` tokens before `line[end]`."""
    h = np.uint64(0)
    for at in range(end - length, end):
        h = np.uint64(np.uint64(h + np.uint64(line[at] + 1)) * _FACTOR)
    return h


@_jit
def _bucket(h: Any, group: Any, mask: Any) -> Any:
    """Bucket of a context's hash within a group or `ALL`."""
    h = np.uint64(h ^ np.uint64(np.uint64(group + 2) * _MIX))
    h = np.uint64(np.uint64(h ^ np.uint64(h >> _SHIFT)) * _MIX)
    h = np.uint64(h ^ np.uint64(h >> _SHIFT))
    return np.int64(np.uint64(h & np.uint64(mask)))


@_jit
def _age(newest: Any, slot: Any, capacity: Any) -> Any:
    """Number of rows written after `slot`; `newest`: slot of the newest row."""
    return newest - slot if newest >= slot else newest - slot + capacity


@_jit
def write(log: Any, count: Any, line: Any, begin: Any, end: Any, group: Any, last: Any) -> Any:
    """Write `line[begin:end]` behind row number `last` (-1 begins a text) of a log of `count` rows. Returns its new
    count and last row."""
    rows, heads, levels, scopes = log
    buckets = len(heads) // (scopes * len(levels))
    back = last % len(rows) if last >= 0 and count - last < len(rows) else -1
    for at in range(begin, end):
        slot = count % len(rows)
        if back >= 0:
            rows[back, NEXT] = slot
        rows[slot, TOKEN], rows[slot, BACK], rows[slot, NEXT], rows[slot, GROUP] = line[at], back, -1, group
        for level in range(len(levels)):
            is_found = levels[level] <= at and group != CONTEXT_ONLY
            h = _hash(line, at, levels[level]) if is_found else np.uint64(0)
            for scope in range(scopes):
                column, previous = scope * len(levels) + level, -1
                if is_found:
                    bucket = column * buckets + _bucket(h, group if scope == 0 else ALL, buckets - 1)
                    if heads[bucket] != slot + 1:
                        previous = heads[bucket] - 1
                    heads[bucket] = slot + 1
                rows[slot, LINKS + column] = previous
        last, back = count, slot
        count += 1
    return count, last


@_jit
def advance(texts: Any, indexes: Any, log: Any, count: Any, rows: Any) -> Any:
    """Write the new tokens of `rows` into their own logs and that of the run. Returns the latter's new `count`."""
    texts, indexes, log = Texts(*texts), Indexes(*indexes), Log(*log)
    for row in rows:
        line, end, begin = texts.lines[row], texts.lengths[row], indexes.indexed[row]
        if begin == 0:
            indexes.own_heads[row] = 0
        own = (indexes.own_rows[row], indexes.own_heads[row], log.levels, 1)
        indexes.indexed[row], _ = write(own, begin, line, begin, end, 0, begin - 1)
        begin = texts.prompts[row] + indexes.written[row]
        if indexes.groups[row] >= 0 and begin < end:
            count, indexes.lasts[row] = write(log, count, line, begin, end, indexes.groups[row], indexes.lasts[row])
            indexes.written[row] += end - begin
    return count


@_jit
def _match(rows: Any, newest: Any, slot: Any, line: Any, end: Any, high: Any) -> Any:
    """Number of tokens before a row that equal those before `line[end]`, at most `high`."""
    capacity, length, most = len(rows), 0, min(high, end)
    age, at = _age(newest, slot, capacity), rows[slot, BACK]
    while at >= 0 and length < most:
        older = _age(newest, at, capacity)
        if older <= age or rows[at, TOKEN] != line[end - 1 - length]:
            break
        age = older
        length += 1
        at = rows[at, BACK]
    return length


@_jit
def _find(log: Any, group: Any, newest: Any, line: Any, end: Any, high: Any, found: Any) -> Any:
    """(match length, number of rows): the rows after the longest match of the end of `line[:end]`, the latest first.

    Levels are tried from the longest on; within a level the longest match, of at most `high` tokens, among the
    `MAX_VOTES` latest rows of the bucket counts. The slots of the rows are written to `found`, int32 `(MAX_VOTES,)`.
    """
    rows, heads, levels, scopes = log
    buckets = len(heads) // (scopes * len(levels))
    for level in range(len(levels) - 1, -1, -1):
        if levels[level] > end:
            continue
        best, votes, age = np.int64(levels[level]), 0, -1
        column = level if group != ALL else len(levels) + level
        slot = heads[column * buckets + _bucket(_hash(line, end, levels[level]), group, buckets - 1)] - 1
        for _ in range(MAX_VOTES):
            if slot < 0 or _age(newest, slot, len(rows)) <= age:
                break
            age = _age(newest, slot, len(rows))
            owner = rows[slot, GROUP]
            if owner == group or (group == ALL and owner != CONTEXT_ONLY):
                length = _match(rows, newest, slot, line, end, high)
                if length > best:
                    best, votes = length, 0
                if length == best:
                    found[votes] = slot
                    votes += 1
            slot = rows[slot, LINKS + column]
        if votes:
            return best, votes
    return 0, 0


@_jit
def _elect(rows: Any, found: Any, votes: Any, tokens: Any, ballots: Any) -> Any:
    """(token, its votes): the most frequent token in the rows `found`; among equals the one seen last."""
    if votes == 1:
        return rows[found[0], TOKEN], 1
    distinct = 0
    for i in range(votes):
        token, j = rows[found[i], TOKEN], 0
        while j < distinct and tokens[j] != token:
            j += 1
        if j == distinct:
            tokens[j], ballots[j] = token, 0
            distinct += 1
        ballots[j] += 1
    winner = ballots[:distinct].argmax()
    return tokens[winner], ballots[winner]


@_jit
def _follow(rows: Any, votes: Any, limit: Any, floor: Any, scratch: Any, tokens: Any) -> Any:
    """Follow the elected tokens from the first `votes` rows in `scratch[0]` on, `limit` tokens at most, while the
    probability of the path is not below `floor`. Fills `tokens`. Returns (drafted tokens, sum of the path
    probabilities)."""
    length, score, path, found = 0, 0.0, 1.0, scratch[0]
    while length < limit and votes > 0:
        token, ballot = _elect(rows, found, votes, scratch[1], scratch[2])
        path *= ballot / (votes + DOUBT)
        if path < floor:
            break
        tokens[length] = token
        score += path
        length += 1
        alive = 0
        for i in range(votes):
            following = rows[found[i], NEXT]
            if rows[found[i], TOKEN] == token and following >= 0:
                found[alive] = following
                alive += 1
        votes = alive
    return length, score


@_jit
def fill(texts: Any, indexes: Any, log: Any, count: Any, high: Any, factor: Any, floor: Any, rows: Any) -> None:
    """Lengthen the tails of `rows` by the rule of `lookup.py`. `high`, `factor`, `floor`: `max_match`, `length_factor`,
    `min_probability` of `LookupProposer`."""
    texts, indexes, log = Texts(*texts), Indexes(*indexes), Log(*log)
    most = texts.tail.shape[2]
    scratch, tokens = np.empty((3, MAX_VOTES), np.int32), np.empty(most, np.int32)
    line = np.empty(high + most, np.int32)
    for row in rows:
        known, group, tail = texts.lengths[row], indexes.groups[row], texts.tail[row, 0]
        guessed = np.int64(texts.length[row, 0])
        limit = np.int64(min(texts.window, texts.limits[row] - known))
        if guessed >= limit:
            continue
        begin = min(high, known)  # a look-up reads no further back
        line[:begin] = texts.lines[row, known - begin : known]
        line[begin : begin + guessed] = tail[:guessed]
        end = begin + guessed
        own = Log(indexes.own_rows[row], indexes.own_heads[row], log.levels, 1)
        longest, length, best = 0, 0, 0.0
        for source in range(1 + log.scopes if group >= 0 else 1):
            if source == 0:
                matched, votes = _find(own, 0, known - 1, line, end, high, scratch[0])
            else:
                newest, scope = (count - 1) % len(log.rows), group if source == 1 else ALL
                matched, votes = _find(log, scope, newest, line, end, high, scratch[0])
            room = limit - guessed
            if factor > 0.0:
                room = min(room, np.int64(factor * max(matched - guessed, 0)) - guessed)
            log_rows = own.rows if source == 0 else log.rows
            size, score = _follow(log_rows, votes, room, floor, scratch, tokens)
            if score > best and (length == 0 or matched >= longest):
                longest, length, best = matched, size, score
                tail[guessed : guessed + size] = tokens[:size]
        texts.length[row, 0] = guessed + length


@functools.cache
def warm_up() -> None:
    """Compile or load the kernels (some seconds on the first run of a machine)."""
    table, nothing = RequestTable(1), np.zeros(0, np.int32)
    log = np.zeros((1, LINKS + 1), np.int32), np.zeros(1, np.int32), np.ones(1, np.int32), 1
    places = np.zeros((4, 1), np.int64)
    indexes = np.zeros((1, 1, LINKS + 1), np.int32), np.zeros((1, 1), np.int32), *places
    texts = TableView(table, 0, 1).texts
    write(log, 0, nothing, 0, 0, 0, -1)
    advance(texts, indexes, log, 0, nothing)
    fill(texts, indexes, log, 0, 1, 0.0, 0.0, nothing)
