"""Which drafters draft for which request: one of each method, spread evenly. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class AssignmentChange:
    """What has to be told to drafters: pairs of (drafter id, request id)."""

    opened: list[tuple[str, str]] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)


class DrafterAssignment:
    """Every request has one drafter of each method; the loads of a method's drafters are kept level."""

    def __init__(self) -> None:
        self._methods: dict[str, str] = {}
        self._of_request: dict[str, dict[str, str]] = {}

    @property
    def drafters(self) -> Mapping[str, str]:
        """Drafter id → method."""
        return self._methods

    def of(self, request_id: str) -> list[str]:
        """Drafters of a request, in method order of assignment; empty for unknown ids."""
        return list(self._of_request.get(request_id, {}).values())

    def requests_of(self, drafter_id: str) -> list[str]:
        return [request for request, chosen in self._of_request.items() if drafter_id in chosen.values()]

    def add(self, request_id: str) -> AssignmentChange:
        """A new request."""
        self._of_request[request_id] = {}
        return self._fill([request_id])

    def remove(self, request_id: str) -> AssignmentChange:
        """A request ended."""
        chosen = self._of_request.pop(request_id, {})
        return AssignmentChange(closed=[(drafter, request_id) for drafter in chosen.values()])

    def set_drafters(self, drafters: Mapping[str, str]) -> AssignmentChange:
        """The complete list of drafters now: requests of those that left find others, newcomers take their share."""
        gone = self._methods.keys() - drafters.keys()
        self._methods = dict(drafters)
        for chosen in self._of_request.values():
            for method in [method for method, drafter in chosen.items() if drafter in gone]:
                del chosen[method]
        change = self._fill(self._of_request)
        self._level(change)
        return change

    def _loads(self) -> Counter[str]:
        loads = Counter(dict.fromkeys(self._methods, 0))
        for chosen in self._of_request.values():
            loads.update(chosen.values())
        return loads

    def _fill(self, request_ids: Iterable[str]) -> AssignmentChange:
        change, loads = AssignmentChange(), self._loads()
        for request_id in request_ids:
            chosen = self._of_request[request_id]
            for method in dict.fromkeys(self._methods.values()):
                if method in chosen:
                    continue
                drafter = min((d for d, m in self._methods.items() if m == method), key=lambda d: loads[d])
                chosen[method] = drafter
                loads[drafter] += 1
                change.opened.append((drafter, request_id))
        return change

    def _level(self, change: AssignmentChange) -> None:
        """Move requests from the fullest to the emptiest drafter of a method until they differ by one at most."""
        loads = self._loads()
        for method in set(self._methods.values()):
            peers = [drafter for drafter, m in self._methods.items() if m == method]
            while loads[max(peers, key=loads.__getitem__)] - loads[min(peers, key=loads.__getitem__)] > 1:
                full, empty = max(peers, key=loads.__getitem__), min(peers, key=loads.__getitem__)
                request_id = next(r for r, chosen in self._of_request.items() if chosen.get(method) == full)
                self._of_request[request_id][method] = empty
                loads[full] -= 1
                loads[empty] += 1
                if (full, request_id) in change.opened:
                    change.opened.remove((full, request_id))
                else:
                    change.closed.append((full, request_id))
                change.opened.append((empty, request_id))
