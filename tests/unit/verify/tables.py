"""Requests, tails and commits for tests of the table and of what decides by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.table._kernels import Committed
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.transport.messages import TailBatch
from specactor_ray.verify.acceptance import Acceptance


class Claim(NamedTuple):
    """What a drafter says of one request: one of its tails."""

    row: int
    generation: int
    base: int
    tokens: tuple[int, ...]


def request(name: str, committed: Sequence[int] = (), max_tokens: int = 1000) -> TargetRequest:
    return TargetRequest(name, (1, 2), SamplingParams(max_tokens=max_tokens), tuple(committed))


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def batch(claims: Sequence[Claim]) -> TailBatch:
    return TailBatch(
        "d",
        ints([claim.row for claim in claims]),
        ints([claim.generation for claim in claims]),
        ints([claim.base for claim in claims]),
        ints([len(claim.tokens) for claim in claims]),
        ints([token for claim in claims for token in claim.tokens]),
    )


def say(table: RequestTable, seat: int, row: int, *tokens: int, base: int | None = None) -> None:
    """A drafter says its tail of a request."""
    at = int(table.committed[row]) if base is None else base
    table.take(seat, batch([Claim(row, int(table.generation[row]), at, tokens)]))


def commit(
    table: RequestTable,
    acceptance: Acceptance,
    fresh: Mapping[int, Sequence[int]],
    verified: Mapping[int, tuple[int, int, int]] | None = None,
) -> None:
    """Commit row → tokens; `verified`: row → seat, and how many of its tokens were verified and right."""
    seats, drafted, accepted = zip(*((verified or {}).get(row, (-1, 0, 0)) for row in fresh), strict=True)
    tokens = ints([token for new in fresh.values() for token in new])
    counts = ints(list(map(len, fresh.values())))
    rows = ints(list(fresh))
    table.append(rows, counts, tokens)
    acceptance.settle(table, Committed(rows, counts, ints(seats), ints(drafted), ints(accepted)))
