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

TAKEN, STALE, MISMATCH, AHEAD, UNKNOWN, TRUNCATED, MALFORMED = range(7)
"""What becomes of a tail that arrives; places in the counts that `take_tails` returns.

Stale: nothing past the committed prefix, or older or shorter than what is there. Mismatch: differs from what was
committed meanwhile. Ahead: claims more committed tokens than there are. Unknown: of a request that is not open, or not
with this drafter. Truncated: of those taken, longer than allowed, and cut."""
FATES = ("taken", "stale", "mismatch", "ahead", "unknown", "truncated", "malformed")
"""Their names, in this order, for counters."""


class Planes(NamedTuple):
    """Arrays of `table.RequestTable`, which documents them. They are here so that numba's cache notices a change."""

    generation: np.ndarray
    committed: np.ndarray
    output: np.ndarray
    totals: np.ndarray
    assigned: np.ndarray
    base: np.ndarray
    tail: np.ndarray
    length: np.ndarray
    seat_drafted: np.ndarray
    seat_accepted: np.ndarray
    method: np.ndarray
    evidence: np.ndarray


@_jit
def take_tails(
    seat: int,
    rows: Any,
    generations: Any,
    bases: Any,
    lengths: Any,
    tokens: Any,
    vocab_size: int,
    table: Planes,
) -> Any:
    """Take in a batch of tails of the drafter in a seat. Returns counts by what became of them.

    A tail is held against what was committed: equal as far as both reach, the rest is usable; different, it is dropped.
    That check alone makes loss, repetition and reordering harmless.
    """
    counts = np.zeros(len(FATES), np.int64)
    generation, committed, output = table.generation, table.committed, table.output
    base, length, tail = table.base[seat], table.length[seat], table.tail[seat]
    width = tail.shape[1]
    begin = 0
    for i in range(len(rows)):
        row, first, size = rows[i], begin, lengths[i]
        begin += size
        if row < 0 or row >= len(generation) or generation[row] != generations[i] or not table.assigned[seat, row]:
            counts[UNKNOWN] += 1
            continue
        behind = committed[row] - bases[i]
        if behind < 0:
            counts[AHEAD] += 1
            continue
        good = True
        for k in range(size):
            good = good and 0 <= tokens[first + k] < vocab_size
        if not good:
            counts[MALFORMED] += 1
            continue
        agrees = True
        for k in range(min(behind, size)):
            agrees = agrees and tokens[first + k] == output[row, bases[i] + k]
        if not agrees:
            counts[MISMATCH] += 1
            continue
        left = size - behind
        if behind > 0 and left <= 0:
            counts[STALE] += 1
            continue
        if base[row] > bases[i] or (base[row] == bases[i] and left < length[row]):
            counts[STALE] += 1
            continue
        if left > width:
            counts[TRUNCATED] += 1
            left = width
        for k in range(left):
            tail[row, k] = tokens[first + behind + k]
        length[row], base[row] = left, bases[i]
        counts[TAKEN] += 1
    return counts


@_jit
def commit(
    rows: Any,
    counts: Any,
    tokens: Any,
    seats: Any,
    drafted: Any,
    accepted: Any,
    supplied: Any,
    bucket: Any,
    table: Planes,
    all_evidence: Any,
) -> int:
    """Append the next `counts[i]` tokens to the output of `rows[i]`, and judge every tail that was there by them.

    Evidence goes to (method, row), and to (method, range of output positions `bucket[i]`): hits in tries of draft
    tokens whose predecessors were right. Tails that agree keep the rest, the others go. Returns how many were refuted.

    Counts what was verified of the tail of `seats[i]` (-1: nobody's), in `totals` by row too, and fills `supplied[i]`
    with how many of its tokens were there.
    """
    committed, output, totals, evidence = table.committed, table.output, table.totals, table.evidence
    length, tail, method = table.length, table.tail, table.method
    refuted, first = 0, 0
    for i in range(len(rows)):
        row, fresh, part = rows[i], counts[i], bucket[i]
        supplied[i] = length[seats[i], row] if seats[i] >= 0 else 0
        totals[0, row] += 1
        totals[1, row] += drafted[i]
        totals[2, row] += accepted[i]
        if drafted[i] > 0:
            table.seat_drafted[seats[i], row] += drafted[i]
            table.seat_accepted[seats[i], row] += accepted[i]
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
            if right < tested:
                refuted += 1
                length[seat, row] = 0
            else:
                rest = have - fresh
                for k in range(rest):
                    tail[seat, row, k] = tail[seat, row, fresh + k]
                length[seat, row] = max(rest, 0)
        committed[row] = start + fresh
        first += fresh
    return refuted


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
