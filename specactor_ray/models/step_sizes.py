"""Sizes of the captured steps of a model (`captured.py`)."""

from __future__ import annotations

_ROWS = (1, 4, 16, 32, 64, 128, 256)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
"""Sizes of steps. Padding to 128 tokens costs little: all weights are read. Launches of larger steps cost little."""


def longest_tail(rows: int) -> int:
    """Most draft tokens of a row in steps of `rows` rows."""
    return max(16, 128 // rows)


def sizes(rows: int, tokens: int) -> list[tuple[int, int]]:
    """(R, N) of the steps for up to `rows` rows with up to `tokens` tokens, the smallest first."""
    most = {r: min(r * (1 + longest_tail(r)), tokens, _TOKENS[-1]) for r in (*(r for r in _ROWS if r < rows), rows)}
    return [(r, n) for r, end in most.items() for n in sorted({r, end, *(n for n in _TOKENS if r < n < end)})]
