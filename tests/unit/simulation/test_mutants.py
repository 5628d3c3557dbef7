"""The instrument is tested on defects that the product once had: put back, each is found within a few runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from specactor_ray.cluster.calls import Calls
from specactor_ray.controller.members import Member
from specactor_ray.controller.sync import WeightSync
from specactor_ray.rollout.backlog import Quarantine
from specactor_ray.rollout.verifiers import VerifierLink, Verifiers
from specactor_ray.transport.link import EventQueue
from specactor_ray.transport.messages import WeightSet
from specactor_ray.verify.requests import Requests
from tests.faults.injector import FaultPlan
from tests.faults.run import FaultScenario, simulate

RUNS = 8
Patch = Callable[[pytest.MonkeyPatch], None]


def one_blip_excludes_a_verifier(patch: pytest.MonkeyPatch) -> None:
    """A poll that fails takes its verifier out for ever, whatever the controller says."""
    lost: set[tuple[int, str]] = set()
    take_view = Verifiers._take_view

    def lose(self: Verifiers, link: VerifierLink, error: Exception) -> None:
        lost.add((id(self), link.verifier_id))

    def take_all_but_the_lost(self: Verifiers, view: Any) -> Any:
        serving = {name: handle for name, handle in view.verifiers.items() if (id(self), name) not in lost}
        object.__setattr__(view, "verifiers", serving)
        return take_view(self, view)

    patch.setattr(Verifiers, "suspect", lose)
    patch.setattr(Verifiers, "_take_view", take_all_but_the_lost)


def a_lost_submit_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Verifiers) -> list[Any]:
        for link in self.links.values():
            for call in [call for call in link.submits if call.done]:
                del link.submits[call]
        return []

    start = Calls.start

    def start_once(self: Calls, actor: Any, method: str, *arguments: Any, deadline_s: float, retry: bool = True) -> Any:
        return start(self, actor, method, *arguments, deadline_s=deadline_s, retry=retry and method != "submit")

    patch.setattr(Verifiers, "failed_submits", forget)
    patch.setattr(Calls, "start", start_once)


def pings_are_taken_for_progress(patch: pytest.MonkeyPatch) -> None:
    poll = Member.poll

    def trust(self: Member, now: float, health_interval_s: float) -> bool:
        became_ready = poll(self, now, health_interval_s)
        self.stalled_s = 0.0
        return became_ready

    patch.setattr(Member, "poll", trust)


def requests_fail_with_their_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Whoever was at three verifiers that failed is taken for the cause."""
    deaths: Counter[str] = Counter()

    def accuse(self: Quarantine, verifier_id: str, requests: Mapping[str, int]) -> list[str]:
        deaths.update(requests)
        return [name for name in requests if deaths[name] % 3 == 0]

    patch.setattr(Quarantine, "accuse", accuse)


def events_are_lost_with_their_answer(patch: pytest.MonkeyPatch) -> None:
    read = EventQueue.read

    def drain(self: EventQueue[Any], after: int, timeout_s: float = 0.0) -> tuple[int, list[Any]]:
        first, events = read(self, self._first, timeout_s)
        read(self, first + len(events))
        return first, events

    patch.setattr(EventQueue, "read", drain)


def attempts_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """Every attempt at a request has the same number, so that an old one passes for the present one."""
    from specactor_ray.rollout.journal import Journal

    hand_to = Journal.hand_to

    def unnumbered(self: Journal, request_id: str, verifier_id: str) -> Any:
        self.entries[request_id].attempt = 0
        return hand_to(self, request_id, verifier_id)

    patch.setattr(Journal, "hand_to", unnumbered)


def old_weights_serve_on(patch: pytest.MonkeyPatch) -> None:
    """Whoever had weights once is taken to have the current ones, and does not refuse."""
    set_current = WeightSync.set_current
    add = Requests.add

    def forget(self: WeightSync, weights: WeightSet) -> None:
        set_current(self, weights)
        patch.setattr(self, "_is_current", lambda member: True, raising=False)

    def take(self: Requests, request: Any) -> None:
        object.__setattr__(request, "weight_version", self._engine.weight_version)
        add(self, request)

    patch.setattr(WeightSync, "set_current", forget)
    patch.setattr(Requests, "add", take)


MUTANTS: list[tuple[Patch, tuple[str, ...]]] = [
    (one_blip_excludes_a_verifier, ("bad links",)),
    (a_lost_submit_is_not_noticed, ("bad links",)),
    (pings_are_taken_for_progress, ("wedge engine",)),
    (requests_fail_with_their_neighbours, ("kill verifier", "poison")),
    (events_are_lost_with_their_answer, ("bad links",)),
    (attempts_are_not_told_apart, ("freeze actor", "partition", "bad links")),
    (old_weights_serve_on, ("kill drafter",)),
]


@pytest.mark.parametrize(("mutant", "kinds"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_defect_is_found(mutant: Patch, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [
        FaultScenario(seed, requests=96, verifiers=2, drafters=1, faults=FaultPlan(kinds, 30, 0.4))
        for seed in range(RUNS)
    ]
    monkeypatch.setattr("tests.faults.run._STANDSTILL_S", 50.0)  # some defects only spin from then on
    with monkeypatch.context() as patch:
        mutant(patch)
        found = next((report for one in scenarios if (report := simulate(one)).violations), None)
    assert found is not None, f"{RUNS} runs did not find it"
    assert not simulate(found.scenario).violations, "without the defect the same run is sound"
