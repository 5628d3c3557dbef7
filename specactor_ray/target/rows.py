"""Common work of engines on rows of the table: cut drafts, commit samples up to the ends of outputs, export states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import TopTokens
from specactor_ray.sampling.keyed import Found
from specactor_ray.table.requests import Finish
from specactor_ray.table.table import RequestTable
from specactor_ray.target.base import Drafts, StepResult
from specactor_ray.transport.messages import States

_ALL = 1 << 62


def cut(table: RequestTable, rows: np.ndarray, drafts: Drafts, most: int, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Select the drafts that may be verified in these rows, which decode: a draft ends before a token outside the
    vocabulary, and leaves room for the token that the target adds.

    `most`: draft tokens of a row; `budget`: draft tokens of all rows, of which the first rows take theirs. Returns
    int64 `(n,)`: begin of each row's drafts in `drafts.tokens`, and how many of them count.
    """
    if not len(drafts.tokens) or most <= 0:
        firsts, lengths = np.zeros((2, len(rows)), np.int64)
        return firsts, lengths
    size = max(len(table.lengths), int(drafts.rows.max(initial=0)) + 1)
    first, length = np.zeros((2, size), np.int64)
    first[drafts.rows], length[drafts.rows] = begins(drafts.lengths)[:-1], drafts.lengths
    room = np.minimum(table.limits[rows] - table.lengths[rows] - 1, most)
    firsts, lengths = first[rows], np.minimum(length[rows], np.maximum(room, 0))
    bad = np.flatnonzero((drafts.tokens < 0) | (drafts.tokens >= table.vocab_size))
    if len(bad):
        following = np.append(bad, len(drafts.tokens))[np.searchsorted(bad, firsts)]
        lengths = np.minimum(lengths, following - firsts)
    ends = np.cumsum(lengths)
    if len(ends) and ends[-1] > budget:
        lengths = np.clip(budget - (ends - lengths), 0, lengths)
    return firsts, lengths


def commit(
    table: RequestTable,
    rows: np.ndarray,
    drafted: np.ndarray,
    found: Found,
    record_margins: bool,
    tops: TopTokens | None = None,
) -> StepResult:
    """Append the target's samples to these rows, int32 `(n,)`, up to their ends.

    `drafted`: draft tokens that were verified; `record_margins`: whether `found` has margins; `tops`: the most probable
    tokens at the positions of `found`.
    """
    counts, tokens, column = found.counts, found.tokens, np.arange(found.width)
    ends = (tokens[:, :, None] == table.eos_token_ids).any(axis=2) & table.minds_eos[rows, None]
    if table.stops:
        for i, row in enumerate(rows.tolist()):
            if row in table.stops:
                ends[i] |= np.isin(tokens[i], table.stops[row])
    ends &= column < counts[:, None]
    stopped = ends.any(axis=1)
    failed = (found.statuses != 0) & ~stopped  # tokens after an end do not count
    errors = found.problems(drafted) if failed.any() else {}
    lengths = np.where(failed, 0, np.where(stopped, ends.argmax(axis=1) + 1, counts))
    accepted = np.where(failed, 0, counts - (found.statuses == 0))
    # Draft tokens after the end are neither right nor wrong.
    drafted = np.where(failed | (accepted >= lengths), np.minimum(accepted, lengths), drafted)
    starts, lengths, kept = table.committed[rows], lengths.astype(np.int32), column < lengths[:, None]
    tokens = tokens[kept].astype(np.int32)
    if tops is not None:  # of the positions that count
        at = places(begins(counts * tops.counts)[:-1], lengths * tops.counts)
        tops = TopTokens(tops.counts, tops.tokens[at], tops.logprobs[at])
    table.append(rows, lengths, tokens)
    full = table.lengths[rows] >= table.limits[rows]
    finish = np.where(stopped, Finish.STOP, np.where(full, Finish.LENGTH, Finish.RUNNING))
    return StepResult(
        rows,
        starts,
        lengths,
        tokens,
        found.logprobs[kept].astype(np.float32),
        found.margins[kept].astype(np.float32) if record_margins else None,
        drafted.astype(np.int32),
        np.minimum(accepted, lengths).astype(np.int32),
        np.where(failed, Finish.ERROR, finish).astype(np.uint8),
        {int(rows[i]): text for i, text in errors.items() if failed[i]},
        tops=tops,
    )


def export(table: RequestTable, states_of: Callable[[np.ndarray, np.ndarray, int], States], rows: np.ndarray) -> States:
    """The final states of these rows, int32 `(n,)`, that were not exported before; `states_of` is
    `TargetEngine.states`. Called after `commit`."""
    exported = states_of(rows, table.exported[rows], _ALL)
    table.exported[exported.rows] += exported.lengths
    return exported


def fewest_first(ends: np.ndarray, starts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that have something between `starts` and `ends`, those with the fewest first, and how much each of them has
    if `most` are taken in all: int64 indices and int32 lengths of at least 1."""
    lengths = ends.astype(np.int64) - starts
    chosen = np.argsort(lengths, kind="stable")
    chosen = chosen[lengths[chosen] > 0]
    lengths = lengths[chosen]
    lengths = np.minimum(lengths, most + lengths - np.cumsum(lengths))
    return chosen[lengths > 0], lengths[lengths > 0].astype(np.int32)
