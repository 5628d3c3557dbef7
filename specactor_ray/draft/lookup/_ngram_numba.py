"""The kernels of the `ngram` method: where did these tokens occur before, and what followed them?

A text is a ring of tokens; a text that is never overwritten is its special case. `tokens[p % capacity]` is the token at
position `p` of all that were ever written. Every position is chained to the previous one that follows the same `low`
tokens (the hash chains of LZ77):

    heads[bucket]         position + 1 of the newest token behind tokens of that hash, 0 without one
    links[p % capacity]   the position before `p` in its chain, -1 at the end

A chain leads to older positions only, so it has ended when it reaches `floor`, below which all is overwritten. A bucket
may hold positions behind other tokens; whatever is found is compared token by token.

An *occurrence* of a suffix is a position such that the `n` tokens before it equal the last `n` of the suffix, `low <= n
<= high`, and there is a token (no separator) at it: the guess.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.jit import kernel

SEPARATOR = -1
"""Stands between the pieces of a text; no token id equals it, so no match reaches across."""
OWN = -1
"""Owner of a request's own text."""

_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)

_jit: Any = kernel()


@_jit
def _place(position: Any, capacity: Any) -> Any:
    return position if position < capacity else position % capacity


@_jit
def _bucket(tokens: Any, end: Any, low: Any, owner: Any, buckets: Any) -> Any:
    """The bucket of the `low` tokens before position `end`."""
    h = np.uint64(owner + 2)
    for position in range(end - low, end):
        h = np.uint64(np.uint64(h + np.uint64(tokens[_place(position, len(tokens))] + 2)) * _FACTOR)
        h = np.uint64(h ^ np.uint64(h >> _SHIFT))
    return np.int64(np.uint64(h & np.uint64(buckets - 1)))


@_jit
def _link(tokens: Any, links: Any, heads: Any, floor: Any, position: Any, owner: Any, low: Any) -> None:
    place = _place(position, len(tokens))
    links[place] = -1
    if tokens[place] != SEPARATOR and position - low >= floor:
        bucket = _bucket(tokens, position, low, owner, len(heads))
        links[place] = heads[bucket] - 1
        heads[bucket] = position + 1


@_jit
def append(
    tokens: Any, owners: Any, links: Any, heads: Any, floor: Any, count: Any, text: Any, owner: Any, low: Any
) -> None:
    """Write a piece of text behind position `count`."""
    for position in range(count, count + len(text)):
        tokens[_place(position, len(tokens))], owners[_place(position, len(tokens))] = text[position - count], owner
        _link(tokens, links, heads, floor, position, owner, low)


@_jit
def _find(
    tokens: Any, owners: Any, links: Any, heads: Any, floor: Any, owner: Any,
    line: Any, end: Any, low: Any, high: Any, found: Any,
) -> Any:  # fmt: skip
    """(match length, how many): the occurrences of the end of `line[:end]` with the longest match, the latest first.

    Of the latest `len(found)` occurrences of its last `low` tokens the longest match counts. In a request's own text
    only the first is looked for.
    """
    longest, count, seen = 0, 0, 0
    if end < low:
        return longest, count
    position = heads[_bucket(line, end, low, owner, len(heads))] - 1
    while position >= floor + low and seen < len(found):
        if owner == OWN or owners[_place(position, len(tokens))] == owner:
            length, most = 0, min(high, end, position - floor)
            while length < most and tokens[_place(position - 1 - length, len(tokens))] == line[end - 1 - length]:
                length += 1
            seen += length >= low
            if length >= low and length > longest:
                longest, count = length, 0
            if length >= low and length == longest:
                found[count] = position
                count += 1
            if owner == OWN and longest == high:
                break
        position = links[_place(position, len(tokens))]
    return longest, count


@_jit
def _elect(tokens: Any, found: Any, count: Any) -> Any:
    """The latest position that holds the most frequent token; among equally frequent tokens the latest position."""
    winner, most = found[0], 0
    for i in range(count):
        votes = 0
        for j in range(count):
            votes += tokens[_place(found[i], len(tokens))] == tokens[_place(found[j], len(tokens))]
        if votes > most:
            winner, most = found[i], votes
    return winner


@_jit
def fill(
    lines: Any, known: Any, ends: Any, limits: Any, links: Any, heads: Any, indexed: Any,
    tokens: Any, owners: Any, history_links: Any, history_heads: Any, floor: Any, prompts: Any,
    slots: Any, low: Any, high: Any, candidates: Any,
) -> None:  # fmt: skip
    """Fill the windows of `slots` by the rule of `ngram.py`, after taking their new tokens into their indexes.

    Args:
        lines: `(slots, width)` int32; `known`, `ends` and `limits` `(slots,)` int32: see `MirrorTable`.
        links: `(slots, width)` int32, as `heads`: the chains of each request's own text.
        indexed: `(slots,)` int64: tokens of each line that are in its chains; 0 rebuilds them.
        tokens: As `owners`, `history_links`, `history_heads` and `floor`: the ring of `History`.
        prompts: `(slots,)` int64: owner of each request's outputs in it, `OWN` without a history.
        slots: int64.
        candidates: Occurrences that a look-up compares.
    """
    found = np.empty(candidates, np.int64)
    for slot in slots:
        line, prompt = lines[slot], prompts[slot]
        if indexed[slot] == 0:
            heads[slot, :] = 0
        for position in range(indexed[slot], known[slot]):
            _link(line, links[slot], heads[slot], 0, position, OWN, low)
        indexed[slot] = known[slot]
        end, limit = ends[slot], limits[slot]
        while end < limit:
            own, count = _find(line, owners, links[slot], heads[slot], 0, OWN, line, end, low, high, found)
            start, length = found[0], 0
            if prompt != OWN and own < high:  # else it could not be longer
                length, count = _find(
                    tokens, owners, history_links, history_heads, floor, prompt, line, end, low, high, found
                )
            if length > own:
                start = _elect(tokens, found, count)
                while end < limit and tokens[_place(start, len(tokens))] != SEPARATOR:
                    line[end] = tokens[_place(start, len(tokens))]
                    start += 1
                    end += 1
            elif own > 0:
                while end < limit:
                    line[end] = line[start]
                    start += 1
                    end += 1
            else:
                break
        ends[slot] = end
