"""Requests that wait for a verifier: who gets the next one. No Ray, no clock."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from specactor_ray.rollout.journal import Journal
from specactor_ray.rollout.quarantine import Quarantine
from specactor_ray.target.base import TargetRequest

Batches = dict[str, list[TargetRequest]]
"""Verifier → what to submit to it."""


class Backlog:
    """Hands requests to the least loaded verifier, and suspects to verifiers that have nothing else.

    Args:
        journal: Where their owners are kept.
        outstanding: Most requests of one verifier at a time.
    """

    def __init__(self, journal: Journal, outstanding: int) -> None:
        self.quarantine = Quarantine()
        self._journal, self._outstanding = journal, outstanding
        self._waiting: deque[str] = deque()

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiting or self.quarantine.waiting)

    def add(self, request_ids: Iterable[str]) -> None:
        """These wait behind all others."""
        self._waiting.extend(request_ids)

    def put_back(self, request_ids: Sequence[str]) -> None:
        """These were taken off their verifier: suspects wait in the quarantine, the others before all others."""
        for request_id in reversed(request_ids):
            self.quarantine.put_back(request_id)
            if not self.quarantine.is_suspect(request_id):
                self._waiting.appendleft(request_id)

    def hand_out(self, verifiers: Sequence[str]) -> Batches:
        """Make these verifiers the owners of what waits, as far as they have room."""
        batches: Batches = {}
        least = [(self._journal.load(name), name) for name in self._take_suspects(verifiers, batches)]
        heapq.heapify(least)
        while self._waiting and least and least[0][0] < self._outstanding:
            load, verifier_id = least[0]
            batches.setdefault(verifier_id, []).append(self._journal.hand_to(self._waiting.popleft(), verifier_id))
            heapq.heapreplace(least, (load + 1, verifier_id))
        return batches

    def _take_suspects(self, verifiers: Sequence[str], batches: Batches) -> list[str]:
        """Put suspects into `batches`, each group alone; returns the verifiers that may be given ordinary requests."""
        quarantine, load = self.quarantine, self._journal.load
        for name in verifiers:
            if quarantine.waiting and not quarantine.occupies(name) and not load(name):
                batches[name] = [self._journal.hand_to(request_id, name) for request_id in quarantine.take(name)]
        free = [name for name in verifiers if not quarantine.occupies(name)]
        if quarantine.waiting and free:  # the emptiest one is kept free for the suspects
            free.remove(min(free, key=load))
        return free

    def clear(self) -> None:
        self.quarantine.clear()
        self._waiting.clear()
