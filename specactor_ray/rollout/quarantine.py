"""Requests whose verifier failed: run apart from the others, in ever smaller groups, until one is alone.

One request can crash every verifier it is given to. Other requests on that verifier must not fail with it, and requests
must not fail for deaths that none of them caused. So the requests of a failed verifier are suspects: they are split
into halves, each of which runs on a separate verifier. Sampling is keyed, so a request that killed its verifier kills
the next one at the same output position: a suspect that passes the position where the verifier failed is acquitted and
runs with the others again. A suspect that runs alone, makes no progress and loses `MAX_DEATHS` verifiers in a row is
the cause; more are needed if verifiers fail without it at the same time, since then there is another problem.

Pure bookkeeping: no Ray, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

ACQUITTED_AFTER = 16
"""Output tokens beyond the journaled position at the failure: tokens that may have been committed but not journaled."""
MAX_DEATHS, MOST_DEATHS = 3, 8
"""Smallest and largest number of failures alone, in a row and without progress, that convict."""


@dataclass(eq=False)
class _Group:
    members: dict[str, int]
    """Suspect → number of output tokens in the journal at the failure of its verifier."""
    deaths: int = 1
    """Failures in a row without progress, for a group of one."""
    since: int = 0
    """Failures of all verifiers before these."""


class Quarantine:
    """Suspects, and the verifiers that run them. Each suspect is in a group that waits or at a verifier."""

    def __init__(self) -> None:
        self._waiting: deque[_Group] = deque()
        self._at: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._failures = 0
        """Number of failures of all verifiers."""

    def accuse(self, verifier_id: str, requests: Mapping[str, int]) -> list[str]:
        """Record a failure of a verifier.

        Args:
            verifier_id: The verifier.
            requests: Requests of the verifier → output tokens journaled.

        Returns:
            The requests that are the cause. The other suspects wait for `take`; requests that are not suspects were
            acquitted before.
        """
        group = self._at.pop(verifier_id, None)
        self._failures += 1
        if group is None or not group.members:
            self._add(dict(requests))
            return []
        for name in group.members:
            self._group_of.pop(name)
        positions = {name: requests.get(name, position) for name, position in group.members.items()}
        if len(positions) > 1:
            self._add(positions)
            return []
        ((name, position),) = positions.items()
        if position > group.members[name]:
            self._add(positions)
            return []
        deaths = group.deaths + 1
        elsewhere = self._failures - group.since - deaths
        if deaths >= min(MAX_DEATHS + elsewhere, MOST_DEATHS):
            return [name]
        self._wait(_Group(positions, deaths, group.since))
        return []

    def excuse(self, verifier_id: str) -> None:
        """Record that a verifier is gone for another reason: its suspects wait again."""
        group = self._at.pop(verifier_id, None)
        if group is not None and group.members:
            self._waiting.append(group)

    def put_back(self, request_id: str) -> None:
        """Record that a request was taken off a live verifier; a suspect waits again, alone."""
        group = self._group_of.get(request_id)
        if group is None or group in self._waiting:
            return
        alone = replace(group, members={request_id: group.members[request_id]})
        self.forget(request_id)
        self._wait(alone)

    def take(self, verifier_id: str) -> list[str]:
        """The next group for a verifier without requests; empty if none waits."""
        if not self._waiting:
            return []
        group = self._waiting.popleft()
        self._at[verifier_id] = group
        return list(group.members)

    def progress(self, request_id: str, tokens: int) -> None:
        """Record the number of output tokens of a request in the journal."""
        group = self._group_of.get(request_id)
        if group is not None and tokens >= group.members[request_id] + ACQUITTED_AFTER:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended or is acquitted."""
        group = self._group_of.pop(request_id, None)
        if group is None:
            return
        del group.members[request_id]
        if not group.members:
            self._waiting = deque(waiting for waiting in self._waiting if waiting is not group)
            self._at = {verifier_id: at for verifier_id, at in self._at.items() if at is not group}

    def is_suspect(self, request_id: str) -> bool:
        return request_id in self._group_of

    def occupies(self, verifier_id: str) -> bool:
        """Whether this verifier runs suspects, so that it must not be given other requests."""
        return verifier_id in self._at

    def members_at(self, verifier_id: str) -> list[str]:
        """The suspects that this verifier runs."""
        group = self._at.get(verifier_id)
        return [] if group is None else list(group.members)

    @property
    def waiting(self) -> int:
        """Number of groups that wait for a verifier."""
        return len(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
        self._at.clear()
        self._group_of.clear()

    def _add(self, positions: Mapping[str, int]) -> None:
        names, half = list(positions), (len(positions) + 1) // 2
        for part in (names[:half], names[half:]):
            if part:
                self._wait(_Group({name: positions[name] for name in part}, since=self._failures - 1))

    def _wait(self, group: _Group) -> None:
        self._waiting.append(group)
        self._group_of.update(dict.fromkeys(group.members, group))
