"""Kernels of `mirror.py`, compiled by numba: commits of many slots in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel

_jit: Any = kernel()


class Lines(NamedTuple):
    """Arrays of `MirrorTable`, which documents them. They are passed as a plain tuple: numba takes it in half the
    time."""

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
    """See `MirrorTable.commit`."""
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
    """Returns (end of the unchanged part, known tokens, end of the tail) after `tokens` are final from `start` on.

    A contradiction to committed tokens (a moved request, a garbled message) is a gap: the request is opened again.
    """
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


@_jit
def tails(mirror: Any, slots: Any) -> Any:
    """Columns of `proposer.Tails` of these slots."""
    mirror = Lines(*mirror)
    bases, lengths = np.empty((2, len(slots)), np.int32)
    for i, slot in enumerate(slots):
        bases[i] = mirror.known[slot] - mirror.prompts[slot]
        lengths[i] = mirror.ends[slot] - mirror.known[slot]
    tokens, end = np.empty(lengths.sum(), np.int32), 0
    for i, slot in enumerate(slots):
        begin, end = end, end + lengths[i]
        tokens[begin:end] = mirror.lines[slot, mirror.known[slot] : mirror.ends[slot]]
    return bases, lengths, tokens
