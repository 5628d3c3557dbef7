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
_inlined: Any = kernel(inline="always")
"""For parts of a loop over rows: calls that count references to arrays take longer than the work."""

FREE = -1
REFUTED, ON_ARRIVAL, AT_COMMIT = range(3)


class Planes(NamedTuple):
    """Arrays of `table.RequestTable`, which documents them. They are here so that numba's cache notices a change."""

    generation: np.ndarray
    committed: np.ndarray
    output: np.ndarray
    steps: np.ndarray
    assigned: np.ndarray
    base: np.ndarray
    tail: np.ndarray
    length: np.ndarray
    branch_at: np.ndarray
    branch_length: np.ndarray
    branch_tail: np.ndarray
    method: np.ndarray
    evidence: np.ndarray
    drafts: np.ndarray
    outcomes: np.ndarray


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
    owners: Any, ats: Any, sizes: Any, branch_tokens: Any, table: Planes,
) -> Any:  # fmt: skip
    """Take in a batch of tails of the drafter in a seat.

    A tail is held against what was committed: equal as far as both reach, the rest is usable; different, the longest of
    its branches that is equal takes its place. That check alone makes loss, repetition and reordering harmless. Dropped
    is what claims more committed tokens than there are, has nothing left, or is older or smaller than the tail that is
    there: by its base, then by what is left of the main chain, then by the tokens of its branches.

    Args:
        seat: Of the drafter.
        rows, generations, bases, lengths, tokens: As in `messages.TailBatch`.
        owners, ats, sizes, branch_tokens: Columns of `messages.Branches`.
        table: Updated.

    Returns:
        bool `(n,)`: which tails are of requests that the drafter does not draft for.
    """
    generation, committed, output, assigned = table.generation, table.committed, table.output, table.assigned
    base, length, tail, outcomes = table.base, table.length, table.tail, table.outcomes
    flat, most, window = _flat(table), table.branch_at.shape[2], tail.shape[2]
    unknown, begin, last, at_last = np.zeros(len(rows), np.bool_), 0, 0, 0
    for i in range(len(rows)):
        row, first, size, b, at = rows[i], begin, lengths[i], last, at_last
        begin += size
        while last < len(owners) and owners[last] == i:
            at_last += sizes[last]
            last += 1
        if row < 0 or row >= len(generation) or generation[row] != generations[i] or not assigned[seat, row]:
            unknown[i] = True
            continue
        behind = committed[row] - bases[i]
        if behind < 0 or bases[i] < base[seat, row]:
            continue
        known, truth = min(behind, size), (output, row, bases[i])
        right = _agreed(tokens, first, truth, known)
        left, best = size - behind if right == known else 0, FREE
        if left <= 0:
            outcomes[REFUTED] += right < known
            best, place = _rescuer(ats, sizes, branch_tokens, b, last, at, 0, right, truth, behind)
            left = sizes[best] - (behind - right) if best != FREE else 0
        if behind > 0 and left == 0:
            continue
        mine = (seat * len(generation) + row) * most
        if bases[i] == base[seat, row]:
            more = _tokens_of(ats, sizes, b, last, behind) if best == FREE else 0
            held = _tokens_of(flat[0], flat[1], mine, mine + most, 0)
            if left < length[seat, row] or (left == length[seat, row] and more < held):
                continue
        left = min(left, window)
        base[seat, row], length[seat, row] = bases[i], left
        if best != FREE:
            outcomes[ON_ARRIVAL] += 1
            b = last  # no other branch agrees
            for k in range(left):
                tail[seat, row, k] = branch_tokens[place + behind - right + k]
        else:
            for k in range(left):
                tail[seat, row, k] = tokens[first + behind + k]
        if most > 0:
            _keep(ats, sizes, branch_tokens, b, last, at, behind, left, flat, mine, mine + most, window)
    return unknown


@_inlined
def _flat(table: Planes) -> Any:
    """`branch_at`, `branch_length` and `branch_tail` in one dimension."""
    at, size, tail = table.branch_at, table.branch_length, table.branch_tail
    return at.reshape(at.size), size.reshape(size.size), tail.reshape(tail.size)


@_inlined
def _agreed(tokens: Any, first: int, truth: Any, most: int) -> int:
    """How many of up to `most` tokens are those of the output, before the first that is not. `truth`: the outputs, and
    row and position in them."""
    (output, row, start), count = truth, 0
    while count < most and tokens[first + count] == output[row, start + count]:
        count += 1
    return count


@_inlined
def _tokens_of(ats: Any, sizes: Any, begin: int, end: int, least: int) -> int:
    """Tokens of those of the branches that leave their main chain at or past `least`."""
    total = 0
    for b in range(begin, end):
        total += sizes[b] if ats[b] >= least else 0
    return total


@_inlined
def _rescuer(
    ats: Any, sizes: Any, tokens: Any, begin: int, end: int, first: int, stride: int, right: int, truth: Any, count: int
) -> Any:
    """The branch that takes the place of a main chain of which `right` of the `count` tokens committed at `truth` are
    right: it leaves the chain there, agrees with all of them, reaches past them, and is the longest.

    Args:
        begin, end: Branches to look at.
        first, stride: Where their tokens begin, and how far apart; 0: they lie one after the other.

    Returns:
        Its number, or `FREE`, and where its tokens begin.
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
    """Keep branches in the places up to `last`: those that leave a tail at or past its first `behind` tokens, which are
    committed. `left`: tokens of the tail behind those."""
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
    """Append what a step committed to the output of each row, count what was verified, and judge every tail that was
    there by the new tokens.

    Evidence goes to (method, row), and to (method, range of output positions `bucket[i]`): hits in tries of draft
    tokens after right ones. A branch counts from the token after the commit that chose it.
    """
    rows, counts, tokens, seats, drafted, accepted = step
    committed, output, drafts, evidence = table.committed, table.output, table.drafts, table.evidence
    length, tail, method, steps, assigned = table.length, table.tail, table.method, table.steps, table.assigned
    flat, most, outcomes, first = _flat(table), table.branch_at.shape[2], table.outcomes, 0
    for i in range(len(rows)):
        row, fresh, part = rows[i], counts[i], bucket[i]
        steps[row] += 1
        if drafted[i] > 0:
            drafts[0, method[seats[i]], row] += drafted[i]
            drafts[1, method[seats[i]], row] += accepted[i]
        start = committed[row]
        for k in range(fresh):
            output[row, start + k] = tokens[first + k]
        for seat in range(len(method)):
            if not assigned[seat, row]:
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
            outcomes[REFUTED] += right < tested
            rest = have - fresh if right == tested else 0
            for k in range(rest):
                tail[seat, row, k] = tail[seat, row, fresh + k]
            length[seat, row] = max(rest, 0)
            if most > 0:
                mine = (seat * len(committed) + row) * most
                _branch(tail, length, seat, row, flat, mine, mine + most, right, (output, row, start), fresh, outcomes)
        committed[row] = start + fresh
        first += fresh


@_inlined
def _branch(
    tail: Any, length: Any, seat: int, row: int, flat: Any, begin: int, end: int, right: int, truth: Any, count: int,
    outcomes: Any,
) -> None:  # fmt: skip
    """Check the branches of a tail with `right` right tokens against `count` new tokens. Branches of the rest of the
    tail move with it; where no rest is left, the branch that agrees takes its place."""
    at, size, tokens = flat
    if length[seat, row] > 0:
        for b in range(begin, end):
            at[b] = max(at[b] - count, FREE)
        return
    window = tail.shape[2]
    best, place = _rescuer(at, size, tokens, begin, end, begin * window, window, right, truth, count)
    if best != FREE:
        outcomes[AT_COMMIT] += 1
        length[seat, row] = size[best] - (count - right)
        for k in range(length[seat, row]):
            tail[seat, row, k] = tokens[place + count - right + k]
    for b in range(begin, end):
        at[b] = FREE


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
