"""`scripts/chaos --virtual N` and `--replay SEED`: faults on virtual time, and whether anything is lost by them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED
from specactor_ray.core.files import write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.simulation.run import silence
from tests.faults.campaign import Campaign, replay_line, run_campaign, shrink
from tests.faults.injector import KINDS, FaultPlan
from tests.faults.run import FaultScenario, simulate

MODES = ("plain", "coupled", "decoupled")
_OF_CAMPAIGNS = ("seed", "processes", "json")
_OF_REPLAYS = ("count", "interval", "kinds", "layout", "training", "trace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 sound, 1 a run failed, 2 a wrong option, 130 interrupted."""
    options = parse(arguments)
    if options.replay is not None:
        return replay_faults(options.scenario, options.trace)
    return run_faults(options.virtual, options.seed or 0, options.requests, options.processes, options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__, allow_abbrev=False)
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--virtual", type=at_least(1), metavar="N", help="faults, over as many runs as that takes")
    job.add_argument("--replay", type=at_least(0), metavar="SEED", help="run this one seed again")
    parser.add_argument("--requests", type=at_least(1), default=64, help="of a stream or a training step (default: 64)")
    parser.add_argument("--seed", type=at_least(0), help="--virtual: of the campaign (default: 0)")
    parser.add_argument("--processes", type=at_least(1), help="--virtual: default: one per core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="--virtual: report to write; never overwritten")
    parser.add_argument("--count", type=at_least(1), help="--replay: faults to schedule (default: 50)")
    parser.add_argument("--interval", type=_seconds, help="--replay: mean seconds between them")
    parser.add_argument("--kinds", type=_kinds, help="--replay: kinds of faults, comma-separated")
    parser.add_argument("--layout", type=_layout, help="--replay: verifiers,drafters,nodes,mode")
    parser.add_argument("--training", action="store_true", help="--replay: train instead of streaming")
    parser.add_argument("--trace", action="store_true", help="--replay: print every event")
    options = parser.parse_args(arguments)
    given, wanted = ("--virtual", "--replay") if options.replay is None else ("--replay", "--virtual")
    for name in _OF_REPLAYS if options.replay is None else _OF_CAMPAIGNS:
        if getattr(options, name) is not None and getattr(options, name) is not False:
            parser.error(f"--{name}: does not go with {given}; it is an option of {wanted}")
    if options.training and options.kinds is None:
        parser.error("--training: needs --kinds; without it the seed decides whether a run trains")
    if options.json is not None and options.json.exists():
        parser.error(f"--json: {options.json} exists; name another file")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}; make it first")
    options.scenario = None if options.replay is None else replayed(options)
    return options


def replayed(options: argparse.Namespace) -> FaultScenario:
    """The scenario of the seed, with what the options say instead."""
    scenario = FaultScenario.draw(options.replay, options.count or 50, options.requests)
    if options.kinds is not None:
        plan = FaultPlan(options.kinds, scenario.faults.count, scenario.faults.interval_s)
        scenario = replace(scenario, faults=plan, training=options.training)
    if options.interval is not None:
        scenario = replace(scenario, faults=replace(scenario.faults, interval_s=options.interval))
    return replace(scenario, **options.layout or {})


def at_least(least: int) -> Any:
    """Parser of whole numbers from `least` on."""

    def parse_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of {least} or more")
        return int(text)

    return parse_number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time in seconds above 0")
    return seconds


def _kinds(text: str) -> tuple[str, ...]:
    named = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    unknown = [kind for kind in named if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a kind of fault; the kinds are {', '.join(KINDS)}")
    return named


def _layout(text: str) -> dict[str, Any]:
    parts = [part.strip() for part in text.split(",")]
    numbers = parts[:3]
    if len(parts) != 4 or not all(part.isdecimal() and int(part) >= 1 for part in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not verifiers,drafters,nodes,mode, such as 2,4,3,decoupled")
    if parts[3] not in MODES:
        raise argparse.ArgumentTypeError(f"{parts[3]!r} is not a mode; use one of {', '.join(MODES)}")
    return {**dict(zip(("verifiers", "drafters", "nodes"), map(int, numbers), strict=True)), "mode": parts[3]}


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
    gave_up = f"{campaign.failed_starts} starts failed and {campaign.gave_up} rollouts gave up, as they may"
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
    """How often each kind of fault struck, the most frequent first."""
    table = Table(title="faults that struck", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("kind")
    table.add_column("times", justify="right")
    for kind, times in sorted(faults.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(kind, f"{times:,}")
    return table
