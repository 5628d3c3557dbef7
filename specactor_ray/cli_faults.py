"""`specactor simulate` without a scenario: faults, and whether anything is lost by them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specactor_ray.errors import InputError
from specactor_ray.signals import sigterm_interrupts

if TYPE_CHECKING:
    from specactor_ray.simulation.fault_run import FaultScenario

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def parse_scenario(
    seed: int,
    count: int,
    requests: int,
    interval: float | None,
    kinds: str | None,
    layout: str | None,
    training: bool,
) -> FaultScenario:
    """The scenario of a seed, with what the options say instead.

    Raises:
        InputError: An option does not say what it should.
    """
    from dataclasses import replace

    from specactor_ray.simulation.fault_run import FaultScenario
    from specactor_ray.simulation.faults import KINDS, FaultPlan

    scenario = FaultScenario.draw(seed, count, requests)
    if kinds is not None:
        named = tuple(kind.strip() for kind in kinds.split(",") if kind.strip())
        unknown = [kind for kind in named if kind not in KINDS]
        if unknown:
            raise InputError(f"--kinds: {unknown[0]!r} is not a kind of fault; the kinds are {', '.join(KINDS)}")
        plan = FaultPlan(named, count, scenario.faults.interval_s)
        scenario = replace(scenario, faults=plan, lend="lend" in named, training=training)
    elif training:
        raise InputError("--training: needs --kinds; without it the seed decides whether a run trains")
    if interval is not None:
        if not 0.0 < interval < float("inf"):
            raise InputError(f"--interval: {interval} is not a time in seconds above 0")
        scenario = replace(scenario, faults=replace(scenario.faults, interval_s=interval))
    if layout is not None:
        scenario = replace(scenario, **_parse_layout(layout))
    return scenario


def _parse_layout(text: str) -> dict[str, Any]:
    parts = [part.strip() for part in text.split(",")]
    numbers = parts[:3]
    if len(parts) != 4 or not all(part.isdecimal() and int(part) >= 1 for part in numbers):
        raise InputError(f"--layout: {text!r} is not verifiers,drafters,nodes,mode, such as 2,4,3,decoupled")
    if parts[3] not in ("plain", "coupled", "decoupled"):
        raise InputError(f"--layout: {parts[3]!r} is not a mode; use plain, coupled or decoupled")
    return {**dict(zip(("verifiers", "drafters", "nodes"), map(int, numbers), strict=True)), "mode": parts[3]}


def run_faults(faults: int, seed: int, requests: int, processes: int | None, output: Path | None) -> None:
    from specactor_ray.observability.console import make_console, say
    from specactor_ray.observability.phase_progress import PhaseProgress
    from specactor_ray.observability.simulation_report import faults_table
    from specactor_ray.simulation.campaign import Campaign, replay_line, run_campaign, shrink
    from specactor_ray.simulation.run import silence

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
        output.write_text(json.dumps(report_data, indent=2) + "\n", encoding="utf-8")
    if interrupted:
        seeds = ", ".join(str(report.scenario.seed) for report in campaign.violations)
        say(console, f"interrupted; {f'seeds that failed: {seeds}' if seeds else 'nothing was found'}")
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(EXIT_FAILED if campaign.violations else 0)


def replay_faults(scenario: FaultScenario, trace: bool) -> None:
    from specactor_ray.observability.console import make_console, say
    from specactor_ray.observability.simulation_report import faults_table
    from specactor_ray.simulation.fault_run import simulate as run
    from specactor_ray.simulation.run import silence

    silence()
    console = make_console()
    report = run(scenario, (lambda time, what: say(console, f"{time:12.6f} {what}")) if trace else None)
    console.print(faults_table(report.faults))
    say(console, f"{report.events:,} events, {report.virtual_s:,.1f} virtual seconds, digest {report.digest:08x}")
    for violation in report.violations:
        say(console, f"FAILED: {violation}")
    if not report.violations:
        say(console, "nothing was found")
    raise typer.Exit(EXIT_FAILED if report.violations else 0)
