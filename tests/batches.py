"""Messages between a verifier and a drafter in a line, for tests that play one of the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.transport.messages import CommitBatch, DraftOpen, States


def opening(
    row: int, request_id: str = "", prompt: Sequence[int] = (1, 2, 1, 2, 1), window: int = 4, max_tokens: int = 128
) -> DraftOpen:
    """A request in its first generation, named after its row."""
    sampling = SamplingParams(max_tokens=max_tokens)
    return DraftOpen(row, 1, request_id or f"r{row}", tuple(prompt), (), sampling, window)


def news(
    opened: Iterable[DraftOpen] = (),
    commits: Iterable[tuple[int, int, Sequence[int]]] = (),
    closed: Iterable[tuple[int, bool]] = (),
    verifier_id: str = "v0",
    states: States | None = None,
    session: int = 1,
) -> CommitBatch:
    """What a verifier says of rows in their first generation: `commits` are (row, start, tokens), `closed` are (row,
    finished)."""
    said = list(commits)

    def column(values: Iterable[int]) -> np.ndarray:
        return np.array(list(values), np.int32)

    return CommitBatch(
        verifier_id,
        column(row for row, _, _ in said),
        column(1 for _ in said),
        column(start for _, start, _ in said),
        column(len(tokens) for _, _, tokens in said),
        column(token for _, _, tokens in said for token in tokens),
        tuple(opened),
        tuple((row, 1, finished) for row, finished in closed),
        states,
        session,
    )
