"""The loops behind `table.py` and `policy.py`, compiled by numba: ragged work over (drafter, row, position).

All kernels stay in one file on purpose: numba's on-disk cache notices changes of the file a function is in, not of the
files it calls into. None of them starts threads; all release the GIL. Arrays are those of `table.RequestTable`: axis 0
of three is the drafter's seat, axis 1 the request's row, axis 2 the draft position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.jit import kernel

_jit: Any = kernel()


class Planes(NamedTuple):
    """Arrays of `table.RequestTable`, which documents them. They are here so that numba's cache notices a change."""

    committed: np.ndarray
    output: np.ndarray
    steps: np.ndarray
    assigned: np.ndarray
    tail: np.ndarray
    length: np.ndarray
    method: np.ndarray
    evidence: np.ndarray
    drafts: np.ndarray


class Committed(NamedTuple):
    """What a step did to `n` requests."""

    rows: np.ndarray
    """int32 `(n,)`, as all but `tokens`."""
    counts: np.ndarray
    """Tokens committed."""
    tokens: np.ndarray
    """int32, those of all rows one after the other."""
    seats: np.ndarray
    """Whose tail was verified; -1: nobody's."""
    drafted: np.ndarray
    """How many of its tokens were verified, and right."""
    accepted: np.ndarray


@_jit
def chances(
    totals: Any, evidence: Any, prior: Any, weight: float, ends: Any, table: Any, committed: Any, rows: Any
) -> Any:
    """Chance that a draft token is right, `(methods, rows)`: that of the row, drawn to that of its range of positions,
    to that of its method, and to the prior.

    Args:
        totals: `(2, methods)` hits and tries.
        evidence: `(2, methods, ranges)` the same by range of output positions.
        prior: `(methods,)`.
        weight: Tries for which each of them counts.
        ends: `(ranges - 1,)` positions at which ranges end.
        table: `(2, methods, rows of the table)` hits and tries of each row.
        committed: By row of the table.
    """
    result = np.empty((len(prior), len(rows)))
    for i in range(len(rows)):
        row, part = rows[i], 0
        while part < len(ends) and ends[part] <= committed[row]:
            part += 1
        for method in range(len(prior)):
            chance = (totals[0, method] + weight * prior[method]) / (totals[1, method] + weight)
            chance = (evidence[0, method, part] + weight * chance) / (evidence[1, method, part] + weight)
            result[method, i] = (table[0, method, row] + weight * chance) / (table[1, method, row] + weight)
    return result


@_jit
def untold(rows: Any, told: Any, committed: Any, output: Any) -> Any:
    """Output tokens behind the first `told` of each row: int32 lengths, and all tokens. They count as told then."""
    lengths = np.empty(len(rows), np.int32)
    for i in range(len(rows)):
        lengths[i] = committed[rows[i]] - told[rows[i]]
    tokens, end = np.empty(lengths.sum(), np.int32), 0
    for i in range(len(rows)):
        row = rows[i]
        for k in range(told[row], committed[row]):
            tokens[end] = output[row, k]
            end += 1
        told[row] = committed[row]
    return lengths, tokens


@_jit
def take_tails(
    seat: int, rows: Any, generations: Any, bases: Any, lengths: Any, tokens: Any,
    generation: Any, committed: Any, output: Any, assigned: Any, all_bases: Any, all_lengths: Any, all_tails: Any,
) -> Any:  # fmt: skip
    """Take in a batch of tails of the drafter in a seat.

    A tail is held against what was committed: equal as far as both reach, the rest is usable; different, it is dropped.
    That check alone makes loss, repetition and reordering harmless. Dropped is as well what claims more committed
    tokens than there are, and what is older or shorter than the tail that is there.

    Args:
        seat: Of the drafter.
        rows, generations, bases, lengths, tokens: As in `messages.TailBatch`.
        generation, committed, output, assigned, all_bases, all_lengths, all_tails: Arrays of `table.RequestTable`.

    Returns:
        bool `(n,)`: which tails are of requests that the drafter does not draft for.
    """
    base, length, tail = all_bases[seat], all_lengths[seat], all_tails[seat]
    unknown, begin = np.zeros(len(rows), np.bool_), 0
    for i in range(len(rows)):
        row, first, size = rows[i], begin, lengths[i]
        begin += size
        if row < 0 or row >= len(generation) or generation[row] != generations[i] or not assigned[seat, row]:
            unknown[i] = True
            continue
        behind = committed[row] - bases[i]
        left = size - behind
        is_old = bases[i] < base[row] or (bases[i] == base[row] and left < length[row])
        if behind < 0 or (behind > 0 and left <= 0) or is_old:
            continue
        agrees = True
        for k in range(min(behind, size)):
            agrees = agrees and tokens[first + k] == output[row, bases[i] + k]
        if not agrees:
            continue
        left = min(left, tail.shape[1])
        for k in range(left):
            tail[row, k] = tokens[first + behind + k]
        length[row], base[row] = left, bases[i]
    return unknown


@_jit
def commit(step: Committed, bucket: Any, table: Planes, all_evidence: Any) -> None:
    """Append what a step committed to the output of each row, count what was verified, and judge every tail that was
    there by the new tokens.

    Evidence goes to (method, row), and to (method, range of output positions `bucket[i]`): hits in tries of draft
    tokens whose predecessors were right. Tails that agree keep the rest, the others go.
    """
    rows, counts, tokens, seats, drafted, accepted = step
    committed, output, drafts, evidence = table.committed, table.output, table.drafts, table.evidence
    length, tail, method = table.length, table.tail, table.method
    first = 0
    for i in range(len(rows)):
        row, fresh, part = rows[i], counts[i], bucket[i]
        table.steps[row] += 1
        if drafted[i] > 0:
            drafts[0, method[seats[i]], row] += drafted[i]
            drafts[1, method[seats[i]], row] += accepted[i]
        start = committed[row]
        for k in range(fresh):
            output[row, start + k] = tokens[first + k]
        for seat in range(len(method)):
            if not table.assigned[seat, row]:
                continue
            have, kind = length[seat, row], method[seat]
            if have == 0:
                continue
            tested, right = min(have, fresh), 0
            while right < tested and tail[seat, row, right] == tokens[first + right]:
                right += 1
            tried = min(right + 1, tested)
            evidence[0, kind, row] += right
            evidence[1, kind, row] += tried
            all_evidence[0, kind, part] += right
            all_evidence[1, kind, part] += tried
            rest = have - fresh if right == tested else 0
            for k in range(rest):
                tail[seat, row, k] = tail[seat, row, fresh + k]
            length[seat, row] = max(rest, 0)
        committed[row] = start + fresh
        first += fresh


@_jit
def tally(supplied: Any, drafted: Any, accepted: Any) -> Any:
    """Tokens supplied, rows with any, tokens drafted, tokens accepted, and int64 `(2, most)`: how many rows reach 1, 2,
    ... drafted tokens, and accepted ones."""
    tokens, rows, most = 0, 0, 0
    for i in range(len(drafted)):
        tokens += supplied[i]
        rows += supplied[i] > 0
        most = max(most, drafted[i])
    reached = np.zeros((2, most), np.int64)
    for i in range(len(drafted)):
        reached[0, : drafted[i]] += 1
        reached[1, : accepted[i]] += 1
    return tokens, rows, reached[0].sum(), reached[1].sum(), reached


_BINS = 192
_PER_NAT = 24.0
"""Gains are sorted into bins a factor of exp(1/24), or 4%, wide; those below exp(-8) are left out."""


@_jit
def choose(probability: Any, supply: Any, room: Any, curve: Any, seats: Any, lengths: Any) -> float:
    """Draft tokens to verify per row, so that expected committed tokens per second are the most.

    A row whose drafter has `n` tokens commits `1 + sum_{i=1..n} p^i` tokens on average, so its i-th draft token gains
    `p^i`. These gains fall with `i`, and the cost depends only on how many positions there are in all: for every total
    the best choice takes the largest gains, and it is enough to compare the totals. Gains are compared by bins.

    Args:
        probability, supply: `(seats, rows)`.
        room: `(rows,)` most draft tokens of each row.
        curve: `curve[j]`: seconds of the step with `j` draft tokens in all, whatever precedes it included.
        seats, lengths: `(rows,)`, filled: whose tail is best for the row (-1: nobody's), and how much of it pays.

    Returns:
        Expected committed tokens per second.
    """
    total_gain, total_count = np.zeros(_BINS), np.zeros(_BINS, np.int64)
    rows, most = len(room), len(curve) - 1
    for row in range(rows):
        best, score = -1, 0.0
        for seat in range(len(probability)):
            p, n = probability[seat, row], min(supply[seat, row], room[row])
            if n <= 0 or p <= 0.0:
                continue
            expected = n if p >= 1.0 else p * (1.0 - p**n) / (1.0 - p)
            if expected > score:
                best, score = seat, expected
        seats[row], lengths[row] = best, 0
        if best < 0:
            continue
        p, gain, place = min(probability[best, row], 1.0), 1.0, 0.0
        step = -np.log(p) * _PER_NAT
        for _ in range(min(supply[best, row], room[row])):
            gain *= p
            place += step
            if place >= _BINS:
                break
            total_gain[int(place)] += gain
            total_count[int(place)] += 1
    tokens, count, best_rate, limit = float(rows), 0, rows / curve[0], -1
    for place in range(_BINS):
        if total_count[place] == 0:
            continue
        tokens += total_gain[place]
        count += total_count[place]
        rate = tokens / curve[min(count, most)]
        if rate > best_rate:
            best_rate, limit = rate, place
    for row in range(rows):
        if seats[row] < 0 or limit < 0:
            continue  # `limit`: the last bin that pays
        step = -np.log(min(probability[seats[row], row], 1.0)) * _PER_NAT
        lengths[row] = min(supply[seats[row], row], room[row])
        if step > 0.0:
            lengths[row] = min(lengths[row], int(np.ceil((limit + 1) / step)) - 1)
    return best_rate


@_jit
def best_rounds(probability: Any, supply: Any, longest: Any, room: Any, curve: Any, token_s: float, most: int) -> int:
    """Compare `choose` now with `choose` after 1, 2, ..., `most` rounds of drafting, each of which takes `token_s` and
    lengthens every tail by one token, up to `longest` `(seats, rows)`. Returns the best number of rounds."""
    best_rate, rounds = 0.0, 0
    seats, lengths = np.empty(len(room), np.int32), np.empty(len(room), np.int32)
    for number in range(most + 1):
        grown = np.minimum(supply + number, longest)
        rate = choose(probability, grown, room, curve + number * token_s, seats, lengths)
        if rate > best_rate:
            best_rate, rounds = rate, number
    return rounds
