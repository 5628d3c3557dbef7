"""Many simulated runs: until as many faults have struck as were asked for, on all cores; what fails is shrunk."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace

from specactor_ray.simulation.cluster import silence
from tests.faults.run import FaultScenario, Report, simulate

FAULTS_PER_RUN = 100
_SEEDS_PER_CAMPAIGN = 100_000
_SHRINK_RUNS = 60


@dataclass
class Campaign:
    """What many runs came to."""

    seed: int
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    failed: int = 0
    """Poison requests that ended with their reason."""
    gave_up: int = 0
    """Runs that ended with an error, as they may: their controller was killed, or their only verifier all the time."""
    restarts: int = 0
    failed_starts: int = 0
    """Starts that enough faults had struck."""
    events: int = 0
    virtual_s: float = 0.0
    violations: list[Report] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    def add(self, report: Report) -> None:
        """Count one more run."""
        self.runs += 1
        self.faults.update(report.faults)
        self.finished += report.finished
        self.failed += report.failed
        self.gave_up += bool(report.gave_up)
        self.restarts += report.restarts
        self.failed_starts += report.failed_starts
        self.events += report.events
        self.virtual_s += report.virtual_s
        if report.violations:
            self.violations.append(report)


def run_campaign(
    faults: int,
    seed: int,
    requests: int = 64,
    processes: int | None = None,
    on_run: Callable[[Campaign], None] = lambda campaign: None,
) -> Campaign:
    """Run scenarios until `faults` faults have struck.

    Args:
        faults: Faults in all, those on single calls included.
        seed: Of the campaign; each run has its own, derived from it.
        requests: Of each stream.
        processes: To use; default: one per core.
        on_run: Called after every run.
    """
    campaign, seeds = Campaign(seed), iter(range(seed * _SEEDS_PER_CAMPAIGN, (seed + 1) * _SEEDS_PER_CAMPAIGN))
    scenarios = (FaultScenario.draw(one, min(FAULTS_PER_RUN, faults), requests) for one in seeds)
    processes = processes or len(os.sched_getaffinity(0))
    if processes == 1:
        silence()
        while campaign.num_faults < faults:
            campaign.add(simulate(next(scenarios)))
            on_run(campaign)
        return campaign
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=silence) as pool:
        running: set[Future[Report]] = {pool.submit(simulate, next(scenarios)) for _ in range(processes)}
        while campaign.num_faults < faults:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                campaign.add(future.result())
                on_run(campaign)
                running.add(pool.submit(simulate, next(scenarios)))
        for future in running:
            future.cancel()
    return campaign


def shrink(scenario: FaultScenario, on_run: Callable[[], None] = lambda: None) -> FaultScenario:
    """A smaller scenario that fails as well: fewer faults, kinds, requests and actors, within a bounded search.

    Args:
        scenario: One that fails.
        on_run: Called after every run.
    """
    runs, progress = 0, True
    while progress:
        progress = False
        for smaller in _smaller(scenario):
            if runs >= _SHRINK_RUNS:
                return scenario
            runs += 1
            failed = bool(simulate(smaller).violations)
            on_run()
            if failed:
                scenario, progress = smaller, True
                break
    return scenario


def _smaller(scenario: FaultScenario) -> Iterator[FaultScenario]:
    plan = scenario.faults
    if plan.count > 1:
        yield replace(scenario, faults=replace(plan, count=plan.count // 2))
        yield replace(scenario, faults=replace(plan, count=plan.count - 1))
    for kind in plan.kinds:
        yield replace(scenario, faults=replace(plan, kinds=tuple(one for one in plan.kinds if one != kind)))
    if scenario.requests > 1:
        yield replace(scenario, requests=scenario.requests // 4 or 1)
        yield replace(scenario, requests=scenario.requests // 2)
    if scenario.drafters > 1:
        yield replace(scenario, drafters=1)
    if scenario.verifiers > 1:
        yield replace(scenario, verifiers=1)


def replay_line(scenario: FaultScenario) -> str:
    """The command that runs exactly this scenario."""
    plan = scenario.faults
    parts = [
        f"--replay {scenario.seed}",
        f"--count {plan.count}",
        f"--interval {plan.interval_s!r}",
        f"--kinds '{','.join(plan.kinds)}'",
        f"--requests {scenario.requests}",
        f"--layout {scenario.verifiers},{scenario.drafters},{scenario.nodes},{scenario.mode}",
    ]
    return " ".join(["scripts/chaos", *parts, *(["--training"] if scenario.training else [])])
