"""Kernels of the verify lengths, compiled by numba: ragged loops over (drafter, row, position).

Kernels that call each other and their constants are in one file because numba's on-disk cache detects changes of a
function's own file only. A kernel that Python calls is called once in `drafting.warm_up`;
`tests/processes/test_warm_up.py` checks it. Arrays are those of `RequestTable`: by seat of the drafter, row of the
request, draft position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.table import _kernels as table_kernels
from specactor_ray.table._kernels import FREE

_jit: Any = kernel(sources=(table_kernels,))

_PARTS = 256
"""Parts of the range of gains, and again of the part that decides: 1/65536 is the least difference that counts."""
_SEVERAL = -2
"""In place of a seat: more than one tail matters."""


@_jit
def _add(gains: Any, begin: int, end: int, sign: int, counts: Any, sums: Any) -> None:
    """Count these gains in their parts, or with `sign` -1 remove them."""
    for i in range(begin, end):
        part = min(int((1.0 - gains[i]) * _PARTS), _PARTS - 1)
        counts[part] += sign
        sums[part] += sign * gains[i]


@_jit
def _longest(probability: Any, supply: Any, room: Any, row: int) -> Any:
    """Seat of the longest tail, or `FREE`; its usable tokens; whether no shorter tail is more often right."""
    seat, most, p, alone = FREE, 0, 0.0, True
    for one in range(len(probability)):
        n = min(supply[one, row], room[row])
        if n > 0 and probability[one, row] > 0.0 and (n > most or (n == most and probability[one, row] > p)):
            seat, most, p = one, n, probability[one, row]
    for one in range(len(probability)):
        alone = alone and (probability[one, row] <= p or min(supply[one, row], room[row]) <= 0)
    return seat, most, alone


@_jit
def _hull(probability: Any, supply: Any, room: Any, row: int, gains: Any, best: Any, ends: Any, slopes: Any) -> int:
    """Gains of a row with several tails: slopes of the concave hull of the most expected tokens by length, since a
    longer tail may begin to pay late. Returns their number. `best`, `ends`, `slopes`: `(window + 1,)`, overwritten."""
    longest, knots, begin, best[0], ends[0] = 0, 0, 0, 0.0, 0
    for seat in range(len(probability)):
        p, n, gain, total = min(probability[seat, row], 1.0), min(supply[seat, row], room[row]), 1.0, 0.0
        for i in range(1, n + 1):
            gain *= p
            total += gain
            if i > longest or total > best[i]:
                best[i] = total
        longest = max(longest, n)
    for i in range(1, longest + 1):
        while knots > 0 and (best[i] - best[ends[knots]]) > slopes[knots] * (i - ends[knots]):
            knots -= 1
        slope = (best[i] - best[ends[knots]]) / (i - ends[knots])
        knots += 1
        ends[knots], slopes[knots] = i, slope
    for knot in range(1, knots + 1):
        if slopes[knot] <= 0.0:
            break
        gains[begin : ends[knot]] = min(slopes[knot], 1.0)
        begin = ends[knot]
    return begin


@_jit
def _update(
    probability: Any, supply: Any, room: Any, gains: Any, sizes: Any, seats: Any, counts: Any, sums: Any
) -> None:
    """Bring the gains of all rows up to date, so that they fall in each row: `gains` `(rows, window)` and their number
    `sizes`, `seats` of the tails they are of, or `_SEVERAL`; `counts` and `sums` of the gains in each part."""
    width = gains.shape[1] + 1
    best, ends, slopes = np.empty(width), np.empty(width, np.int64), np.empty(width)
    for row in range(len(room)):
        (seat, most, alone), size = _longest(probability, supply, room, row), sizes[row]
        if not alone or seat != seats[row] or most < size:
            _add(gains[row], 0, size, -1, counts, sums)
            size = 0
        sizes[row], seats[row] = most, seat if alone else _SEVERAL
        if not alone:
            sizes[row] = _hull(probability, supply, room, row, gains[row], best, ends, slopes)
        elif most > size:
            p, gain = min(probability[seat, row], 1.0), gains[row, size - 1] if size > 0 else 1.0
            for i in range(size, most):
                gain *= p
                gains[row, i] = gain
        _add(gains[row], size, sizes[row], 1, counts, sums)


@_jit
def _best_total(rows: int, counts: Any, sums: Any, curve: Any) -> Any:
    """The best rate, and the number of draft tokens that has it: every number is compared, with the largest gains."""
    tokens, count, most = float(rows), 0, len(curve) - 1
    best_rate, best_count = tokens / curve[0], 0
    for part in range(_PARTS):  # the ends of parts first, so that few parts need a look inside
        if counts[part] > 0:
            tokens += sums[part]
            count += counts[part]
            rate = tokens / curve[min(count, most)]
            if rate > best_rate:
                best_rate, best_count = rate, count
    tokens, count = float(rows), 0
    for part in range(_PARTS):
        size = counts[part]
        if size > 1 and tokens + sums[part] > best_rate * curve[min(count + 1, most)]:
            gain = sums[part] / size
            for i in range(1, size):
                if tokens + i * gain > best_rate * curve[min(count + i, most)]:
                    best_rate, best_count = (tokens + i * gain) / curve[min(count + i, most)], count + i
        if size > 0:
            tokens += sums[part]
            count += size
    return best_rate, best_count


@_jit
def _price(gains: Any, sizes: Any, counts: Any, wanted: int) -> Any:
    """The range of the smallest of the `wanted` largest gains, `low < gain <= high`, and their number."""
    part, inner = 0, np.zeros(_PARTS, np.int64)
    if wanted == 0:
        return 2.0, 2.0, 0
    while part < _PARTS - 1 and counts[part] < wanted:
        wanted -= counts[part]
        part += 1
    if counts[part] == wanted:
        return 1.0 - (part + 1) / _PARTS, 2.0, gains.size
    for row in range(len(sizes)):
        for i in range(sizes[row]):
            place = ((1.0 - gains[row, i]) * _PARTS - part) * _PARTS
            if place >= _PARTS and part < _PARTS - 1:
                break
            if place >= 0.0:
                inner[min(int(place), _PARTS - 1)] += 1
    place = 0
    while place < _PARTS - 1 and inner[place] < wanted:
        wanted -= inner[place]
        place += 1
    low = 1.0 - (part + (place + 1) / _PARTS) / _PARTS
    return low, low + 1.0 / (_PARTS * _PARTS), wanted


@_jit
def choose_lengths(probability: Any, supply: Any, room: Any, curve: Any, seats: Any, lengths: Any) -> float:
    """Choose the draft tokens to verify per row with the most expected committed tokens per second.

    The i-th draft token of a tail gains `p^i` tokens, and the cost depends only on the total number of positions: for
    every total the best choice takes the largest gains, so it is enough to compare totals, whatever the curve's shape.

    `probability` and `supply` are `(seats, rows)`, `room` is `(rows,)`: most draft tokens of each row. `curve[j]`:
    seconds of the step with `j` draft tokens in total, never falling. Fills `seats` and `lengths`, `(rows,)`: the seat
    of the tail or `FREE`, and the number of its tokens that pay. Returns the expected committed tokens per second.
    """
    rows, counts, sums = len(room), np.zeros(_PARTS, np.int64), np.zeros(_PARTS)
    gains, sizes = np.empty((rows, supply.max())), np.zeros(rows, np.int64)
    seats[:] = FREE
    _update(probability, supply, room, gains, sizes, seats, counts, sums)
    low, high, left = _price(gains, sizes, counts, _best_total(rows, counts, sums, curve)[1])
    tokens, total = float(rows), 0
    for row in range(rows):
        most, expected = 0, 0.0
        while most < sizes[row] and gains[row, most] > low and (gains[row, most] > high or left > 0):
            left -= gains[row, most] <= high
            expected += gains[row, most]
            most += 1
        if seats[row] == _SEVERAL:
            seats[row], most, expected = _pick(probability, supply, room, row, most)
        lengths[row] = most
        tokens += expected
        total += most
    return tokens / curve[min(total, len(curve) - 1)]


@_jit
def _pick(probability: Any, supply: Any, room: Any, row: int, most: int) -> Any:
    """Seat of the tail with the most expected tokens at this length, its tokens up to there, and the expected ones."""
    best, seat, length = -1.0, FREE, 0
    for one in range(len(probability)):
        p, n, gain, total = min(probability[one, row], 1.0), min(supply[one, row], room[row], most), 1.0, 0.0
        for _ in range(n):
            gain *= p
            total += gain
        if supply[one, row] > 0 and total > best:
            best, seat, length = total, one, n
    return seat, length, best


@_jit
def best_rounds(
    probability: Any, supply: Any, longest: Any, room: Any, curve: Any, token_s: Any, most: int, hurdle: float
) -> int:
    """The best number of rounds: compare the best rate now, times `hurdle`, with that after 1, 2, ..., `most` rounds of
    drafting. Each lengthens every tail by one token, up to `longest` `(seats, rows)`, and takes `token_s` `(seats,)` of
    the drafters that have a tail to lengthen."""
    rows, counts, sums = len(room), np.zeros(_PARTS, np.int64), np.zeros(_PARTS)
    gains, sizes, seats = np.empty((rows, longest.max())), np.zeros(rows, np.int64), np.full(rows, np.int32(FREE))
    seconds, grown, best_rate, rounds = curve.copy(), supply.copy(), 0.0, 0
    for number in range(most + 1):
        if number > 0:
            for seat in range(len(supply)):
                grows = False
                for row in range(rows):
                    if grown[seat, row] < longest[seat, row]:
                        grown[seat, row] += 1
                        grows = True
                if grows:
                    seconds += token_s[seat]
        _update(probability, grown, room, gains, sizes, seats, counts, sums)
        rate = _best_total(rows, counts, sums, seconds)[0] * (hurdle if number == 0 else 1.0)
        if rate > best_rate:
            best_rate, rounds = rate, number
    return rounds
