"""The kernels behind `branches.py`, compiled by numba. In one file for the reason that `spec/_kernels.py` gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.draft._mirror_numba import Lines
from specactor_ray.jit import kernel
from specactor_ray.sampling import candidates

_jit: Any = kernel(sources=(candidates,))

MAIN = -1
"""Number of the main chain of a slot; branches have numbers from 0."""
FREE = -1
RANKS = candidates.MOST - 1
"""Alternatives kept per position: the candidates from the second on."""
GAPS = 8
"""Ranges of the gap between the first and the second score."""
_LEAST = 1e-4
"""Chance below which a chain is not drafted on."""
_PRIOR = np.array(
    [
        [0.3, 0.35, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95],
        [0.3, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.5],
        *([right] * GAPS for right in (0.18, 0.12, 0.1)),
    ]
)
"""`(RANKS + 1, GAPS)`: chance that a candidate is right where those before it are wrong, as measured with SmolLM2."""
_PRIOR_TRIES = 16.0


class Planes(NamedTuple):
    """Arrays of `BranchTable`, which documents them. They are handed over as those of `Lines`."""

    ats: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    others: np.ndarray
    gaps: np.ndarray
    branch_others: np.ndarray
    branch_gaps: np.ndarray
    opened: np.ndarray
    evidence: np.ndarray


@_jit
def chance(evidence: Any, gap: int, rank: int) -> float:
    """Chance that the candidate `rank` (0: the first) is right, given that those before it are wrong."""
    return (evidence[0, rank, gap] + _PRIOR_TRIES * _PRIOR[rank, gap]) / (evidence[1, rank, gap] + _PRIOR_TRIES)


@_jit
def settle(
    table: Any,
    mirror: Any,
    fade: float,
    main_rows: Any,
    slots: Any,
    starts: Any,
    lengths: Any,
    tokens: Any,
    counts: Any,
) -> Any:
    """Hold branches against commits, before `MirrorTable.commit` of the same arguments.

    Where a main chain is refuted and a branch agrees, the branch takes its place: its tokens in the line, its row in
    `main_rows`. Branches that are refuted, or left behind, are freed. Candidates are judged.

    Returns:
        Rows of the cache that are free now, int64. `counts` `(2,)`: refuted main chains and branches that took their
        place with tokens past the commit are added.
    """
    table, mirror = Planes(*table), Lines(*mirror)
    freed, count = np.empty(table.ats.size, np.int64), 0
    table.evidence[:] = table.evidence * fade
    width, places, end = table.gaps.shape[1], table.ats.shape[1], 0
    for i in range(len(slots)):
        slot, begin, end = slots[i], end, end + lengths[i]
        if slot < 0 or slot >= len(table.ats) or slot >= len(mirror.known) or mirror.known[slot] < 0:
            continue
        start, known = mirror.prompts[slot] + starts[i], mirror.known[slot]
        stop, last, line = start + lengths[i], mirror.ends[slot], mirror.lines[slot]
        if start > known or stop <= known:
            continue
        fits = True
        for at in range(start, known):
            fits = fits and line[at] == tokens[begin + at - start]
        if not fits:
            continue
        agreed = known
        while agreed < min(last, stop) and line[agreed] == tokens[begin + agreed - start]:
            _judge(table.evidence, table.gaps[slot, agreed % width], 0)
            agreed += 1
        refuted, best = agreed < min(last, stop), FREE
        if refuted:
            right, spot = tokens[begin + agreed - start], agreed % width
            rank = 0
            while rank < RANKS and table.others[slot, spot, rank] != right:
                rank += 1
            _judge(table.evidence, table.gaps[slot, spot], rank + 1)
            counts[0] += 1
            for b in range(places):
                if table.ats[slot, b] != agreed:
                    continue
                size, agrees = table.lengths[slot, b], True
                for k in range(min(size, stop - agreed)):
                    agrees = agrees and table.tokens[slot, b, k] == tokens[begin + agreed - start + k]
                if agrees and (best == FREE or size > table.lengths[slot, best]):
                    best = b
        if best != FREE:
            size = table.lengths[slot, best]
            counts[1] += agreed + size > stop
            # `MirrorTable.commit` counts the branch as a tail that was right; the main chain was wrong.
            agreeing = min(agreed + size, stop) - known
            mirror.judged[0] += agreed - known + 1 - agreeing
            mirror.judged[1] += agreed - known - agreeing
            line[agreed : agreed + size] = table.tokens[slot, best, :size]
            mirror.ends[slot] = agreed + size
            table.rows[slot, best], main_rows[slot] = main_rows[slot], table.rows[slot, best]
            for at in range(agreed, agreed + size):
                spot = at % width
                table.gaps[slot, spot] = table.branch_gaps[slot, best, spot]
                table.others[slot, spot] = table.branch_others[slot, best, spot]
                table.opened[slot, spot] = 0
        for b in range(places):
            if table.ats[slot, b] != FREE and (refuted or table.ats[slot, b] < stop):
                freed[count], table.ats[slot, b] = table.rows[slot, b], FREE
                count += 1
    return freed[:count]


@_jit
def _judge(evidence: Any, gap: int, right: int) -> None:
    """Candidate number `right` of a position was right; `RANKS + 1`: none was. Positions without candidates are left
    out."""
    if gap < 0:
        return
    for rank in range(min(right, RANKS) + 1):
        evidence[0, rank, gap] += rank == right
        evidence[1, rank, gap] += 1.0


@_jit
def release(table: Any, slots: Any) -> Any:
    """Free all branches of slots and drop their candidates. Returns their rows of the cache, int64."""
    table = Planes(*table)
    places = table.ats.shape[1]
    rows, count = np.empty(len(slots) * places, np.int64), 0
    for slot in slots:
        for b in range(places):
            if table.ats[slot, b] != FREE:
                rows[count], table.ats[slot, b] = table.rows[slot, b], FREE
                count += 1
        table.gaps[slot], table.opened[slot] = FREE, 0
    return rows[:count]


@_jit
def plan(
    table: Any,
    mirror: Any,
    tips: Any,
    longest: int,
    seconds: Any,
    reading: Any,
    ahead: Any,
    backlogs: Any,
    budget: int,
) -> Any:
    """Choose the chains of the next forward: see `BranchTable.plan`.

    A main chain of `n` tokens needs its next one with the product of their chances. A branch of candidate `f` at the
    main chain's token `i` needs its next one with (chance of the tokens before `i`) times (chance that token `i` is
    wrong) times (chance that `f` is right then) times (chance of the branch's further tokens).

    Returns:
        Columns of `Chains`, int32 `(4, m)`.
    """
    table, mirror = Planes(*table), Lines(*mirror)
    limits = np.minimum(np.minimum(mirror.known + mirror.windows, mirror.lasts), longest)
    late, running = np.flatnonzero(reading & (tips < limits)), np.flatnonzero(ahead)
    late = late[np.argsort(backlogs[late], kind="mergesort")]
    if table.ats.shape[1] == 0 or budget <= len(late):
        running = running[tips[running] < limits[running]]
        chosen, mains = np.full((4, len(running)), FREE, np.int32), len(running)
        chosen[0] = running
    else:
        chosen, mains = _likeliest(table, mirror.known, tips, limits, running, budget - len(late), seconds[len(late) :])
        _open_branches(table, chosen)
    chains, count = np.full((4, chosen.shape[1] + len(late)), MAIN, np.int32), 0
    for i in range(chosen.shape[1] + 1):
        if i == mains:
            chains[0, count : count + len(late)] = late
            count += len(late)
        if i < chosen.shape[1] and (i < mains or chosen[1, i] != MAIN):
            chains[0, count], chains[1, count], chains[2, count] = chosen[0, i], chosen[1, i], chosen[2, i]
            count += 1
    for i in range(count):
        chains[3, i] = 1 if chains[1, i] != MAIN else backlogs[chains[0, i]]
    return chains[:, :count]


@_jit
def _likeliest(table: Any, known: Any, tips: Any, limits: Any, slots: Any, budget: int, seconds: Any) -> Any:
    """The `budget` most likely chains of `slots`, and in any case as many as there are main chains with room. With
    `seconds`, of a forward with 0, 1, ... chains, only as many of them as bring most needed tokens per second.

    Returns:
        int32 `(4, m)`, main chains first, then branches, the most likely first: slots; numbers of chains; for a branch
        to be opened the place where it begins, else `FREE`; its candidate, from 1. How many of them are main chains.
    """
    places, width = table.ats.shape[1], table.gaps.shape[1]
    most = len(slots) * (1 + places + RANKS * width)
    found, worth, count, mains = np.empty((4, most), np.int32), np.empty(most), 0, 0
    running = np.empty(places)
    for slot in slots:
        end, limit, alive, free = tips[slot], limits[slot], 1.0, 0
        for b in range(places):
            running[b] = 0.0
            free += table.ats[slot, b] == FREE
        for at in range(known[slot], end):
            spot = at % width
            gap = table.gaps[slot, spot]
            if gap < 0:
                alive *= 0.5  # no candidates were kept
                continue
            right = chance(table.evidence, gap, 0)
            wrong = alive * (1.0 - right)
            for rank in range(RANKS):
                share = wrong * chance(table.evidence, gap, rank + 1)
                wrong -= share
                is_open = table.opened[slot, spot] >> rank & 1
                if is_open:
                    for b in range(places):
                        if table.ats[slot, b] == at and table.ranks[slot, b] == rank + 1:
                            running[b] = share
                elif free > 0 and share > _LEAST and at + 1 < limit and table.others[slot, spot, rank] >= 0:
                    found[0, count], found[1, count] = slot, places
                    found[2, count], found[3, count] = at, rank + 1
                    worth[count] = share
                    count += 1
            alive *= right
        if end < limit:
            found[0, count], found[1, count], found[2, count], found[3, count] = slot, MAIN, FREE, 0
            worth[count] = alive
            count += 1
            mains += 1
        for b in range(places):
            at, size = table.ats[slot, b], table.lengths[slot, b]
            if at == FREE or at + size >= limit:
                continue
            value = running[b]
            for place in range(at + 1, at + size):
                gap = table.branch_gaps[slot, b, place % width]
                value *= chance(table.evidence, gap, 0) if gap >= 0 else 0.5
            if value > _LEAST:
                found[0, count], found[1, count], found[2, count], found[3, count] = slot, b, FREE, 0
                worth[count] = value
                count += 1
    best = np.argsort(-worth[:count])[: max(budget, mains)]
    if len(seconds) > 0:
        best = best[: _most_per_second(worth[best], mains, seconds)]
    is_main = found[1, best] == MAIN
    return np.concatenate((found[:, best[is_main]], found[:, best[~is_main]]), axis=1), is_main.sum()


@_jit
def _most_per_second(worth: Any, least: int, seconds: Any) -> int:
    """How many chains, `least` or more and the first ones of `worth`, bring most needed tokens per second."""
    needed, rate, most = 0.0, 0.0, 0
    for i in range(len(worth)):
        needed += worth[i]
        per_second = needed / seconds[min(i + 1, len(seconds) - 1)]
        if i < least or per_second > rate:
            rate, most = per_second, i + 1
    return most


@_jit
def _open_branches(table: Any, chosen: Any) -> None:
    """Take a place for each branch to be opened in `chosen`, as `_likeliest` returns it: branches get their numbers, or
    `MAIN` where there is no place."""
    width = table.gaps.shape[1]
    for i in range(chosen.shape[1]):
        slot, at, rank = chosen[0, i], chosen[2, i], chosen[3, i]
        if at == FREE:
            continue
        chosen[1, i] = MAIN
        for b in range(table.ats.shape[1]):
            if table.ats[slot, b] == FREE:
                chosen[1, i], spot = b, at % width
                table.ats[slot, b], table.lengths[slot, b], table.ranks[slot, b] = at, 1, rank
                table.tokens[slot, b, 0] = table.others[slot, spot, rank - 1]
                table.branch_gaps[slot, b], table.branch_others[slot, b] = FREE, FREE
                table.opened[slot, spot] |= 1 << (rank - 1)
                break


@_jit
def read(
    table: Any, mirror: Any, tips: Any, origins: Any, cached: Any, slots: Any, numbers: Any, counts: Any, rows: Any
) -> Any:
    """See `BranchTable.read`; `cached`: tokens of each row of the cache."""
    table, mirror = Planes(*table), Lines(*mirror)
    tokens, ends, stop = np.empty(counts.sum(), np.int32), np.empty(len(slots), np.int64), 0
    complete = np.ones(len(slots), np.bool_)
    for i in range(len(slots)):
        slot, b, begin, stop = slots[i], numbers[i], stop, stop + counts[i]
        if b == MAIN:
            first, ends[i] = origins[slot] + cached[rows[i]], tips[slot]
            complete[i] = first + counts[i] == ends[i]
            tokens[begin:stop] = mirror.lines[slot, first : first + counts[i]]
        else:
            size = table.lengths[slot, b]
            tokens[begin], ends[i] = table.tokens[slot, b, size - 1], table.ats[slot, b] + size
    return tokens, ends, complete


@_jit
def append(table: Any, mirror: Any, tips: Any, slots: Any, numbers: Any, tokens: Any, gaps: Any) -> Any:
    """See `BranchTable.append`."""
    table, mirror = Planes(*table), Lines(*mirror)
    width, others, changed = table.gaps.shape[1], tokens.shape[1] - 1, np.ones(len(slots), np.bool_)
    for i in range(len(slots)):
        slot, b = slots[i], numbers[i]
        if tokens[i, 0] < 0 or (b != MAIN and table.ats[slot, b] == FREE):
            continue
        if b == MAIN:
            at = tips[slot]
            spot = at % width
            changed[i] = at >= mirror.ends[slot] or mirror.lines[slot, at] != tokens[i, 0]
            if changed[i]:
                mirror.lines[slot, at], mirror.ends[slot] = tokens[i, 0], at + 1
            tips[slot] = at + 1
            table.gaps[slot, spot], table.opened[slot, spot] = gaps[i], 0
            for rank in range(others):
                table.others[slot, spot, rank] = tokens[i, 1 + rank]
        else:
            size = table.lengths[slot, b]
            spot = (table.ats[slot, b] + size) % width
            table.tokens[slot, b, size], table.lengths[slot, b] = tokens[i, 0], size + 1
            table.branch_gaps[slot, b, spot] = gaps[i]
            for rank in range(others):
                table.branch_others[slot, b, spot, rank] = tokens[i, 1 + rank]
    return changed


@_jit
def published(table: Any, known: Any, ends: Any, slots: Any) -> Any:
    """Columns of `messages.Branches` of these slots; branches of one token, which the target finds anyway, are left
    out."""
    table = Planes(*table)
    places = table.ats.shape[1]
    columns, total = np.empty((3, len(slots) * places), np.int32), 0
    tokens = np.empty(len(slots) * places * table.tokens.shape[2], np.int32)
    count = 0
    for i in range(len(slots)):
        slot = slots[i]
        for b in range(places):
            at, size = table.ats[slot, b], table.lengths[slot, b]
            if at < known[slot] or at >= ends[slot] or size < 2:
                continue
            columns[0, count], columns[1, count], columns[2, count] = i, at - known[slot], size
            tokens[total : total + size] = table.tokens[slot, b, :size]
            count += 1
            total += size
    return columns[0, :count].copy(), columns[1, :count].copy(), columns[2, :count].copy(), tokens[:total].copy()
