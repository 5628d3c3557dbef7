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

FREE = -1
"""Value for no seat."""
REFUTED, RESCUED = 6, 7
"""Places in `COUNTS`."""

Planes = namedtuple(
    "Planes",
    "generation committed output assigned base tail length method evidence counts reached",
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
def unsent(rows: Any, sent: Any, committed: Any, output: Any) -> Any:
    """Output tokens after the first `sent` of each row, which is updated: int32 lengths, and all tokens."""
    lengths, end = np.empty(len(rows), np.int32), 0
    for i in range(len(rows)):
        lengths[i] = committed[rows[i]] - sent[rows[i]]
    tokens = np.empty(lengths.sum(), np.int32)
    for row in rows:
        for k in range(sent[row], committed[row]):
            tokens[end] = output[row, k]
            end += 1
        sent[row] = committed[row]
    return lengths, tokens


@_jit
def take_tails(seat: int, rows: Any, generations: Any, bases: Any, lengths: Any, tokens: Any, table: Planes) -> Any:
    """See `RequestTable.take`. Of the tails of a request, those that agree with the committed tokens and reach past
    them are kept, in order. All are dropped if they claim more committed tokens than there are, or if the first that
    agrees is older or shorter than the present one: by base, then by its rest."""
    generation, committed, output = table.generation, table.committed, table.output
    base, length, tail, places, window = table.base, table.length, table.tail, table.tail.shape[2], table.tail.shape[3]
    unknown, end, place = np.zeros(len(rows), np.bool_), 0, 0
    for i in range(len(rows)):
        row, first, size = rows[i], end, lengths[i]
        end += size
        is_first = i == 0 or row != rows[i - 1]
        place = 0 if is_first else place
        if row < 0 or row >= len(generation) or generation[row] != generations[i] or not table.assigned[seat, row]:
            unknown[i] = True
            continue
        behind, right = committed[row] - bases[i], 0
        if behind < 0 or bases[i] < base[seat, row] or place == places:
            continue
        known = min(behind, size)
        while right < known and tokens[first + right] == output[row, bases[i] + right]:
            right += 1
        table.counts[REFUTED] += is_first and right < known
        left = min(size - behind, window) if right == behind else 0
        if place == 0:
            if left == 0 and behind > 0:
                continue
            if bases[i] == base[seat, row] and left < length[seat, row, 0]:
                place = places
                continue
            table.counts[RESCUED] += not is_first
            base[seat, row] = bases[i]
            for k in range(places):
                length[seat, row, k] = 0
        if left > 0:
            length[seat, row, place] = left
            for k in range(left):
                tail[seat, row, place, k] = tokens[first + behind + k]
            place += 1
    return unknown


@_jit
def commit(step: Committed, bucket: Any, table: Planes, all_evidence: Any) -> None:
    """Append committed tokens, count verified ones, and keep the tails that agree with the new tokens and reach past
    them. Hits and tries of draft tokens are added by (method, row) and by (method, range of positions `bucket[i]`),
    those of the first tails only."""
    rows, lengths, tokens, seats, drafted, accepted = step
    committed, output, evidence = table.committed, table.output, table.evidence
    length, tail, method, counts, reached = table.length, table.tail, table.method, table.counts, table.reached
    places, window, first = tail.shape[2], tail.shape[3], 0
    counts[0] += len(rows)  # in the order of `COUNTS`
    counts[1] += len(tokens)
    for i in range(len(rows)):
        row, fresh, part = rows[i], lengths[i], bucket[i]
        if seats[i] != FREE:
            counts[2] += length[seats[i], row, 0]
            counts[3] += length[seats[i], row, 0] > 0
            counts[4] += drafted[i]
            counts[5] += accepted[i]
            for k in range(min(drafted[i], window)):
                reached[0, k] += 1
                reached[1, k] += k < accepted[i]
        start = committed[row]
        for k in range(fresh):
            output[row, start + k] = tokens[first + k]
        for seat in range(len(method)):
            kind, place = method[seat], 0
            for k in range(places):
                have, right = length[seat, row, k], 0
                if have == 0:
                    break
                tested = min(have, fresh)
                while right < tested and tail[seat, row, k, right] == tokens[first + right]:
                    right += 1
                if k == 0:
                    tried = min(right + 1, tested)
                    evidence[0, kind, row] += right
                    evidence[1, kind, row] += tried
                    all_evidence[0, kind, part] += right
                    all_evidence[1, kind, part] += tried
                    counts[REFUTED] += right < tested
                length[seat, row, k] = 0
                if right == fresh and have > fresh:
                    counts[RESCUED] += place == 0 and k > 0
                    length[seat, row, place] = have - fresh
                    for at in range(have - fresh):
                        tail[seat, row, place, at] = tail[seat, row, k, fresh + at]
                    place += 1
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
