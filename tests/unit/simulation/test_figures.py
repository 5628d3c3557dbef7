"""Every figure of metrics and trajectories beside a recount: of the engines' steps, and of what the driver received."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from specactor_ray.actors.loops import VerifierActor
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.simulation.network import VirtualActor
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from specactor_ray.transport.messages import Progress, RequestStats
from tests.faults.injector import FaultPlan
from tests.faults.models import FaultyHost
from tests.faults.run import FaultScenario, Simulation


class Recount:
    """What a journal received, counted by what became of its entries."""

    def __init__(self, journal: Journal) -> None:
        self.steps, self.discarded_of = Counter[str](), Counter[str]()
        self.drafts: dict[str, Counter[tuple[str, int]]] = {}
        self.kept = self.discarded = 0
        self._journal, self._take = journal, journal.progress
        journal.progress = self.progress  # type: ignore[method-assign]

    def progress(self, message: Progress) -> list[str]:
        entries = self._journal.entries
        before = {name: (one.num_tokens, one.stop) for name, one in entries.items()}
        gapped, verified = self._take(message), message.verified
        for at, ((name, _), length) in enumerate(zip(message.requests, message.lengths.tolist(), strict=True)):
            entry = entries.get(name)
            if entry is None or (entry.num_tokens, entry.stop) == before[name]:
                self.discarded += length
                continue
            grown = entry.num_tokens - before[name][0]
            self.kept, self.discarded = self.kept + grown, self.discarded + length - grown
            self.steps[name] += 1
            self.discarded_of[name] += length - grown
            if verified is not None and verified.drafted[at]:
                mine, method = self.drafts.setdefault(name, Counter()), verified.names[verified.methods[at]]
                mine[method, 0] += int(verified.drafted[at])
                mine[method, 1] += int(verified.accepted[at])
        return gapped

    def stats(self, name: str) -> RequestStats:
        mine = self.drafts.get(name, Counter())
        by_method = {method: (mine[method, 0], mine[method, 1]) for method, _ in mine}
        drafted, accepted = (sum(pair[n] for pair in by_method.values()) for n in range(2))
        return RequestStats(self.steps[name], drafted, accepted, self.discarded_of[name], by_method)


class RecordedHost(FaultyHost):
    """Keeps the result of every step."""

    log: list[StepResult]

    def build_engine(self, spec: Any) -> Any:
        engine = super().build_engine(spec)
        step = engine.step

        def recorded(drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
            result = step(drafts, window)
            self.log.append(result)
            return result

        engine.step = recorded  # type: ignore[method-assign]
        return engine


@dataclass
class Truth:
    """Sums over the steps of one verifier."""

    log: list[StepResult]
    now: float

    def total(self, name: str) -> float:
        return sum(float(getattr(result, name).sum()) for result in self.log)

    @property
    def row_steps(self) -> int:
        return sum(int((result.lengths > 0).sum()) for result in self.log)

    def by_position(self, name: str) -> list[int]:
        """How often the 1st, 2nd, ... draft token was verified, or was right."""
        counts = [count for result in self.log for count in getattr(result, name).tolist()]
        most = max((count for result in self.log for count in result.drafted.tolist()), default=0)
        return [sum(count > at for count in counts) for at in range(most)]

    @property
    def seconds(self) -> float:
        return sum(result.forward_s + result.sampling_s for result in self.log)


Check = Callable[[Any, Truth, Mapping[str, Any]], bool]


def near(value: float, expected: float) -> bool:
    return value == pytest.approx(expected)


COUNTERS: dict[str, Check] = {
    "steps": lambda v, t, _: v == len(t.log),
    "committed_tokens": lambda v, t, _: v == t.total("lengths") == sum(len(result.tokens) for result in t.log),
    "row_steps": lambda v, t, _: v == t.row_steps,
    "supplied_tokens": lambda v, t, all_: t.total("drafted") <= v and all_["supplied_row_steps"] <= v,
    "supplied_row_steps": lambda v, t, _: sum(int((r.drafted > 0).sum()) for r in t.log) <= v <= t.row_steps,
    "drafted_tokens": lambda v, t, _: v == t.total("drafted"),
    "accepted_tokens": lambda v, t, _: v == t.total("accepted"),
    "refuted_tails": lambda v, t, _: v >= sum(int((r.accepted < r.drafted).sum()) for r in t.log),
    "forward_s": lambda v, t, _: near(v, sum(r.forward_s for r in t.log)),
    "sampling_s": lambda v, t, _: near(v, sum(r.sampling_s for r in t.log)),
    "waiting_s": lambda v, t, _: 0.0 <= v <= t.now - t.seconds,
    "protocol_s": lambda v, t, all_: 0.0 <= v <= t.now - t.seconds - all_["waiting_s"] + 1e-6,
    "plain_s": lambda v, t, all_: v >= 0.0 and (all_["drafted_tokens"] > 0 or near(v, t.seconds + all_["protocol_s"])),
    "drafted_by_position": lambda v, t, _: v == t.by_position("drafted"),
    "accepted_by_position": lambda v, t, _: v == t.by_position("accepted"),
    "acceptance_rate": lambda v, t, _: near(v, t.total("accepted") / max(t.total("drafted"), 1)),
    "acceptance_length": lambda v, t, _: near(v, t.total("lengths") / max(t.row_steps, 1)),
    "supply": lambda v, t, all_: near(v, all_["supplied_tokens"] / max(t.row_steps, 1)),
    "supply_share": lambda v, t, all_: near(v, all_["supplied_row_steps"] / max(t.row_steps, 1)),
    "speedup": lambda v, t, all_: near(
        v * (t.seconds + all_["waiting_s"] + all_["protocol_s"]), all_["plain_s"] if t.seconds else 0.0
    ),
}
"""Each figure of `RolloutMetrics` → whether it is right, by its value, the steps, and the other figures."""


class Recorded(Simulation):
    """Compares all figures when nothing runs any more."""

    def __init__(self, scenario: FaultScenario) -> None:
        super().__init__(scenario)
        self.logs: dict[str, list[StepResult]] = {}
        self.ended: list[JournalEntry] = []
        self.compared = self.released = self.moved = 0

    def make_host(self, actor: VirtualActor) -> FaultyHost:
        host = RecordedHost(self.network, actor, self.world, self.models)
        host.log = self.logs.setdefault(actor.name, [])
        return host

    def start_run(self) -> None:
        super().start_run()
        journal = self.queue.dispatcher.journal
        self.recount, end = Recount(journal), journal.end

        def ended(message: Any) -> JournalEntry:
            entry = end(message)
            self.ended.append(entry)
            return entry

        journal.end = ended  # type: ignore[method-assign]
        release, balance = journal.release, self.queue.dispatcher._balance

        def released(request_id: str) -> JournalEntry:
            self.released += 1
            return release(request_id)

        def balanced(now: float) -> None:
            before = self.released
            balance(now)
            self.moved += self.released - before

        journal.release = released  # type: ignore[method-assign]
        self.queue.dispatcher._balance = balanced  # type: ignore[method-assign]

    def _check_single(self, handle: Handle, sampling: SamplingParams) -> None:
        super()._check_single(handle, sampling)
        if handle.result().stats != self.recount.stats(handle.key):
            self.fail(f"{handle.key} has the counters {handle.result().stats}, not {self.recount.stats(handle.key)}")

    def _check_settled(self) -> None:
        super()._check_settled()
        for entry in self.ended:
            if entry.stats != self.recount.stats(entry.request_id):
                self.fail(f"{entry.request_id} has the counters {entry.stats}")
        verifiers = self.queue.dispatcher.verifiers
        own = {name: counters for name, counters in verifiers.counters.items() if name in self.ask("view").verifiers}
        for name, counters in own.items():
            truth = Truth(self.logs[name], self.kernel.now)
            figures = RolloutMetrics.merge([counters]).to_dict()
            for figure, value in figures.items():
                self.compared += 1
                if figure in COUNTERS and not COUNTERS[figure](value, truth, figures):
                    self.fail(f"{name} shows {figure} {value}")
        exported = {row.name.removeprefix("specactor_"): row.value for row in self.queue.metric_rows()}
        expected = {
            "journaled_tokens_total": self.recount.kept,
            "discarded_tokens_total": self.recount.discarded,
            "requests_reissued_total": self.released - self.moved,
            "requests_in_flight": 0,
            "weight_version": self.version,
            "weight_syncs_total": self.version,
        }
        if expected != (shown := {name: exported[name] for name in expected}):
            self.fail(f"the driver exports {shown}, not {expected}")


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        ("plain", ()),
        ("decoupled", ("close early",)),
        ("coupled", ("kill verifier", "close early")),
        ("decoupled", ("bad links", "freeze actor")),
    ],
)
def test_every_figure_is_that_of_the_records(mode: str, faults: tuple[str, ...]) -> None:
    """With moves between verifiers, aborts, stop texts, new weights, lost verifiers and lost messages."""
    plan = FaultPlan(faults, 12, 0.3) if faults else FaultPlan()
    scenario = FaultScenario(7, requests=48, verifiers=3, mode=mode, hosted=True, stops=True, faults=plan)
    simulation = Recorded(scenario)
    report = simulation.run()
    assert report.violations == []
    assert simulation.compared >= 2 * len(COUNTERS) and simulation.recount.discarded > 0
    if "kill verifier" in faults:
        assert simulation.released > simulation.moved > 0


class Polled(Simulation):
    """Records the answers to polls, and compares the driver's counters with those of the verifiers after each round."""

    def __init__(self, scenario: FaultScenario, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(scenario)
        self.counted: dict[VerifierActor, list[float]] = {}
        """Verifier → times of its answers with counters while it ran requests."""
        self.answers = self.compared = 0
        poll = VerifierActor.poll

        def polled(actor: VerifierActor, *arguments: Any) -> Any:
            answer = poll(actor, *arguments)
            self.answers += 1
            if actor._running().running and answer[2] is not None:
                self.counted.setdefault(actor, []).append(self.kernel.now)
            return answer

        monkeypatch.setattr(VerifierActor, "poll", polled)

    def _round(self, number: int) -> None:
        super()._round(number)
        begin = self.kernel.now
        shown, serving = self.queue.metrics().to_dict(), self.ask("view").verifiers.values()
        if self.kernel.now > begin + 0.5:
            self.fail(f"round {number}: the final counters came after {self.kernel.now - begin:.1f} s")
        counters = [self.calls.ask(one, "ping", deadline_s=5.0) for one in serving]
        truth = RolloutMetrics.merge(counters).to_dict()
        self.compared += truth["committed_tokens"] > 0
        if shown != truth:
            self.fail(f"round {number} ends with {shown}, and the verifiers have {truth}")


@pytest.mark.parametrize(("mode", "seed"), [("plain", 0), ("coupled", 1)])
def test_verifiers_send_counters_once_a_second_and_complete_ones_at_the_end(
    monkeypatch: pytest.MonkeyPatch, mode: str, seed: int
) -> None:
    """Also behind outputs that the driver ends: those with stop texts, and aborted ones."""
    plan = FaultPlan(("close early",), 3, 0.3)
    simulation = Polled(FaultScenario(seed, requests=96, verifiers=2, mode=mode, stops=True, faults=plan), monkeypatch)
    assert simulation.run().violations == [] and simulation.compared >= 2
    times = simulation.counted.values()
    assert all(later >= at + 1.0 for one in times for at, later in itertools.pairwise(one))
    assert simulation.answers > 3 * sum(map(len, times)) > 0
