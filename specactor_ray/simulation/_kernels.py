"""Kernels over the rows of a simulated engine and the slots of a simulated drafter, compiled by numba.

They are in one file for the reason given in `table/_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.draft._kernels import BranchArrays
from specactor_ray.table._kernels import Texts
from specactor_ray.table.requests import Finish

_jit: Any = kernel()

# Rows of `SimulatedEngine`'s table: prompt tokens, output tokens so far and in total, positions that are not in the
# cache yet, and max_tokens.
PROMPT, OUTPUT, END, MISSING, MOST = range(5)
NO_GUESS = -1
_LIMIT, _STOP, _RUNNING = (np.uint8(one) for one in (Finish.LENGTH, Finish.STOP, Finish.RUNNING))


# ---- the engine ----


@_jit
def begin_step(admitted: Any, table: Any, rows: Any, lengths: Any, budget: int) -> Any:
    """Match drafts with decoding rows, and fill the rest of a step of `budget` positions with prompts, oldest first.

    Args:
        admitted: `(n,)`: rows in the order of admission.
        table: `(5, rows)`; `MISSING` decreases by the prompt positions of the step.
        rows, lengths: Rows and lengths of the drafts.

    Returns:
        By row of the table, the begin and the number of its drafts; numbers of decoding rows, of decoded positions, and
        of prompt positions.
    """
    firsts, drafted, offered = np.zeros((3, table.shape[1]), np.int32)
    begin = 0
    for i in range(len(rows)):
        firsts[rows[i]], offered[rows[i]] = begin, lengths[i]
        begin += lengths[i]
    decoded, positions, prefilled = 0, 0, 0
    for row in admitted:
        if table[MISSING, row] == 0:
            drafted[row] = offered[row]
            decoded += 1
            positions += 1 + offered[row]
    for row in admitted:
        chunk = max(min(budget - positions - prefilled, table[MISSING, row]), 0)
        table[MISSING, row] -= chunk
        prefilled += chunk
    return firsts, drafted, decoded, positions, prefilled


@_jit
def verify(admitted: Any, table: Any, truth: Any, firsts: Any, drafted: Any, guesses: Any) -> Any:
    """Commit for all rows with complete prompts: drafts up to the first wrong one, and one more token.

    Returns:
        Columns of a `StepResult`: rows, starts, lengths, tokens, drafted, accepted, finish.
    """
    ready = 0
    for row in admitted:
        ready += table[MISSING, row] == 0
    rows, starts, lengths, verified, accepted = np.zeros((5, ready), np.int32)
    finish, tokens = np.zeros(ready, np.uint8), np.zeros(ready + drafted.sum(), np.int32)
    at, end = 0, 0
    for row in admitted:
        if table[MISSING, row] != 0:
            continue
        start, left, right = table[OUTPUT, row], table[END, row] - table[OUTPUT, row], 0
        while right < min(drafted[row], left) and guesses[firsts[row] + right] == truth[row, start + right]:
            right += 1
        made = min(right + 1, left)
        tokens[end : end + made] = truth[row, start : start + made]
        rows[at], starts[at], lengths[at], verified[at], accepted[at] = row, start, made, drafted[row], right
        finish[at] = _RUNNING
        if made == left:
            finish[at] = _LIMIT if table[END, row] == table[MOST, row] else _STOP
        table[OUTPUT, row] += made
        end += made
        at += 1
    return rows, starts, lengths, tokens[:end].copy(), verified, accepted, finish


# ---- drafters ----


@_jit
def draft(
    known: Any, ranks: Any, cached: Any, texts: Any, table: Any, rows: Any, numbers: Any, vocab_size: int, most: int
) -> Any:
    """Read the tokens that chains lack in the cache, and find the candidates of their next tokens.

    Args:
        known: `(rows, most)`: right tokens.
        ranks: `(rows, 2, most)`: see `GeneratedText.ranks`.
        cached: `(rows,)`: number of tokens of main chains in the cache, updated, as is `rows` of the table of
            branches.
        texts, table: Arrays of `TableView` and `BranchTable`.
        rows, numbers: Columns of `Chains`, `(n,)`.
        vocab_size: Vocabulary size of the tokens.
        most: Candidates per position.

    Returns:
        Indices of the next tokens in their texts, int64 `(n,)`; number of prompt tokens that were read; int32:
        candidates `(n, most)`, in order, and ranges of gaps `(n,)`. Wrong candidates differ from each other.
    """
    texts, table = Texts(*texts), BranchArrays(*table)
    tokens, gaps = np.empty((len(rows), most), np.int32), np.empty(len(rows), np.int32)
    ends, prefill = np.empty(len(rows), np.int64), 0
    for i in range(len(rows)):
        row, b = rows[i], numbers[i]
        if b < 0:
            ends[i] = texts.lengths[row] + texts.length[row, 0]
            prefill += ends[i] - cached[row] - 1
            cached[row] = ends[i]
        else:
            ends[i] = table.rows[row, b] = table.ats[row, b] + table.lengths[row, b]
        at = ends[i] - texts.prompts[row]
        truth, right = known[row, at], ranks[row, 0, at]
        for rank in range(most):
            tokens[i, rank] = truth if right == rank else (truth + 1 + rank) % vocab_size
        gaps[i] = max(ranks[row, 1, at], 0)
    return ends, prefill, tokens, gaps


@_jit
def look_up(known: Any, texts: Any, rows: Any) -> int:
    """Fill the tails of rows as far as there are guesses. Returns the number of found tokens."""
    texts, found = Texts(*texts), 0
    for row in rows:
        begin, size = texts.lengths[row] - texts.prompts[row], texts.length[row, 0]
        room = min(texts.window, texts.limits[row] - texts.lengths[row])
        while size < room and known[row, begin + size] != NO_GUESS:
            texts.tail[row, 0, size] = known[row, begin + size]
            size += 1
            found += 1
        texts.length[row, 0] = size
    return found
