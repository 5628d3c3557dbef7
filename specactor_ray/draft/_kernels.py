"""Kernels of `chains.py`, compiled by numba: many rows in one call. They are in one file for the reason given in
`table/_kernels.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.sampling import candidates
from specactor_ray.table import _kernels as table_kernels
from specactor_ray.table._kernels import Texts, agreed, token_at

_jit: Any = kernel(sources=(candidates, table_kernels))

MAIN = -1
"""Number and place (the last one) of a row's main chain; branches have numbers from 0."""
FREE = -1
RANKS = candidates.MOST - 1
"""Number of alternatives kept per position: the candidates from the second on."""
GAPS = 8
"""Number of ranges of the gap between the first and the second score."""
_LEAST = 1e-4
"""Chance below which a chain is not extended."""
_PRIOR = np.array(
    [
        [0.3, 0.35, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95],
        [0.3, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.5],
        *([right] * GAPS for right in (0.18, 0.12, 0.1)),
    ]
)
"""`(RANKS + 1, GAPS)`: chance that a candidate is right where those before it are wrong, as measured with SmolLM2."""
_PRIOR_TRIES = 16.0
_FADE = 0.999
"""Weight that an observation loses with each message of commits."""


# ---- branches ----


class BranchArrays(NamedTuple):
    """Arrays of `BranchTable`, passed as those of `Texts`."""

    ats: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    others: np.ndarray
    gaps: np.ndarray
    opened: np.ndarray
    evidence: np.ndarray


@_jit
def chance(evidence: Any, gap: int, rank: int) -> float:
    """Chance that the candidate `rank` (0: the first) is right, given that those before it are wrong."""
    return (evidence[0, rank, gap] + _PRIOR_TRIES * _PRIOR[rank, gap]) / (evidence[1, rank, gap] + _PRIOR_TRIES)


@_jit
def settle(table: Any, texts: Any, main_rows: Any, rows: Any, befores: Any, ends: Any) -> Any:
    """See `BranchTable.settle`. Refuted or outdated branches are freed. Candidates are counted as right or wrong."""
    table, texts = BranchArrays(*table), Texts(*texts)
    freed, count = np.empty(table.ats.size, np.int64), 0
    table.evidence[:] = table.evidence * _FADE
    width, places = table.gaps.shape[2], table.ats.shape[1]
    for i in range(len(rows)):
        row, stop = rows[i], texts.lengths[rows[i]]
        tested = min(ends[i], stop)
        wrong = min(texts.kept[row], tested)
        for at in range(befores[i], wrong):
            _judge(table.evidence, table.gaps[row, MAIN, at % width], 0)
        best = FREE
        if wrong < tested:
            spot, rank, rest = wrong % width, 0, texts.lines[row, wrong:stop]
            while rank < RANKS and table.others[row, MAIN, spot, rank] != rest[0]:
                rank += 1
            _judge(table.evidence, table.gaps[row, MAIN, spot], rank + 1)
            for b in range(places):
                if table.ats[row, b] != wrong or (best != FREE and table.lengths[row, b] <= table.lengths[row, best]):
                    continue
                shared = min(table.lengths[row, b], len(rest))
                if agreed(table.tokens[row, b], rest, 0, 0, shared) == shared:
                    best = b
        if best != FREE:
            size = table.lengths[row, best]
            texts.kept[row] = wrong + size
            if wrong + size > stop:  # the commit has kept it, if it was published
                texts.length[row, 0] = wrong + size - stop
                for at in range(stop - wrong, size):
                    texts.tail[row, 0, at - (stop - wrong)] = table.tokens[row, best, at]
            table.rows[row, best], main_rows[row] = main_rows[row], table.rows[row, best]
            for at in range(wrong, wrong + size):
                spot = at % width
                table.gaps[row, MAIN, spot] = table.gaps[row, best, spot]
                table.others[row, MAIN, spot] = table.others[row, best, spot]
                table.opened[row, spot] = 0
        for b in range(places):
            if table.ats[row, b] != FREE and (wrong < tested or table.ats[row, b] < stop):
                freed[count], table.ats[row, b] = table.rows[row, b], FREE
                count += 1
    return freed[:count]


@_jit
def _judge(evidence: Any, gap: int, right: int) -> None:
    """Count candidate number `right` of a position as right; `RANKS + 1`: none was right. Positions without candidates
    are skipped."""
    if gap < 0:
        return
    for rank in range(min(right, RANKS) + 1):
        evidence[0, rank, gap] += rank == right
        evidence[1, rank, gap] += 1.0


@_jit
def plan(
    table: Any, texts: Any, tips: Any, longest: int, seconds: Any, reading: Any, ahead: Any, backlogs: Any, budget: int
) -> Any:
    """See `BranchTable.plan`. Returns columns of `Chains`, int32 `(4, n)`."""
    table, texts = BranchArrays(*table), Texts(*texts)
    limits = np.minimum(np.minimum(texts.lengths + texts.window, texts.limits), longest)
    late, running = np.flatnonzero(reading & (tips < limits)), np.flatnonzero(ahead)
    late = late[np.argsort(backlogs[late], kind="mergesort")]
    if table.ats.shape[1] == 0 or budget <= len(late):
        running = running[tips[running] < limits[running]]
        chosen = np.full((4, len(running)), MAIN, np.int32)
        chosen[0] = running
    else:
        chosen = _likeliest(table, texts.lengths, tips, limits, running, budget - len(late), seconds[len(late) :])
    chains, count = np.full((4, chosen.shape[1] + len(late)), FREE, np.int32), 0
    for i in range(chosen.shape[1]):
        if chosen[1, i] == MAIN and chosen[2, i] == FREE:
            chains[0, count] = chosen[0, i]
            count += 1
    chains[0, count : count + len(late)] = late
    count += len(late)
    chains[3, :count] = backlogs[chains[0, :count]]
    for i in range(chosen.shape[1]):
        row, b, at = chosen[0, i], chosen[1, i], chosen[2, i]
        if at != FREE:
            b = _open(table, row, at, chosen[3, i])
        if b != MAIN:
            chains[0, count], chains[1, count], chains[2, count], chains[3, count] = row, b, at, 1
            count += 1
    return chains[:, :count]


@_jit
def _likeliest(table: Any, known: Any, tips: Any, limits: Any, rows: Any, budget: int, seconds: Any) -> Any:
    """The most likely chains of `rows` for `BranchTable.plan`, int32 `(4, m)`, the most likely first: rows; numbers
    of chains, `MAIN` for a branch to be opened, too; its place in the line, else `FREE`; its candidate, from 1.

    The next token of a main chain is needed with the product of the chances of its tokens. That of a branch of
    candidate `f` at the main chain's token `i` is needed with (chance of the tokens before `i`) times (chance that `f`
    is the right one there) times (chance of the branch's further tokens).
    """
    places, width = table.ats.shape[1], table.gaps.shape[2]
    shares = np.zeros((GAPS + 1, 1 + RANKS))
    shares[FREE, 0] = 0.5  # no candidates were kept
    for gap in range(GAPS):
        wrong = 1.0
        for rank in range(1 + RANKS):
            shares[gap, rank] = wrong * chance(table.evidence, gap, rank)
            wrong -= shares[gap, rank]
    most = len(rows) * (1 + places + RANKS * width)
    found, worth, count, mains = np.full((4, most), MAIN, np.int32), np.empty(most), 0, 0
    needed = np.empty(width)
    for row in rows:
        end, limit, alive, has_place = tips[row], limits[row], 1.0, False
        for b in range(places):
            has_place = has_place or table.ats[row, b] == FREE
        for at in range(known[row], end):
            spot = at % width
            gap, needed[spot] = table.gaps[row, MAIN, spot], alive
            for rank in range(1, 1 + RANKS):
                worth[count] = alive * shares[gap, rank]
                is_new = has_place and table.opened[row, spot] >> (rank - 1) & 1 == 0 and at + 1 < limit
                if is_new and worth[count] > _LEAST and table.others[row, MAIN, spot, rank - 1] >= 0:
                    found[0, count], found[2, count], found[3, count] = row, at, rank
                    count += 1
            alive *= shares[gap, 0]
        if end < limit:
            found[0, count], worth[count] = row, alive
            count += 1
            mains += 1
        for b in range(places):
            at, size = table.ats[row, b], table.lengths[row, b]
            if at == FREE or at >= end or at + size >= limit:
                continue
            worth[count] = needed[at % width] * shares[table.gaps[row, MAIN, at % width], table.ranks[row, b]]
            for place in range(at + 1, at + size):
                worth[count] *= shares[table.gaps[row, b, place % width], 0]
            if worth[count] > _LEAST:
                found[0, count], found[1, count] = row, b
                count += 1
    best = np.argsort(-worth[:count])[: max(budget, mains)]
    if len(seconds) > 0:
        best = best[: _most_per_second(worth[best], mains, seconds)]
    return found[:, best]


@_jit
def _most_per_second(worth: Any, least: int, seconds: Any) -> int:
    """Number of chains, at least `least` and the first ones of `worth`, with the most needed tokens per second."""
    needed, rate, most = 0.0, 0.0, 0
    for i in range(len(worth)):
        needed += worth[i]
        per_second = needed / seconds[min(i + 1, len(seconds) - 1)]
        if i < least or per_second > rate:
            rate, most = per_second, i + 1
    return most


@_jit
def _open(table: Any, row: int, at: int, rank: int) -> int:
    """Open a branch. Returns its number, or `MAIN` where no place is free."""
    spot = at % table.gaps.shape[2]
    for b in range(table.ats.shape[1]):
        if table.ats[row, b] == FREE:
            table.ats[row, b], table.lengths[row, b], table.ranks[row, b] = at, 1, rank
            table.tokens[row, b, 0] = table.others[row, MAIN, spot, rank - 1]
            table.gaps[row, b], table.others[row, b] = FREE, FREE
            table.opened[row, spot] |= 1 << (rank - 1)
            return b
    return MAIN


@_jit
def read(
    table: Any, texts: Any, tips: Any, origins: Any, cached: Any, rows: Any, numbers: Any, counts: Any, cache_rows: Any
) -> Any:
    """See `BranchTable.read`; `cached`: tokens of each row of the cache."""
    table, texts = BranchArrays(*table), Texts(*texts)
    tokens, ends, stop = np.empty(counts.sum(), np.int32), np.empty(len(rows), np.int64), 0
    complete = np.ones(len(rows), np.bool_)
    for i in range(len(rows)):
        row, b, begin, stop = rows[i], numbers[i], stop, stop + counts[i]
        if b == MAIN:
            first, ends[i] = origins[row] + cached[cache_rows[i]], tips[row]
            complete[i] = first + counts[i] == ends[i]
            for at in range(counts[i]):
                tokens[begin + at] = token_at(texts, row, first + at)
        else:
            size = table.lengths[row, b]
            tokens[begin], ends[i] = table.tokens[row, b, size - 1], table.ats[row, b] + size
    return tokens, ends, complete


@_jit
def append(table: Any, texts: Any, tips: Any, rows: Any, numbers: Any, tokens: Any, gaps: Any) -> Any:
    """See `BranchTable.append`."""
    table, texts = BranchArrays(*table), Texts(*texts)
    width, changed = table.gaps.shape[2], np.ones(len(rows), np.bool_)
    for i in range(len(rows)):
        row, b = rows[i], numbers[i]
        if tokens[i, 0] < 0 or (b != MAIN and table.ats[row, b] == FREE):
            continue
        if b == MAIN:
            at, known = tips[row], texts.lengths[row]
            changed[i] = at >= known + texts.length[row, 0] or texts.tail[row, 0, at - known] != tokens[i, 0]
            if changed[i]:
                texts.tail[row, 0, at - known], texts.length[row, 0] = tokens[i, 0], at + 1 - known
            tips[row], table.opened[row, at % width] = at + 1, 0
        else:
            size = table.lengths[row, b]
            at = table.ats[row, b] + size
            table.tokens[row, b, size], table.lengths[row, b] = tokens[i, 0], size + 1
        spot = at % width
        table.gaps[row, b, spot] = gaps[i]
        for rank in range(tokens.shape[1] - 1):
            table.others[row, b, spot, rank] = tokens[i, 1 + rank]
    return changed


@_jit
def publish(table: Any, texts: Any, rows: Any) -> None:
    """See `BranchTable.publish`."""
    table, texts = BranchArrays(*table), Texts(*texts)
    for row in rows:
        known, place = texts.lengths[row], 1
        texts.length[row, 1:] = 0
        for b in range(table.ats.shape[1]):
            at, size = table.ats[row, b], table.lengths[row, b]
            if known <= at < known + texts.length[row, 0] and size > 1 and place < texts.tail.shape[1]:
                tail = texts.tail[row, place]
                texts.length[row, place] = min(at - known + size, len(tail))
                tail[: at - known] = texts.tail[row, 0, : at - known]
                for k in range(min(size, len(tail) - (at - known))):
                    tail[at - known + k] = table.tokens[row, b, k]
                place += 1
