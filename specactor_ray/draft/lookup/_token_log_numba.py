"""The kernels behind `token_log.py`: appending to a log of tokens and drafting from it, compiled by numba.

The log is a ring of rows, one per token, the oldest overwritten first. A row is one line of an int32 table:

    TOKEN  the token id
    BACK   slot of the token before it in the same text, -1 without one
    NEXT   slot of the token after it in the same text, -1 while it is the last
    GROUP  which prompt the text answers; -1 for tokens that are context only and never a guess
    links  per scope and level: slot of the previous row of the same hash bucket, -1 at the end

so texts that grow at the same time may interleave. Level `l` hashes the `levels[l]` tokens before a row. The scope says
whose rows share a bucket: scope 0 those of one group, scope 1 all. As in LZ77 dictionaries links hold slots without
knowing whether the slot was overwritten since. They need not: a link leads to an older row, and an overwritten slot is
younger than the row that points there, so a walk ends when age does not increase. A bucket may hold rows of other
contexts; whatever is found is compared token by token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.jit import kernel
from specactor_ray.sampling.numba import keyed_gumbel

TOKEN, BACK, NEXT, GROUP, LINKS = 0, 1, 2, 3, 4
CONTEXT_ONLY = -1
MAX_VOTES = 64
"""Latest rows of a bucket that a look-up compares; so many occurrences may vote. Bounds the cost of a look-up, and lets
older policies fade: what has been seen 64 times since has no say any more."""
DOUBT = 0.5
"""Votes that are always given to none of the tokens seen: one occurrence alone is no certainty."""

_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)

_jit: Any = kernel()


@_jit
def _roll(h: Any, token: Any) -> Any:
    """The hash of a context that is one token longer, towards its beginning."""
    return np.uint64(np.uint64(h + np.uint64(token + 1)) * _FACTOR)


@_jit
def _bucket(h: Any, group: Any, mask: Any) -> Any:
    """Bucket of a context hash within a group (-1: in the scope of all groups)."""
    h = np.uint64(h ^ np.uint64(np.uint64(group + 2) * _MIX))
    h = np.uint64(np.uint64(h ^ np.uint64(h >> _SHIFT)) * _MIX)
    h = np.uint64(h ^ np.uint64(h >> _SHIFT))
    return np.int64(np.uint64(h & np.uint64(mask)))


@_jit
def append(
    rows: Any, heads: Any, levels: Any, scopes: Any, count: Any, last: Any, tokens: Any, group: Any, guess: Any
) -> Any:
    """Write `tokens` behind row number `last` (-1 begins a text). Returns the number of the last row written.

    Args:
        rows: (capacity, LINKS + scopes * levels) int32.
        heads: (scopes * levels, power of two) int32: slot + 1 of the newest row of a bucket, 0 without one.
        levels: Context lengths, ascending, int32.
        scopes: 1 (group) or 2 (group and all).
        count: Rows written so far; row number n is in slot n % capacity.
        tokens: (n,) int32.
        group: 0 or more.
        guess: False: these tokens are context only.
    """
    for token in tokens:
        _write(rows, heads, levels, scopes, count, last, token, group if guess else CONTEXT_ONLY)
        last = count
        count += 1
    return last


@_jit
def rewrite(old: Any, count: Any, rows: Any, heads: Any, levels: Any, scopes: Any) -> None:
    """Write the first `count` rows of a log that never overwrote any into a larger one; all keep their numbers."""
    for number in range(count):
        _write(rows, heads, levels, scopes, number, old[number, BACK], old[number, TOKEN], old[number, GROUP])


@_jit
def _write(rows: Any, heads: Any, levels: Any, scopes: Any, count: Any, last: Any, token: Any, group: Any) -> None:
    capacity, back = rows.shape[0], -1
    slot = count % capacity
    if last >= 0 and count - last < capacity:
        back = last % capacity
        rows[back, NEXT] = slot
    rows[slot, TOKEN], rows[slot, BACK], rows[slot, NEXT], rows[slot, GROUP] = token, back, -1, group
    rows[slot, LINKS:] = -1
    if group != CONTEXT_ONLY:
        _link(rows, heads, levels, scopes, slot, group, heads.shape[1] - 1)


@_jit
def _link(rows: Any, heads: Any, levels: Any, scopes: Any, slot: Any, group: Any, mask: Any) -> None:
    """Put a new row at the head of the buckets of its context."""
    capacity, h, length, age, level = rows.shape[0], np.uint64(0), 0, 0, 0
    at = rows[slot, BACK]
    while at >= 0 and level < levels.shape[0]:
        older = (slot - at) % capacity
        if older <= age:
            return
        age = older
        h = _roll(h, rows[at, TOKEN])
        length += 1
        if length == levels[level]:
            for scope in range(scopes):
                column = scope * levels.shape[0] + level
                bucket = _bucket(h, group if scope == 0 else -1, mask)
                previous = heads[column, bucket] - 1
                if previous != slot:
                    rows[slot, LINKS + column] = previous
                heads[column, bucket] = slot + 1
            level += 1
        at = rows[at, BACK]


@_jit
def _match(rows: Any, newest: Any, slot: Any, context: Any) -> Any:
    """Tokens before a row that equal the end of `context`."""
    capacity, length = rows.shape[0], 0
    age, at = (newest - slot) % capacity, rows[slot, BACK]
    while at >= 0 and length < context.shape[0]:
        older = (newest - at) % capacity
        if older <= age or rows[at, TOKEN] != context[context.shape[0] - 1 - length]:
            break
        age = older
        length += 1
        at = rows[at, BACK]
    return length


@_jit
def find(rows: Any, heads: Any, levels: Any, scope: Any, group: Any, count: Any, context: Any, found: Any) -> Any:
    """(match length, how many): the rows behind the longest match of the end of `context`, the latest first.

    Levels are tried from the longest on; within a level the longest match among the `MAX_VOTES` latest rows of the
    bucket counts.

    Args:
        context: The last tokens of a text, int32; longer matches than this are not told apart.
        found: (MAX_VOTES,) int32, is filled with slots.
    """
    capacity, mask, newest = rows.shape[0], heads.shape[1] - 1, count - 1
    hashes = np.zeros(levels.shape[0], np.uint64)
    h, level = np.uint64(0), 0
    for length in range(1, context.shape[0] + 1):
        h = _roll(h, context[context.shape[0] - length])
        if level < levels.shape[0] and length == levels[level]:
            hashes[level] = h
            level += 1
    while level > 0:
        level -= 1
        best, votes, age = levels[level], 0, -1
        column = scope * levels.shape[0] + level
        slot = heads[column, _bucket(hashes[level], group if scope == 0 else -1, mask)] - 1
        for _ in range(MAX_VOTES):
            if slot < 0 or (newest - slot) % capacity <= age:
                break
            age = (newest - slot) % capacity
            owner = rows[slot, GROUP]
            if owner == group or (scope == 1 and owner != CONTEXT_ONLY):
                length = _match(rows, newest, slot, context)
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
    rows: Any, heads: Any, levels: Any, scope: Any, group: Any, count: Any, context: Any,
    limit: Any, factor: Any, drafted: Any, floor: Any, path: Any, noise: Any, out_tokens: Any, out_odds: Any,
) -> Any:  # fmt: skip
    """Find the longest match and follow the elected tokens from there.

    Args:
        limit: Most tokens wanted.
        factor: At most this many tokens per matched one, `drafted` included; 0 sets no such limit.
        drafted: Tokens at the end of `context` that are guesses themselves; they do not count as matched.
        floor: Stop before the probability of the path falls below this.
        path: Probability of the path so far.
        noise: (low word of the seed, high word, position of the first token, 1 if it is to be used), uint32.
        out_tokens, out_odds: (limit,) int32 and float64, filled with the tokens and their share of the votes.

    Returns:
        (match length, tokens drafted, sum of the path probabilities, whether the texts ended before anything else did).
    """
    found = np.empty(MAX_VOTES, np.int32)
    matched, votes = find(rows, heads, levels, scope, group, count, context, found)
    tokens, ballots = np.empty(MAX_VOTES, np.int32), np.empty(MAX_VOTES, np.int32)
    if factor > 0.0:
        limit = min(limit, np.int64(factor * max(matched - drafted, 0)) - drafted)
    length, score, noisy = 0, 0.0, noise[3] == 1
    while length < limit and votes > 0:
        key = (noise[0], noise[1], np.uint32(noise[2] + np.uint32(length)))
        token, ballot = _elect(rows, found, votes, key, tokens, ballots, noisy)
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
