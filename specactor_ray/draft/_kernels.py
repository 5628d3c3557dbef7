"""Kernels of `slots.py` and `chains.py`, compiled by numba: many slots in one call. They are in one file for the
reason given in `table/_kernels.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.sampling import candidates

_jit: Any = kernel(sources=(candidates,))

MAIN = -1
"""Number and place (the last one) of a slot's main chain; branches have numbers from 0."""
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


# ---- mirrors ----


class Lines(NamedTuple):
    """Arrays of `chains.MirrorTable`. Kernels take them as a plain tuple, which numba unpacks in half the time."""

    lines: np.ndarray
    prompts: np.ndarray
    known: np.ndarray
    ends: np.ndarray
    windows: np.ndarray
    lasts: np.ndarray
    judged: np.ndarray


@_jit
def reach(mirror: Any, slots: Any, starts: Any, lengths: Any, total: Any) -> Any:
    """Width of lines that these commits, of `total` tokens in all, need."""
    mirror = Lines(*mirror)
    prompts, known, windows, width = mirror.prompts, mirror.known, mirror.windows, 0
    for i in range(len(slots)):
        slot = slots[i]
        if 0 <= slot < len(known) and starts[i] <= known[slot] - prompts[slot] + total:
            width = max(width, prompts[slot] + starts[i] + lengths[i] + windows[slot])
    return width


@_jit
def commit(mirror: Any, slots: Any, starts: Any, lengths: Any, tokens: Any) -> Any:
    """See `chains.MirrorTable.commit`."""
    lines, prompts, known, ends, windows, _, judged = mirror
    same, fresh, end = np.empty(len(slots), np.int32), np.zeros(len(slots), np.int32), 0
    for i in range(len(slots)):
        slot, begin, end = slots[i], end, end + lengths[i]
        same[i] = -1
        if 0 <= slot < len(known) and starts[i] >= 0 and known[slot] >= 0:
            start, before, tail = prompts[slot] + starts[i], known[slot], ends[slot] - known[slot]
            if start <= before and start + lengths[i] + windows[slot] <= lines.shape[1]:
                same[i], known[slot], ends[slot] = _settle(lines[slot], before, ends[slot], start, tokens[begin:end])
                fresh[i] = known[slot] - before
                if fresh[i] > 0:
                    tested = min(tail, fresh[i])
                    right = min(same[i] - before, tested)
                    judged[0] += min(right + 1, tested)
                    judged[1] += right
    return same, fresh


@_jit
def _settle(line: Any, known: Any, end: Any, start: Any, tokens: Any) -> Any:
    """Returns (end of the unchanged part, known tokens, end of the tail) after `tokens` are final from `start` on. A
    contradiction to committed tokens (a moved request, a garbled message) is a gap: the request is opened again."""
    stop = start + len(tokens)
    if agreed(line, tokens, start, start, min(known, stop)) < min(known, stop):
        return -1, known, end
    if stop <= known:
        return end, known, end
    wrong = agreed(line, tokens, start, known, min(end, stop))
    if wrong == stop:
        return end, stop, end
    line[wrong:stop] = tokens[wrong - start :]
    return wrong, stop, stop


@_jit
def agreed(line: Any, tokens: Any, start: Any, begin: Any, stop: Any) -> Any:
    """Index of the first token of `line[begin:stop]` that differs from `tokens`, which belong at `start`; or `stop`."""
    for at in range(begin, stop):
        if line[at] != tokens[at - start]:
            return at
    return stop


# ---- branches ----


class Planes(NamedTuple):
    """Arrays of `BranchTable`, passed as those of `Lines`."""

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
def settle(table: Any, mirror: Any, main_rows: Any, slots: Any, starts: Any, lengths: Any, tokens: Any) -> Any:
    """See `BranchTable.settle`. Refuted or outdated branches are freed. Candidates are counted as right or wrong."""
    table, mirror = Planes(*table), Lines(*mirror)
    freed, count = np.empty(table.ats.size, np.int64), 0
    table.evidence[:] = table.evidence * _FADE
    width, places, end = table.gaps.shape[2], table.ats.shape[1], 0
    for i in range(len(slots)):
        slot, begin, end = slots[i], end, end + lengths[i]
        if slot < 0 or slot >= min(len(table.ats), len(mirror.known)) or mirror.known[slot] < 0:
            continue
        known, line, news = mirror.known[slot], mirror.lines[slot], tokens[begin:end]
        start = mirror.prompts[slot] + starts[i]
        stop = start + lengths[i]
        if start > known or stop <= known or agreed(line, news, start, start, known) < known:
            continue
        tested = min(mirror.ends[slot], stop)
        wrong = agreed(line, news, start, known, tested)
        for at in range(known, wrong):
            _judge(table.evidence, table.gaps[slot, MAIN, at % width], 0)
        best = FREE
        if wrong < tested:
            spot, rank, rest = wrong % width, 0, news[wrong - start :]
            while rank < RANKS and table.others[slot, MAIN, spot, rank] != rest[0]:
                rank += 1
            _judge(table.evidence, table.gaps[slot, MAIN, spot], rank + 1)
            for b in range(places):
                if table.ats[slot, b] != wrong or (
                    best != FREE and table.lengths[slot, b] <= table.lengths[slot, best]
                ):
                    continue
                shared = min(table.lengths[slot, b], len(rest))
                if agreed(table.tokens[slot, b], rest, 0, 0, shared) == shared:
                    best = b
        if best != FREE:
            size = table.lengths[slot, best]
            # `MirrorTable.commit` counts the branch as a tail that was right; the main chain was wrong.
            counted = min(wrong + size, stop)
            mirror.judged[0] += wrong + 1 - counted
            mirror.judged[1] += wrong - counted
            line[wrong : wrong + size] = table.tokens[slot, best, :size]
            mirror.ends[slot] = wrong + size
            table.rows[slot, best], main_rows[slot] = main_rows[slot], table.rows[slot, best]
            for at in range(wrong, wrong + size):
                spot = at % width
                table.gaps[slot, MAIN, spot] = table.gaps[slot, best, spot]
                table.others[slot, MAIN, spot] = table.others[slot, best, spot]
                table.opened[slot, spot] = 0
        for b in range(places):
            if table.ats[slot, b] != FREE and (wrong < tested or table.ats[slot, b] < stop):
                freed[count], table.ats[slot, b] = table.rows[slot, b], FREE
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
    table: Any, mirror: Any, tips: Any, longest: int, seconds: Any, reading: Any, ahead: Any, backlogs: Any, budget: int
) -> Any:
    """See `BranchTable.plan`. Returns columns of `Chains`, int32 `(4, n)`."""
    table, mirror = Planes(*table), Lines(*mirror)
    limits = np.minimum(np.minimum(mirror.known + mirror.windows, mirror.lasts), longest)
    late, running = np.flatnonzero(reading & (tips < limits)), np.flatnonzero(ahead)
    late = late[np.argsort(backlogs[late], kind="mergesort")]
    if table.ats.shape[1] == 0 or budget <= len(late):
        running = running[tips[running] < limits[running]]
        chosen = np.full((4, len(running)), MAIN, np.int32)
        chosen[0] = running
    else:
        chosen = _likeliest(table, mirror.known, tips, limits, running, budget - len(late), seconds[len(late) :])
    chains, count = np.full((4, chosen.shape[1] + len(late)), FREE, np.int32), 0
    for i in range(chosen.shape[1]):
        if chosen[1, i] == MAIN and chosen[2, i] == FREE:
            chains[0, count] = chosen[0, i]
            count += 1
    chains[0, count : count + len(late)] = late
    count += len(late)
    chains[3, :count] = backlogs[chains[0, :count]]
    for i in range(chosen.shape[1]):
        slot, b, at = chosen[0, i], chosen[1, i], chosen[2, i]
        if at != FREE:
            b = _open(table, slot, at, chosen[3, i])
        if b != MAIN:
            chains[0, count], chains[1, count], chains[2, count], chains[3, count] = slot, b, at, 1
            count += 1
    return chains[:, :count]


@_jit
def _likeliest(table: Any, known: Any, tips: Any, limits: Any, slots: Any, budget: int, seconds: Any) -> Any:
    """The most likely chains of `slots` for `BranchTable.plan`, int32 `(4, m)`, the most likely first: slots; numbers
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
    most = len(slots) * (1 + places + RANKS * width)
    found, worth, count, mains = np.full((4, most), MAIN, np.int32), np.empty(most), 0, 0
    needed = np.empty(width)
    for slot in slots:
        end, limit, alive, has_place = tips[slot], limits[slot], 1.0, False
        for b in range(places):
            has_place = has_place or table.ats[slot, b] == FREE
        for at in range(known[slot], end):
            spot = at % width
            gap, needed[spot] = table.gaps[slot, MAIN, spot], alive
            for rank in range(1, 1 + RANKS):
                worth[count] = alive * shares[gap, rank]
                is_new = has_place and table.opened[slot, spot] >> (rank - 1) & 1 == 0 and at + 1 < limit
                if is_new and worth[count] > _LEAST and table.others[slot, MAIN, spot, rank - 1] >= 0:
                    found[0, count], found[2, count], found[3, count] = slot, at, rank
                    count += 1
            alive *= shares[gap, 0]
        if end < limit:
            found[0, count], worth[count] = slot, alive
            count += 1
            mains += 1
        for b in range(places):
            at, size = table.ats[slot, b], table.lengths[slot, b]
            if at == FREE or at >= end or at + size >= limit:
                continue
            worth[count] = needed[at % width] * shares[table.gaps[slot, MAIN, at % width], table.ranks[slot, b]]
            for place in range(at + 1, at + size):
                worth[count] *= shares[table.gaps[slot, b, place % width], 0]
            if worth[count] > _LEAST:
                found[0, count], found[1, count] = slot, b
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
def _open(table: Any, slot: int, at: int, rank: int) -> int:
    """Open a branch. Returns its number, or `MAIN` where no place is free."""
    spot = at % table.gaps.shape[2]
    for b in range(table.ats.shape[1]):
        if table.ats[slot, b] == FREE:
            table.ats[slot, b], table.lengths[slot, b], table.ranks[slot, b] = at, 1, rank
            table.tokens[slot, b, 0] = table.others[slot, MAIN, spot, rank - 1]
            table.gaps[slot, b], table.others[slot, b] = FREE, FREE
            table.opened[slot, spot] |= 1 << (rank - 1)
            return b
    return MAIN


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
    width, changed = table.gaps.shape[2], np.ones(len(slots), np.bool_)
    for i in range(len(slots)):
        slot, b = slots[i], numbers[i]
        if tokens[i, 0] < 0 or (b != MAIN and table.ats[slot, b] == FREE):
            continue
        if b == MAIN:
            at = tips[slot]
            changed[i] = at >= mirror.ends[slot] or mirror.lines[slot, at] != tokens[i, 0]
            if changed[i]:
                mirror.lines[slot, at], mirror.ends[slot] = tokens[i, 0], at + 1
            tips[slot], table.opened[slot, at % width] = at + 1, 0
        else:
            size = table.lengths[slot, b]
            at = table.ats[slot, b] + size
            table.tokens[slot, b, size], table.lengths[slot, b] = tokens[i, 0], size + 1
        spot = at % width
        table.gaps[slot, b, spot] = gaps[i]
        for rank in range(tokens.shape[1] - 1):
            table.others[slot, b, spot, rank] = tokens[i, 1 + rank]
    return changed


@_jit
def tails(table: Any, mirror: Any, slots: Any) -> Any:
    """See `BranchTable.tails`; returns columns of `proposer.Tails`."""
    table, mirror = Planes(*table), Lines(*mirror)
    counts, most = np.zeros(len(slots), np.int32), len(slots) * (1 + table.ats.shape[1])
    bases, lengths = np.empty((2, most), np.int32)
    tokens, count, end = np.empty(most * table.tokens.shape[2], np.int32), 0, 0
    for i, slot in enumerate(slots):
        known, stop = mirror.known[slot], mirror.ends[slot]
        for b in range(MAIN, table.ats.shape[1]):
            at, size = (stop, 0) if b == MAIN else (table.ats[slot, b], table.lengths[slot, b])
            if b == MAIN or (known <= at < stop and size > 1):
                bases[count], lengths[count] = known - mirror.prompts[slot], at - known + size
                tokens[end : end + at - known] = mirror.lines[slot, known:at]
                end += lengths[count]
                for k in range(size):
                    tokens[end - size + k] = table.tokens[slot, b, k]
                counts[i] += 1
                count += 1
    return bases[:count].copy(), lengths[:count].copy(), tokens[:end].copy(), counts
