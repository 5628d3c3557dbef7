"""Loops over the rows of a simulated engine and the slots of a simulated drafter, compiled by numba.

In one file for the reason that `spec/_kernels.py` gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.jit import kernel
from specactor_ray.target.base import Finish

_jit: Any = kernel()

# Rows of `SimulatedEngine`'s table: tokens of the prompt, output tokens so far and in all, positions that are not in
# the cache yet, and max_tokens.
PROMPT, OUTPUT, END, MISSING, MOST = range(5)
# Rows of `SimulatedProposer`'s table: tokens of the prompt (0: the slot is not open), of the committed output and the
# tail, most of the tail, and known guesses.
_, BASE, LENGTH, WINDOW, KNOWN = range(5)
NO_GUESS = -1
_LIMIT, _STOP, _RUNNING = (np.uint8(one) for one in (Finish.LENGTH, Finish.STOP, Finish.RUNNING))


# ---- the engine ----


@_jit
def begin_step(admitted: Any, table: Any, rows: Any, lengths: Any, budget: int) -> Any:
    """Match drafts with the rows that decode, and fill the rest of a step of `budget` positions with prompts, the
    oldest first.

    Args:
        admitted: `(n,)` rows in the order of admission.
        table: `(5, rows)`; prompts that are filled in are taken off `MISSING`.
        rows, lengths: Of the drafts.

    Returns:
        By row of the table, the begin of its drafts and how many there are; rows that decode, positions decoded,
        positions of prompts.
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
    """Commit for all rows whose prompts are in: drafts up to the first wrong one, and one token more.

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
def _guess(known: Any, table: Any, slot: int, position: int) -> int:
    """What the text says that the method guesses; 0 past the end, where it is compared with nothing."""
    return known[slot, position] if position < table[KNOWN, slot] else 0


@_jit
def follow(known: Any, table: Any, changed: Any, slots: Any, starts: Any, lengths: Any, tokens: Any) -> Any:
    """`Proposer.commit` on `known` guesses `(slots, most)`. Returns bool `(n,)` and how many tokens were new."""
    good, news, begin = np.zeros(len(slots), np.bool_), 0, 0
    for i in range(len(slots)):
        slot, size, begin = slots[i], lengths[i], begin + lengths[i]
        if slot >= len(changed) or table[PROMPT, slot] == 0 or table[BASE, slot] < starts[i]:
            continue
        base, length = table[BASE, slot], table[LENGTH, slot]
        fresh = max(size - (base - starts[i]), 0)
        agrees = True
        for k in range(min(fresh, length)):
            agrees = agrees and tokens[begin - fresh + k] == _guess(known, table, slot, base + k)
        table[BASE, slot] = base + fresh
        table[LENGTH, slot] = max(length - fresh, 0) if agrees else 0
        good[i], changed[slot] = True, True
        news += fresh
    return good, news


@_jit
def _taken(changed: Any) -> Any:
    slots, count = np.empty(len(changed), np.int32), 0
    for slot in range(len(changed)):
        if changed[slot]:
            slots[count], changed[slot] = slot, False
            count += 1
    return slots[:count]


@_jit
def draft(table: Any, changed: Any) -> Any:
    """Draft a token for every slot with room. Returns slots of new or changed tails, how many were drafted for, tokens
    drafted, and tokens of their contexts."""
    rows, context = 0, 0
    for slot in range(len(changed)):
        if table[LENGTH, slot] < table[WINDOW, slot]:
            table[LENGTH, slot] += 1
            changed[slot] = True
            rows += 1
            context += table[PROMPT, slot] + table[BASE, slot]
    return _taken(changed), rows, rows, context


@_jit
def look_up(known: Any, table: Any, changed: Any) -> Any:
    """Fill the windows of all slots that have changed, as far as there are guesses. Returns as `draft`; lookups read no
    context."""
    rows, found = 0, 0
    for slot in range(len(changed)):
        if not changed[slot]:
            continue
        length, before = 0, table[LENGTH, slot]
        while length < table[WINDOW, slot] and _guess(known, table, slot, table[BASE, slot] + length) != NO_GUESS:
            length += 1
        table[LENGTH, slot] = max(before, length)
        found += table[LENGTH, slot] - before
        rows += 1
    return _taken(changed), rows, found, 0


@_jit
def tails(known: Any, table: Any, slots: Any) -> Any:
    """Columns of `Tails`: bases, lengths and tokens."""
    bases, lengths = np.zeros((2, len(slots)), np.int32)
    for i in range(len(slots)):
        bases[i], lengths[i] = table[BASE, slots[i]], table[LENGTH, slots[i]]
    tokens, end = np.zeros(lengths.sum(), np.int32), 0
    for i in range(len(slots)):
        for k in range(lengths[i]):
            tokens[end] = _guess(known, table, slots[i], bases[i] + k)
            end += 1
    return bases, lengths, tokens
