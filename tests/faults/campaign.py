"""`scripts/chaos --virtual N` and `--replay SCENARIO`: runs on virtual time under faults; failing ones are shrunk."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED
from specactor_ray.core.files import write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.simulation.cluster import silence
from tests.faults.injector import FaultPlan
from tests.faults.run import FaultScenario, Report, simulate

FAULTS_PER_RUN = 100
_SEEDS_PER_CAMPAIGN = 100_000
_SHRINK_RUNS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 sound, 1 a run failed, 2 a wrong option, 130 interrupted."""
    options = parse(arguments)
    if options.replay is not None:
        return replay_faults(options.replay, options.trace)
    return run_faults(options.virtual, options.seed, options.requests, options.processes, options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__, allow_abbrev=False)
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--virtual", type=at_least(1), metavar="N", help="faults, over as many runs as that takes")
    job.add_argument("--replay", type=_scenario, metavar="SCENARIO", help="a seed, or the JSON of a failed run")
    parser.add_argument("--requests", type=at_least(1), default=64, help="of a stream or a training step (default: 64)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the campaign (default: 0)")
    parser.add_argument("--processes", type=at_least(1), help="default: one per core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="report of the campaign; never overwritten")
    parser.add_argument("--trace", action="store_true", help="--replay: print every event")
    options = parser.parse_args(arguments)
    if options.json is not None and options.json.exists():
        parser.error(f"--json: {options.json} exists; name another file")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}; make it first")
    return options


def at_least(least: int) -> Any:
    """Parser of whole numbers from `least` on."""

    def parse_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of {least} or more")
        return int(text)

    return parse_number


def _scenario(text: str) -> FaultScenario:
    """The scenario of a seed in a campaign, or of the JSON in a `replay_line`."""
    if text.isdecimal():
        return FaultScenario.draw(int(text), FAULTS_PER_RUN)
    try:
        data = json.loads(text)
        plan = data.pop("faults")
        return FaultScenario(**data, faults=FaultPlan(**{**plan, "kinds": tuple(plan["kinds"])}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor the JSON of a scenario ({error})") from None


def replay_line(scenario: FaultScenario) -> str:
    """The command that repeats exactly this run."""
    return f"scripts/chaos --replay {shlex.quote(json.dumps(asdict(scenario)))}"


@dataclass
class Campaign:
    """Totals of many runs."""

    seed: int
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    failed: int = 0
    """Poison requests that ended with their reason."""
    gave_up: int = 0
    """Runs that ended with a permitted error: their controller was killed, or their only verifier all the time."""
    restarts: int = 0
    failed_starts: int = 0
    """Starts that ended because of enough faults."""
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
        faults: Faults in total, those on single calls included.
        seed: Seed of the campaign; each run has its own, derived from it.
        requests: Requests of each stream.
        processes: Processes to use; default: one per core.
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


def shrink(scenario: FaultScenario) -> FaultScenario:
    """A smaller scenario that fails as well: fewer faults, kinds, requests and actors, within a bounded search."""
    runs, progress = 0, True
    while progress:
        progress = False
        for smaller in _smaller(scenario):
            if runs >= _SHRINK_RUNS:
                return scenario
            runs += 1
            if simulate(smaller).violations:
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


def run_faults(faults: int, seed: int, requests: int, processes: int | None, output: Path | None) -> int:
    console, campaign, interrupted = make_console(), Campaign(seed), False
    with sigterm_interrupts(), PhaseProgress(make_console(sys.stderr), "faults", faults) as progress:

        def show(now: Campaign) -> None:
            nonlocal campaign
            campaign = now
            figures = f"{now.num_faults:,} faults, {now.runs} runs, {len(now.violations)} failed"
            progress.update(now.num_faults, figures)

        try:
            run_campaign(faults, seed, requests, processes, show)
        except KeyboardInterrupt:
            interrupted = True
        seconds = progress.seconds
    silence()  # of what is shrunk, too
    console.print(faults_table(campaign.faults))
    ended = f"{campaign.finished:,} requests finished, {campaign.failed} poison ones failed with their reason"
    say(console, f"{campaign.runs} runs, {campaign.num_faults:,} faults: {ended}")
    gave_up = f"{campaign.failed_starts} starts failed and {campaign.gave_up} rollouts gave up (permitted)"
    say(console, f"training resumed {campaign.restarts}x; {gave_up}")
    say(console, f"{campaign.events:,} events, {campaign.virtual_s:,.0f} virtual seconds in {seconds:.0f} s")
    lines = []
    for report in campaign.violations if not interrupted else ():
        found = "; ".join(report.violations[:3])
        say(console, f"seed {report.scenario.seed} FAILED: {found}; looking for a smaller run")
        lines.append(replay_line(shrink(report.scenario)))
        say(console, f"  repeat it with: {lines[-1]}")
    if output is not None:
        summary = {name: value for name, value in vars(campaign).items() if name != "violations"}
        failures = [{"seed": one.scenario.seed, "violations": one.violations} for one in campaign.violations]
        report_data = {
            **summary,
            "num_faults": campaign.num_faults,
            "seconds": seconds,
            "failures": failures,
            "replay": lines,
            "status": "interrupted" if interrupted else "complete",
        }
        write_json(output, report_data, shared=True, new=True)
    if interrupted:
        seeds = ", ".join(str(report.scenario.seed) for report in campaign.violations)
        say(console, f"interrupted; {f'seeds that failed: {seeds}' if seeds else 'nothing was found'}")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if campaign.violations else 0


def replay_faults(scenario: FaultScenario, trace: bool) -> int:
    silence()
    console = make_console()
    report = simulate(scenario, (lambda time, what: say(console, f"{time:12.6f} {what}")) if trace else None)
    console.print(faults_table(report.faults))
    say(console, f"{report.events:,} events, {report.virtual_s:,.1f} virtual seconds, digest {report.digest:08x}")
    for violation in report.violations:
        say(console, f"FAILED: {violation}")
    if not report.violations:
        say(console, "nothing was found")
    return EXIT_FAILED if report.violations else 0


def faults_table(faults: Mapping[str, int]) -> Table:
    """Number of strikes of each kind of fault, the most frequent first."""
    rows = ((kind, f"{times:,}") for kind, times in sorted(faults.items(), key=lambda item: (-item[1], item[0])))
    return make_table(("kind", "times"), rows, "faults that struck", text=("kind",), title_justify="left")
