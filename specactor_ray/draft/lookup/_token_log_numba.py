"""The kernels behind `token_log.py` and `lookup/proposer.py`, compiled by numba: logs of tokens, and drafts from them.

A log is a ring of rows, one per token, the oldest overwritten first. A row is one line of an int32 table:

    TOKEN  the token id
    BACK   slot of the token before it in the same text, -1 without one
    NEXT   slot of the token after it in the same text, -1 while it is the last
    GROUP  number of the prompt that the text answers; -1 for tokens that are context only and never a guess
    links  per scope and level: slot of the previous row of the same hash bucket, -1 at the end

so texts that grow at the same time may interleave. Level `l` hashes the `levels[l]` tokens before a row. Rows share a
bucket in scope 0 with those of their group, in scope 1 with all. As in LZ77 dictionaries links are not repaired when
their slot is overwritten: a link leads to an older row, and an overwritten slot is younger than the row that points
there, so a walk ends when age does not increase. A bucket may hold rows of other contexts; rows are compared token by
token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.jit import kernel
from specactor_ray.sampling.numba import keyed_gumbel

TOKEN, BACK, NEXT, GROUP, LINKS = 0, 1, 2, 3, 4
CONTEXT_ONLY = -1
MAX_VOTES = 64
"""Latest rows of a bucket that a look-up compares, and most occurrences that vote. Bounds the cost of a look-up; older
occurrences than the latest 64 do not vote, so those of older policies fade."""
DOUBT = 0.5
"""Votes that are always given to none of the tokens seen: one occurrence alone is no certainty."""

_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_SMALLEST = 64

_jit: Any = kernel()


@_jit
def _bucket(h: Any, group: Any, mask: Any) -> Any:
    """Bucket of a context hash within a group (-1: in the scope of all groups)."""
    h = np.uint64(h ^ np.uint64(np.uint64(group + 2) * _MIX))
    h = np.uint64(np.uint64(h ^ np.uint64(h >> _SHIFT)) * _MIX)
    h = np.uint64(h ^ np.uint64(h >> _SHIFT))
    return np.int64(np.uint64(h & np.uint64(mask)))


@_jit
def _age(newest: Any, slot: Any, capacity: Any) -> Any:
    """Rows written after `slot`, where `newest` is the slot of the newest."""
    return newest - slot if newest >= slot else newest - slot + capacity


@_jit
def hash_context(line: Any, end: Any, levels: Any, hashes: Any) -> Any:
    """How many levels the tokens before `line[end]` have; `hashes` `(levels,)` uint64 is filled with theirs."""
    h, length = np.uint64(0), 0
    for level in range(levels.shape[0]):
        if levels[level] > end:
            return level
        while length < levels[level]:
            length += 1
            h = np.uint64(np.uint64(h + np.uint64(line[end - length] + 1)) * _FACTOR)
        hashes[level] = h
    return levels.shape[0]


@_jit
def append(
    rows: Any, heads: Any, levels: Any, scopes: Any, slot: Any, back: Any, token: Any, group: Any, hashes: Any,
    hashed: Any,
) -> None:  # fmt: skip
    """Write a token behind the row in the slot `back` (-1 begins a text).

    Args:
        rows: `(capacity, LINKS + scopes * levels)` int32.
        heads: `(scopes * levels * buckets,)` int32: slot + 1 of the newest row, 0 without one; 2**n buckets.
        levels: `(levels,)` int32, context lengths, ascending.
        scopes: 1 (group) or 2 (group and all).
        slot: That of the newest row of the log from now on.
        group: 0 or more, or CONTEXT_ONLY: it is never a guess.
        hashes: From `hash_context`, with `hashed` levels.
    """
    if back >= 0:
        rows[back, NEXT] = slot
    rows[slot, TOKEN], rows[slot, BACK], rows[slot, NEXT], rows[slot, GROUP] = token, back, -1, group
    buckets = heads.shape[0] // (scopes * levels.shape[0])
    for scope in range(scopes):
        for level in range(levels.shape[0]):
            column, previous = scope * levels.shape[0] + level, -1
            if level < hashed and group != CONTEXT_ONLY:
                bucket = column * buckets + _bucket(hashes[level], group if scope == 0 else -1, buckets - 1)
                if heads[bucket] != slot + 1:
                    previous = heads[bucket] - 1
                heads[bucket] = slot + 1
            rows[slot, LINKS + column] = previous


@_jit
def _match(rows: Any, newest: Any, slot: Any, line: Any, end: Any, high: Any) -> Any:
    """Tokens before a row that equal those before `line[end]`, at most `high`."""
    capacity, length, most = rows.shape[0], 0, min(high, end)
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
def _find(
    rows: Any, heads: Any, levels: Any, scopes: Any, scope: Any, group: Any, newest: Any, line: Any, end: Any,
    high: Any, hashes: Any, hashed: Any, found: Any,
) -> Any:  # fmt: skip
    """(match length, how many): the rows behind the longest match of the end of `line[:end]`, the latest first.

    Levels are tried from the longest on; within a level the longest match among the `MAX_VOTES` latest rows of the
    bucket counts.
    """
    capacity, buckets = rows.shape[0], heads.shape[0] // (scopes * levels.shape[0])
    for level in range(hashed - 1, -1, -1):
        best, votes, age = np.int64(levels[level]), 0, -1
        column = scope * levels.shape[0] + level
        slot = heads[column * buckets + _bucket(hashes[level], group if scope == 0 else -1, buckets - 1)] - 1
        for _ in range(MAX_VOTES):
            if slot < 0 or _age(newest, slot, capacity) <= age:
                break
            age = _age(newest, slot, capacity)
            owner = rows[slot, GROUP]
            if owner == group or (scope == 1 and owner != CONTEXT_ONLY):
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
def _elect(rows: Any, found: Any, votes: Any, key: Any, tokens: Any, ballots: Any, noisy: Any) -> Any:
    """(token, its votes): the most frequent of the tokens in the rows `found`, of equals the one seen last.

    With `noisy`, the one with the largest log(votes) + g: g is the target's own noise at this position, so this is
    what the target would sample if its distribution were that of the votes.
    """
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
    winner, best = 0, -1e300
    for j in range(distinct):
        score = float(ballots[j])
        if noisy and distinct > 1:
            score = np.log(score) + keyed_gumbel(key, tokens[j])
        if score > best:
            winner, best = j, score
    return tokens[winner], ballots[winner]


@_jit
def draft(
    rows: Any, heads: Any, levels: Any, scopes: Any, scope: Any, group: Any, newest: Any, line: Any, end: Any,
    high: Any, hashes: Any, hashed: Any, limit: Any, factor: Any, drafted: Any, floor: Any, path: Any, noise: Any,
    scratch: Any, out_tokens: Any, out_odds: Any,
) -> Any:  # fmt: skip
    """Find the longest match of the end of `line[:end]` and follow the elected tokens from there.

    Args:
        scope: 0 looks among the texts of `group`, 1 among all.
        newest: Slot of the newest row.
        high: Longest match that counts.
        hashes: From `hash_context`, with `hashed` levels.
        limit: Most tokens, 1 or more.
        factor: At most this many tokens per matched one, `drafted` included; 0 sets no such limit.
        drafted: Tokens at the end of the context that are guesses themselves; they do not count as matched.
        floor: Stop before the probability of the path falls below this.
        path: Probability of the path so far.
        noise: (seed, position of the first token, whether it is to be used); else the majority decides.
        scratch: (3, MAX_VOTES) int32.
        out_tokens, out_odds: (limit,) int32 and float64, filled with the tokens and their share of the votes.

    Returns:
        (match length, tokens drafted, sum of the path probabilities, whether the texts ended before anything else did).
    """
    found = scratch[0]
    matched, votes = _find(rows, heads, levels, scopes, scope, group, newest, line, end, high, hashes, hashed, found)
    if factor > 0.0:
        limit = min(limit, np.int64(factor * max(matched - drafted, 0)) - drafted)
    length, score = 0, 0.0
    seed, position, noisy = noise
    low, top = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> _SHIFT)
    while length < limit and votes > 0:
        key = (low, top, np.uint32(position + length))
        token, ballot = _elect(rows, found, votes, key, scratch[1], scratch[2], noisy)
        odds = ballot / (votes + DOUBT)
        path *= odds
        if path < floor:
            break
        out_tokens[length], out_odds[length] = token, odds
        score += path
        length += 1
        alive = 0
        for i in range(votes):
            following = rows[found[i], NEXT]
            if rows[found[i], TOKEN] == token and following >= 0:
                found[alive] = following
                alive += 1
        votes = alive
    return matched, length, score, votes == 0 and length < limit


@_jit
def write(
    rows: Any, heads: Any, levels: Any, scopes: Any, count: Any, line: Any, begin: Any, group: Any, last: Any
) -> Any:
    """Write `line[begin:]` behind row number `last` of the log of the run. Returns its new count and last row."""
    capacity, hashes = rows.shape[0], np.empty(levels.shape[0], np.uint64)
    back = last % capacity if last >= 0 and count - last < capacity else -1
    for position in range(begin, line.shape[0]):
        hashed, place = hash_context(line, position, levels, hashes), count % capacity
        append(rows, heads, levels, scopes, place, back, line[position], group, hashes, hashed)
        last, back = count, place
        count += 1
    return count, last


@_jit
def advance(
    lines: Any, prompts: Any, known: Any, own_rows: Any, own_heads: Any, indexed: Any, buckets: Any,
    rows: Any, heads: Any, levels: Any, scopes: Any, count: Any, groups: Any, lasts: Any, written: Any, slots: Any,
) -> Any:  # fmt: skip
    """Write the new tokens of `slots` into the logs of their own and into that of the run. Returns its new `count`.

    Args:
        lines: `(slots, width)` int32; `prompts` and `known` `(slots,)` int32: see `MirrorTable`.
        own_rows: `(slots, width, LINKS + levels)` int32: rows of the logs of the requests' own text.
        own_heads: `(slots, levels * width)` int32: their heads.
        indexed: `(slots,)` int64: tokens in these logs; 0 starts a new one.
        buckets: `(slots,)` int64: their buckets, a power of two that grows with the text; 0: the request has no log.
        count: Rows ever written to the log of the run; row number n is in slot n % capacity.
        groups: `(slots,)` int64: each request's group there; -1: it writes nothing there.
        lasts: `(slots,)` int64: the number of its last row.
        written: `(slots,)` int64: its output tokens there.
        slots: int32.
    """
    capacity, hashes = rows.shape[0], np.empty(levels.shape[0], np.uint64)
    for slot in slots:
        if buckets[slot] == 0:
            continue
        line, end = lines[slot], known[slot]
        if indexed[slot] == 0 or end > buckets[slot]:
            indexed[slot], buckets[slot] = 0, _SMALLEST
            while buckets[slot] < end:
                buckets[slot] *= 2
            buckets[slot] = min(buckets[slot], lines.shape[1])
            own_heads[slot, : levels.shape[0] * buckets[slot]] = 0
        own, own_head = own_rows[slot], own_heads[slot, : levels.shape[0] * buckets[slot]]
        shared, last = prompts[slot] + written[slot], lasts[slot]
        back = last % capacity if last >= 0 and count - last < capacity else -1
        for position in range(indexed[slot], end):
            hashed = hash_context(line, position, levels, hashes)
            append(own, own_head, levels, 1, position, position - 1, line[position], 0, hashes, hashed)
            if groups[slot] >= 0 and position >= shared:
                place = count % capacity
                append(rows, heads, levels, scopes, place, back, line[position], groups[slot], hashes, hashed)
                lasts[slot], back = count, place
                count += 1
                written[slot] += 1
        indexed[slot] = end
    return count


@_jit
def fill(
    lines: Any, known: Any, ends: Any, limits: Any, odds: Any,
    own_rows: Any, own_heads: Any, buckets: Any, rows: Any, heads: Any, levels: Any, scopes: Any, count: Any,
    groups: Any, seeds: Any, bases: Any, noisy: Any, high: Any, factor: Any, floor: Any, slots: Any,
) -> None:  # fmt: skip
    """Lengthen the tails of `slots` by the rule of `lookup/proposer.py`; arguments as in `advance` and `draft`.

    Args:
        odds: `(slots, width)` float64: of each tail token its share of the votes.
        seeds: `(slots,)` uint64: seeds of the target's noise, used where `noisy` `(slots,)` is True.
        bases: `(slots,)` int64: position in the noise of the first token of each line.
    """
    most, newest = 1, (count - 1) % rows.shape[0]
    for slot in slots:
        most = max(most, limits[slot] - ends[slot])
    tokens, shares, scratch = np.empty((2, most), np.int32), np.empty((2, most)), np.empty((3, MAX_VOTES), np.int32)
    hashes = np.empty(levels.shape[0], np.uint64)
    for slot in slots:
        if buckets[slot] == 0:
            continue
        line, own, group = lines[slot], own_rows[slot], groups[slot]
        own_head = own_heads[slot, : levels.shape[0] * buckets[slot]]
        begin, end, limit, this, least = known[slot], np.int64(ends[slot]), np.int64(limits[slot]), 0, factor
        while end < limit:
            room, path, guessed = limit - end, 1.0, end - begin
            for position in range(begin, end):
                path *= odds[slot, position]
            noise = (seeds[slot], bases[slot] + end, noisy[slot])
            hashed = hash_context(line, end, levels, hashes)
            matched, length, score, cut = draft(
                own, own_head, levels, 1, 0, 0, begin - 1, line, end, high, hashes, hashed, room, least, guessed,
                floor, path, noise, scratch, tokens[this], shares[this],
            )  # fmt: skip
            for scope in range(scopes if group >= 0 else 0):
                found = draft(
                    rows, heads, levels, scopes, scope, group, newest, line, end, high, hashes, hashed, room, least,
                    guessed, floor, path, noise, scratch, tokens[1 - this], shares[1 - this],
                )  # fmt: skip
                if found[2] > score and (length == 0 or found[0] >= matched):
                    matched, length, score, cut = found
                    this = 1 - this
            for i in range(length):
                line[end + i], odds[slot, end + i] = tokens[this, i], shares[this, i]
            if least > 0.0 and length:
                limit, least = min(limit, begin + np.int64(factor * (matched - guessed))), 0.0
            end += length
            if not length or not cut:
                break
        ends[slot] = end
