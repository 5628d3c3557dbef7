"""Kernels of `RequestTable`, compiled by numba: ragged loops over (drafter, row, tail).

Kernels that call each other and their constants are in one file because numba's on-disk cache detects changes of a
function's own file only. A kernel that Python calls is called once in `verify/drafting.py` (`warm_up`);
`tests/processes/test_warm_up.py` checks it.
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

UNCHANGED = 2**31 - 1
"""Value of `RequestTable.kept` where no commit has come since the drafter's last turn."""

TableArrays = namedtuple(
    "TableArrays",
    "generation prompts lengths lines assigned base tail length kept judged method evidence counts reached",
)
"""Arrays of `RequestTable`, named here so that numba's cache detects a change."""


class Texts(NamedTuple):
    """Arrays of `RequestTable` for one drafter, and its window. Kernels take them as a plain tuple, which numba unpacks
    in half the time."""

    lines: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    length: np.ndarray
    tail: np.ndarray
    kept: np.ndarray
    window: int


class Committed(NamedTuple):
    """Results of a step for `n` requests, int32 `(n,)` each. The table already has the committed tokens."""

    rows: np.ndarray
    counts: np.ndarray
    """Numbers of committed tokens, at least 1."""
    seats: np.ndarray
    """Seats of the verified tails, or `FREE`."""
    drafted: np.ndarray
    """Numbers of verified draft tokens."""
    accepted: np.ndarray
    """Numbers of right draft tokens among these."""


@_jit
def unsent(rows: Any, sent: Any, prompts: Any, lengths: Any, lines: Any) -> Any:
    """Output tokens after the first `sent` of each row, which is updated: int32 lengths, and all tokens."""
    counts, end = np.empty(len(rows), np.int32), 0
    for i in range(len(rows)):
        counts[i] = lengths[rows[i]] - prompts[rows[i]] - sent[rows[i]]
    tokens = np.empty(counts.sum(), np.int32)
    for row in rows:
        for at in range(prompts[row] + sent[row], lengths[row]):
            tokens[end] = lines[row, at]
            end += 1
        sent[row] = lengths[row] - prompts[row]
    return counts, tokens


@_jit
def take_tails(
    seat: int, rows: Any, generations: Any, bases: Any, lengths: Any, tokens: Any, table: TableArrays
) -> Any:
    """See `RequestTable.take`. Keep the tails of a request that agree with the committed tokens and reach past them, in
    order. Ignore all if their base is ahead of the committed tokens, or if the first matching tail is not newer (base)
    or longer than the stored one."""
    generation, prompts, lines = table.generation, table.prompts, table.lines
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
        behind, right = table.lengths[row] - prompts[row] - bases[i], 0
        if behind < 0 or bases[i] < base[seat, row] or place == places:
            continue
        known = min(behind, size)
        while right < known and tokens[first + right] == lines[row, prompts[row] + bases[i] + right]:
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


ROW_TRIES, METHOD_TRIES = 64.0, 256.0
"""Memory for a request, and for a method: the draft tokens that count in the end."""
_RECENT = 16.0
"""Share of the newest of them, which replace the others where they differ beyond chance."""
_CHANCE = 13.0
"""Squared difference, in variances, beyond chance."""


@_jit
def _observe(evidence: Any, right: int, tried: int, memory: float) -> bool:
    """Add draft tokens to hits and tries, and to the newest hits and tries, `(4,)`. Returns whether the acceptance has
    changed, so that only the newest count from now on."""
    for at, most in ((0, memory), (2, max(memory / _RECENT, float(tried)))):
        keep = max(1.0 - tried / most, 0.0)
        evidence[at] = keep * evidence[at] + right
        evidence[at + 1] = keep * evidence[at + 1] + tried
    tries, newest = evidence[1], evidence[3]
    rate = (evidence[0] + 0.5) / (tries + 1.0)
    spread = newest * rate * (1.0 - rate) / (2.0 - min(tried * _RECENT / memory, 1.0))  # of an exponential mean
    changed = (evidence[2] - newest * rate) ** 2 > _CHANCE * spread
    if changed:
        evidence[:2] = evidence[2:]
    return bool(changed)


@_jit
def _remember(rows: Any, fresh_of: Any, sums: Any, evidence: Any, ranges: Any, methods: Any) -> None:
    """Add the hits and tries of a step, `sums`, to those of methods and ranges, and forget older ones. `fresh_of`:
    whether the row had draft tokens of the method."""
    methods[4] += 1
    for kind in range(sums.shape[1]):
        right, tried = sums[0, kind].sum(), sums[1, kind].sum()
        if tried == 0:
            continue
        changed = _observe(methods[:4, kind], right, tried, METHOD_TRIES)
        methods[4, kind] *= not changed
        for part in range(sums.shape[2]):
            keep = 0.0 if changed else max(1.0 - sums[1, kind, part] / METHOD_TRIES, 0.0)
            for at in range(2):
                ranges[at, kind, part] = keep * ranges[at, kind, part] + sums[at, kind, part]
        # Other requests forget as fast, and at once what is no longer true of all.
        keep = 0.0 if changed else max(1.0 - tried / fresh_of[:, kind].sum() / ROW_TRIES, 0.0)
        for i in range(len(rows)):
            if changed or not fresh_of[i, kind]:
                for at in range(4):
                    evidence[at, kind, rows[i]] *= keep


@_jit
def _settle_row(row: int, start: int, fresh: int, line: Any, length: Any, tail: Any, kept: Any, judged: Any) -> Any:
    """Keep the tails of a row, arrays of one seat, that agree with its `fresh` newest tokens, from `start` on, and
    reach past them. Returns the length of the first tail, how many of its tokens are right, and whether another tail
    has taken its place."""
    place, first, hits, same, rescued = 0, 0, 0, start, False
    for k in range(tail.shape[1]):
        have, right = length[row, k], 0
        if have == 0:
            break
        tested = min(have, fresh)
        while right < tested and tail[row, k, right] == line[start + right]:
            right += 1
        if k == 0:
            first, hits = have, right
            same = start + (right if right < tested else have)
            judged[0] += min(right + 1, tested)
            judged[1] += right
        length[row, k] = 0
        if right == fresh and have > fresh:
            rescued = rescued or (place == 0 and k > 0)
            length[row, place] = have - fresh
            for at in range(have - fresh):
                tail[row, place, at] = tail[row, k, fresh + at]
            place += 1
    kept[row] = min(kept[row], same)
    return first, hits, rescued


@_jit
def follow(rows: Any, starts: Any, lengths: Any, tokens: Any, table: TableArrays) -> Any:
    """See `RequestTable.follow`: of a table with one drafter, in the first seat."""
    taken, end = np.zeros(len(rows), np.bool_), 0
    length, tail, kept, judged = table.length[0], table.tail[0], table.kept[0], table.judged[0]
    for i in range(len(rows)):
        row, begin, end = rows[i], end, end + lengths[i]
        if row < 0 or row >= len(table.generation) or table.generation[row] == 0 or starts[i] < 0:
            continue
        line, before, start = table.lines[row], table.lengths[row], table.prompts[row] + starts[i]
        stop = start + lengths[i]
        shared = min(before, stop)
        taken[i] = start <= before and agreed(line, tokens[begin:end], start, start, shared) == shared
        if taken[i] and stop > before:
            line[before:stop] = tokens[begin + before - start : end]
            table.lengths[row] = stop
            _settle_row(row, before, stop - before, line, length, tail, kept, judged)
    return taken


@_jit
def token_at(texts: Any, row: Any, at: Any) -> Any:
    """Token `at` of a row's text: its line, then its first tail."""
    return texts.lines[row, at] if at < texts.lengths[row] else texts.tail[row, 0, at - texts.lengths[row]]


@_jit
def moves(known_generations: Any, rows: Any, generations: Any, kept: Any) -> Any:
    """Find rows whose known request has left, and among `rows` those whose text has changed and those with a new
    request."""
    mine, gone = np.zeros(len(known_generations), np.bool_), np.empty(len(known_generations), np.int32)
    moved, new = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    counts = np.zeros(3, np.int64)
    for row in rows:
        if known_generations[row] != generations[row]:
            new[counts[2]] = row
            counts[2] += 1
        else:
            mine[row] = True
            if kept[row] != UNCHANGED:
                moved[counts[1]] = row
                counts[1] += 1
    for row in range(len(known_generations)):
        if known_generations[row] != 0 and not mine[row]:
            gone[counts[0]] = row
            counts[0] += 1
    return gone[: counts[0]].copy(), moved[: counts[1]].copy(), new[: counts[2]].copy()


@_jit
def agreed(line: Any, tokens: Any, start: Any, begin: Any, stop: Any) -> Any:
    """Index of the first token of `line[begin:stop]` that differs from `tokens`, which belong at `start`; or `stop`."""
    for at in range(begin, stop):
        if line[at] != tokens[at - start]:
            return at
    return stop


@_jit
def publish(seat: int, rows: Any, vocab_size: int, table: TableArrays) -> None:
    """See `RequestTable.publish`."""
    length, tail = table.length, table.tail
    for row in rows:
        table.base[seat, row] = table.lengths[row] - table.prompts[row]
        for k in range(tail.shape[2]):
            for at in range(length[seat, row, k]):
                if not 0 <= tail[seat, row, k, at] < vocab_size:
                    length[seat, row, k] = at
                    break


@_jit
def collect(seat: int, rows: Any, table: TableArrays) -> Any:
    """See `RequestTable.tails`."""
    length, tail = table.length, table.tail
    counts, most = np.ones(len(rows), np.int32), len(rows) * tail.shape[2]
    lengths, tokens, count, end = np.empty(most, np.int32), np.empty(most * tail.shape[3], np.int32), 0, 0
    for i in range(len(rows)):
        for k in range(tail.shape[2]):
            size = length[seat, rows[i], k]
            if k > 0 and size == 0:
                break
            counts[i] = k + 1
            lengths[count] = size
            tokens[end : end + size] = tail[seat, rows[i], k, :size]
            count += 1
            end += size
    return counts, lengths[:count].copy(), tokens[:end].copy()


@_jit
def settle(step: Committed, bucket: Any, table: TableArrays, ranges: Any, methods: Any) -> None:
    """Count verified tokens, and keep the tails that agree with the newly committed tokens and reach past them. Hits
    and tries of draft tokens are added by (method, row) and by (method, range of positions `bucket[i]`), those of the
    first tails only. The first loop is about the verified tail of each row; the second about the first tail of each
    seat, verified or not."""
    rows, commits, seats, drafted, accepted = step
    evidence, length, method, counts, reached = (
        table.evidence, table.length, table.method, table.counts, table.reached,
    )  # fmt: skip
    window = table.tail.shape[3]
    sums, fresh_of = np.zeros((2, *ranges.shape[1:]), np.int64), np.zeros((len(rows), evidence.shape[1]), np.bool_)
    counts[0] += len(rows)  # in the order of `COUNTS`
    counts[1] += commits.sum()
    for i in range(len(rows)):
        row = rows[i]
        if seats[i] != FREE:
            counts[2] += length[seats[i], row, 0]
            counts[3] += length[seats[i], row, 0] > 0
            counts[4] += drafted[i]
            counts[5] += accepted[i]
            for k in range(min(drafted[i], window)):
                reached[0, k] += 1
                reached[1, k] += k < accepted[i]
    for seat in range(len(method)):
        kind, assigned, of_kind = method[seat], table.assigned[seat], evidence[:, method[seat]]
        mine, tail, kept, judged = length[seat], table.tail[seat], table.kept[seat], table.judged[seat]
        for i in range(len(rows)):
            row, fresh = rows[i], commits[i]
            if not assigned[row]:
                continue
            had, right, rescued = _settle_row(
                row, table.lengths[row] - fresh, fresh, table.lines[row], mine, tail, kept, judged
            )
            counts[RESCUED] += rescued
            if had > 0:
                tested = min(had, fresh)
                tried = min(right + 1, tested)
                _observe(of_kind[:, row], right, tried, ROW_TRIES)
                fresh_of[i, kind] = True
                sums[0, kind, bucket[i]] += right
                sums[1, kind, bucket[i]] += tried
                counts[REFUTED] += right < tested
    _remember(rows, fresh_of, sums, evidence, ranges, methods)
