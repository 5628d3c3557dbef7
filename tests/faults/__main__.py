"""`scripts/chaos`: the product's own code under faults on virtual time. Failed runs can be repeated."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field

from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.simulation.cluster import silence
from tests.faults.injector import FaultPlan
from tests.faults.run import FaultScenario, Report, simulate

FAULTS_PER_RUN = 100
_SEEDS_PER_CAMPAIGN = 100_000
_COUNTED = ("finished", "failed", "restarts", "failed_starts", "events", "virtual_s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 sound, 1 a run failed, 2 a wrong option, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="over as many runs as that takes (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign (default: 0)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--replay", type=_scenario, metavar="SCENARIO", help="a seed, or the JSON of a failed run")
    options = parser.parse_args(arguments)
    silence()
    if options.replay is not None:
        campaign = Campaign()
        campaign.add(simulate(options.replay))
        return show(campaign)
    campaign = Campaign()
    with sigterm_interrupts(), PhaseProgress(make_console(sys.stderr), "faults", options.faults) as progress:

        def on_run() -> None:
            failed = len(campaign.violations)
            progress.update(
                campaign.num_faults, f"{campaign.num_faults:,} faults, {campaign.runs} runs, {failed} failed"
            )

        try:
            run_campaign(campaign, options.faults, options.seed, options.processes, on_run=on_run)
        except KeyboardInterrupt:
            show(campaign)
            return EXIT_INTERRUPTED
    return show(campaign)


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

    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    """Sums of the `_COUNTED` fields of reports, and `gave_up`: runs that ended with a permitted error."""
    violations: list[Report] = field(default_factory=list)
    digest: int = 0
    """That of the last run."""

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    def add(self, report: Report) -> None:
        """Count one more run."""
        self.runs += 1
        self.faults.update(report.faults)
        self.totals.update({name: getattr(report, name) for name in _COUNTED})
        self.totals["gave_up"] += bool(report.gave_up)
        self.digest = report.digest
        if report.violations:
            self.violations.append(report)


def run_campaign(
    campaign: Campaign,
    faults: int,
    seed: int,
    processes: int = 1,
    requests: int = 64,
    on_run: Callable[[], None] = lambda: None,
) -> None:
    """Run scenarios until `faults` faults have struck, those on single calls included; calls `on_run` after each."""
    seeds = range(seed * _SEEDS_PER_CAMPAIGN, (seed + 1) * _SEEDS_PER_CAMPAIGN)
    scenarios = (FaultScenario.draw(one, min(FAULTS_PER_RUN, faults), requests) for one in seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=silence) as pool:
        running: set[Future[Report]] = {pool.submit(simulate, next(scenarios)) for _ in range(processes)}
        while campaign.num_faults < faults:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                campaign.add(future.result())
                on_run()
                running.add(pool.submit(simulate, next(scenarios)))
        for future in running:
            future.cancel()


def show(campaign: Campaign) -> int:
    """Print the totals and the failed runs. Returns the exit code."""
    console, totals = make_console(), campaign.totals
    rows = [{"kind": kind, "times": f"{times:,}"} for kind, times in campaign.faults.most_common()]
    console.print(make_table(rows, "faults that struck", text=("kind",), title_justify="left"))
    say(console, f"{campaign.runs} runs, {campaign.num_faults:,} faults, last digest {campaign.digest:08x}")
    say(console, ", ".join(f"{name.replace('_', ' ')} {value:,.0f}" for name, value in totals.items()))
    for report in campaign.violations:
        for violation in report.violations[:3]:
            say(console, f"seed {report.scenario.seed} FAILED: {violation}")
        say(console, f"  repeat it with: {replay_line(report.scenario)}")
    if not campaign.violations:
        say(console, "nothing was found")
    return EXIT_FAILED if campaign.violations else 0


if __name__ == "__main__":
    sys.exit(main())
