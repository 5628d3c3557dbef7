"""Kernels of the table and of the verify lengths, compiled by numba: ragged loops over (drafter, row, position).

All kernels and their constants are in one file because numba's on-disk cache detects changes of a function's own file
only. A kernel that Python calls is called once in `drafting.warm_up`; `tests/processes/test_warm_up.py` checks it.
Arrays are those of `table.RequestTable`: by seat of the drafter, row of the request, draft position.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel

_jit: Any = kernel()
_inlined: Any = kernel(inline="always")
"""Decorator for parts of a loop over rows: a call, which counts references to arrays, takes longer than the work."""

FREE = -1
"""Value for no branch, and for no seat."""
REFUTED, ON_ARRIVAL, AT_COMMIT = range(6, 9)

Planes = namedtuple(
    "Planes",
    "generation committed output steps assigned base tail length branch_at branch_length branch_tail method evidence "
    "drafts counts reached",
)
"""Arrays of `table.RequestTable`, named here so that numba's cache detects a change."""


class Committed(NamedTuple):
    """Results of a step for `n` requests, int32 `(n,)`: numbers of committed tokens, and these row by row; seats of the
    verified tails (or `FREE`), and numbers of their verified and of their right tokens."""

    rows: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    seats: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray


@_jit
def untold(rows: Any, told: Any, committed: Any, output: Any) -> Any:
    """Output tokens after the first `told` of each row, which is updated: int32 lengths, and all tokens."""
    lengths, end = np.empty(len(rows), np.int32), 0
    for i in range(len(rows)):
        lengths[i] = committed[rows[i]] - told[rows[i]]
    tokens = np.empty(lengths.sum(), np.int32)
    for row in rows:
        for k in range(told[row], committed[row]):
            tokens[end] = output[row, k]
            end += 1
        told[row] = committed[row]
    return lengths, tokens


@_jit
def take_tails(
    seat: int, rows: Any, generations: Any, bases: Any, lengths: Any, tokens: Any,
    owners: Any, ats: Any, sizes: Any, branch_tokens: Any, table: Planes,
) -> Any:  # fmt: skip
    """See `RequestTable.take`; `owners` to `branch_tokens` are the branches.

    A tail is compared with the committed tokens. If all of them agree, the rest is usable; else the longest branch that
    agrees takes its place. A tail is dropped if it claims more committed tokens than there are, has no tokens left, or
    is older or shorter than the present tail: by base, then by the rest of the main chain.
    """
    generation, committed, base, length, tail = table.generation, table.committed, table.base, table.length, table.tail
    flat, most, window = _flat(table), table.branch_at.shape[2], tail.shape[2]
    unknown, end, last, at_last = np.zeros(len(rows), np.bool_), 0, 0, 0
    for i in range(len(rows)):
        row, first, size, b, at = rows[i], end, lengths[i], last, at_last
        end += size
        while last < len(owners) and owners[last] == i:
            at_last += sizes[last]
            last += 1
        if row < 0 or row >= len(generation) or generation[row] != generations[i] or not table.assigned[seat, row]:
            unknown[i] = True
            continue
        behind = committed[row] - bases[i]
        if behind < 0 or bases[i] < base[seat, row]:
            continue
        known, truth = min(behind, size), (table.output, row, bases[i])
        right = _agreed(tokens, first, truth, known)
        left, best = size - behind if right == known else 0, FREE
        if left <= 0:
            table.counts[REFUTED] += right < known
            best, place = _rescuer(ats, sizes, branch_tokens, b, last, at, 0, right, truth, behind)
            left = sizes[best] - (behind - right) if best != FREE else 0
        if behind > 0 and left == 0:
            continue
        if bases[i] == base[seat, row] and left < length[seat, row]:
            continue
        left = min(left, window)
        base[seat, row], length[seat, row] = bases[i], left
        if best != FREE:
            table.counts[ON_ARRIVAL] += 1
            b = last  # no other branch agrees
            for k in range(left):
                tail[seat, row, k] = branch_tokens[place + behind - right + k]
        else:
            for k in range(left):
                tail[seat, row, k] = tokens[first + behind + k]
        if most > 0:
            mine = (seat * len(generation) + row) * most
            _keep(ats, sizes, branch_tokens, b, last, at, behind, left, flat, mine, mine + most, window)
    return unknown


@_inlined
def _flat(table: Planes) -> Any:
    """`branch_at`, `branch_length` and `branch_tail` in one dimension."""
    at, size, tail = table.branch_at, table.branch_length, table.branch_tail
    return at.reshape(at.size), size.reshape(size.size), tail.reshape(tail.size)


@_inlined
def _agreed(tokens: Any, first: int, truth: Any, most: int) -> int:
    """Number of tokens from `first` on, at most `most`, that agree with `truth`: (outputs, row, position)."""
    (output, row, start), count = truth, 0
    while count < most and tokens[first + count] == output[row, start + count]:
        count += 1
    return count


@_inlined
def _rescuer(
    ats: Any, sizes: Any, tokens: Any, begin: int, end: int, first: int, stride: int, right: int, truth: Any, count: int
) -> Any:
    """The branch that takes the place of a main chain with `right` right tokens of the `count` tokens committed at
    `truth`: the longest one that leaves the chain there, agrees with all of them and reaches past them.

    `first`, `stride`: begin of the branches' tokens, and their distance (0: consecutive). Returns its number, or
    `FREE`, and the begin of its tokens.
    """
    best, place, more = FREE, 0, count - right
    output, row, start = truth
    for b in range(begin, end):
        is_better = ats[b] == right and sizes[b] > more and (best == FREE or sizes[b] > sizes[best])
        if is_better and _agreed(tokens, first, (output, row, start + right), more) == more:
            best, place = b, first
        first += stride if stride > 0 else sizes[b]
    return best, place


@_inlined
def _keep(
    ats: Any, sizes: Any, tokens: Any, begin: int, end: int, first: int, behind: int, left: int,
    flat: Any, place: int, last: int, window: int,
) -> None:  # fmt: skip
    """Keep branches in the places up to `last` that leave a tail in the `left` tokens after its first `behind`, which
    are committed."""
    at, size, tail = flat
    for b in range(begin, end):
        if behind <= ats[b] <= behind + left and place < last:
            at[place], size[place] = ats[b] - behind, min(sizes[b], window)
            for k in range(size[place]):
                tail[place * window + k] = tokens[first + k]
            place += 1
        first += sizes[b]
    for free in range(place, last):
        at[free] = FREE


@_jit
def commit(step: Committed, bucket: Any, table: Planes, all_evidence: Any) -> None:
    """Append committed tokens, count verified ones, and compare every tail with the new tokens. Hits and tries of draft
    tokens are added by (method, row) and by (method, range of positions `bucket[i]`). A branch counts from the token
    after the commit that chose it."""
    rows, lengths, tokens, seats, drafted, accepted = step
    committed, output, drafts, evidence = table.committed, table.output, table.drafts, table.evidence
    length, tail, method, counts, reached = table.length, table.tail, table.method, table.counts, table.reached
    (at, sizes, branch_tokens), most, window = _flat(table), table.branch_at.shape[2], tail.shape[2]
    first = 0
    counts[0] += len(rows)  # in the order of `COUNTS`
    counts[1] += len(tokens)
    for i in range(len(rows)):
        row, fresh, part = rows[i], lengths[i], bucket[i]
        table.steps[row] += 1
        if seats[i] != FREE:
            counts[2] += length[seats[i], row]
            counts[3] += length[seats[i], row] > 0
            counts[4] += drafted[i]
            counts[5] += accepted[i]
            drafts[0, method[seats[i]], row] += drafted[i]
            drafts[1, method[seats[i]], row] += accepted[i]
            for k in range(min(drafted[i], window)):
                reached[0, k] += 1
                reached[1, k] += k < accepted[i]
        start = committed[row]
        for k in range(fresh):
            output[row, start + k] = tokens[first + k]
        for seat in range(len(method)):
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
            counts[REFUTED] += right < tested
            left = max(have - fresh, 0) if right == tested else 0
            for k in range(left):
                tail[seat, row, k] = tail[seat, row, fresh + k]
            begin = (seat * len(committed) + row) * most
            moved = fresh if left > 0 else window + 1  # branches move with the rest of the main chain
            if left == 0 and most > 0:
                truth = (output, row, start)
                best, place = _rescuer(
                    at, sizes, branch_tokens, begin, begin + most, begin * window, window, right, truth, fresh
                )
                if best != FREE:
                    counts[AT_COMMIT] += 1
                    left = sizes[best] - (fresh - right)
                    for k in range(left):
                        tail[seat, row, k] = branch_tokens[place + fresh - right + k]
            for b in range(begin, begin + most):
                at[b] = max(at[b] - moved, FREE)
            length[seat, row] = left
        committed[row] = start + fresh
        first += fresh


_BINS = 192
_PER_NAT = 24.0
"""Bins per nat: gains are counted in bins of a factor of exp(1/24), or 4%; those below exp(-8) are left out."""


@_jit
def choose_lengths(probability: Any, supply: Any, room: Any, curve: Any, seats: Any, lengths: Any) -> float:
    """Choose the draft tokens to verify per row with the most expected committed tokens per second.

    The i-th draft token of a row gains `p^i` tokens, and the cost depends only on the total number of positions: for
    every total the best choice takes the largest gains, so it is enough to compare totals. Gains are counted in bins.

    `probability` and `supply` are `(seats, rows)`, `room` is `(rows,)`: most draft tokens of each row. `curve[j]`:
    seconds of the step with `j` draft tokens in total, preceding work included. Fills `seats` and `lengths`, `(rows,)`:
    the seat of the best tail or `FREE`, and the number of its tokens that pay. Returns the expected committed tokens
    per second.
    """
    rows, most = len(room), len(curve) - 1
    gains, counts, steps = np.zeros(_BINS), np.zeros(_BINS, np.int64), np.empty(rows)
    for row in range(rows):
        seats[row], lengths[row], best, score = FREE, 0, 1.0, 0.0
        for seat in range(len(probability)):
            p, n = min(probability[seat, row], 1.0), min(supply[seat, row], room[row])
            if n > 0 and p > 0.0:
                expected = n if p == 1.0 else p * (1.0 - p**n) / (1.0 - p)
                if expected > score:
                    seats[row], lengths[row], best, score = seat, n, p, expected
        steps[row], gain, place = -np.log(best) * _PER_NAT, 1.0, 0.0
        for _ in range(lengths[row]):
            gain *= best
            place += steps[row]
            if place >= _BINS:
                break
            gains[int(place)] += gain
            counts[int(place)] += 1
    tokens, count, best_rate, end = float(rows), 0, rows / curve[0], 0
    for place in range(_BINS):
        if counts[place] == 0:
            continue
        tokens += gains[place]
        count += counts[place]
        rate = tokens / curve[min(count, most)]
        if rate > best_rate:
            best_rate, end = rate, place + 1  # bins before `end` pay
    for row in range(rows):
        if end == 0:
            lengths[row] = 0
        elif steps[row] > 0.0:
            lengths[row] = min(lengths[row], np.ceil(end / steps[row]) - 1)
    return best_rate


@_jit
def best_rounds(
    probability: Any, supply: Any, longest: Any, room: Any, curve: Any, token_s: float, most: int, hurdle: float
) -> int:
    """The best number of rounds: compare `choose_lengths` now, at `hurdle` times its rate, with that after 1, 2, ...,
    `most` rounds of drafting, each of which takes `token_s` and lengthens every tail by one token, up to `longest`
    `(seats, rows)`."""
    best_rate, rounds = 0.0, 0
    seats, lengths = np.empty(len(room), np.int32), np.empty(len(room), np.int32)
    for number in range(most + 1):
        grown = np.minimum(supply + number, longest)
        rate = choose_lengths(probability, grown, room, curve + number * token_s, seats, lengths)
        rate *= hurdle if number == 0 else 1.0
        if rate > best_rate:
            best_rate, rounds = rate, number
    return rounds
