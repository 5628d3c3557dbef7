"""Fastest-of-N: which drafters race for the slow requests (SpecActor, arXiv 2511.16193, Algorithm 3).

Late in a rollout few requests are left and drafters fall free. Those requests are drafted for by several methods at
once, and in every step the guess that promises most is verified. Sampling is keyed, so who drafted a token does not
enter it: the race has no influence on what is said, only on when.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Straggler(NamedTuple):
    """A slow request."""

    request_id: str
    acceptance: float
    """How good the guesses for it are now; the lowest comes first."""


class Worker(NamedTuple):
    """A draft actor."""

    method: str
    load: int
    """Requests it drafts for."""
    max_batch: int
    """b_max: most requests it may draft for."""


def assign_race(
    stragglers: Sequence[Straggler],
    ranking: Sequence[str],
    workers: Mapping[str, Worker],
    serving: Mapping[str, Collection[str]],
) -> list[tuple[str, str]]:
    """Algorithm 3: every method that does not serve a straggler yet joins the race for it, as far as there is room.

        sort the stragglers by acceptance, ascending; methods come in the order of the draft ladder
        for each straggler, for each method that does not serve it:
            take the least loaded worker of that method among those with load < b_max, if there is one
            assign the straggler to it; its load grows by one

    Args:
        stragglers: Requests to race for.
        ranking: Methods, best first; those not named do not race.
        workers: Worker id → what it is.
        serving: Request id → methods that draft for it already.

    Returns:
        (worker id, request id) to add, in the order in which they were assigned. Ties go to the smaller id. Nothing
        that exists is taken away.
    """
    loads = {worker_id: worker.load for worker_id, worker in workers.items()}
    assigned = []
    for straggler in sorted(stragglers, key=lambda s: (s.acceptance, s.request_id)):
        served = set(serving.get(straggler.request_id, ()))
        for method in ranking:
            if method in served:
                continue
            served.add(method)
            worker_id = least_loaded(method, workers, loads)
            if worker_id is not None:
                loads[worker_id] += 1
                assigned.append((worker_id, straggler.request_id))
    return assigned


def least_loaded(method: str, workers: Mapping[str, Worker], loads: Mapping[str, int]) -> str | None:
    """The worker of this method with the smallest load below its b_max; None if none has room."""
    free = [
        (loads[worker_id], worker_id)
        for worker_id, worker in workers.items()
        if worker.method == method and loads[worker_id] < worker.max_batch
    ]
    return min(free)[1] if free else None
