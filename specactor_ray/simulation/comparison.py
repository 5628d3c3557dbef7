"""Comparison of variants of one scenario, at one or several values of one of its keys, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from specactor_ray.core.environment import versions
from specactor_ray.core.errors import ConfigError, SpecActorError
from specactor_ray.core.signals import blocked
from specactor_ray.simulation.cluster import silence
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result, SimulatedRollouts
from specactor_ray.simulation.scenario import load_scenario, variant_of


@dataclass(frozen=True)
class VariantJob:
    """One variant of a scenario to simulate, with the package's own policy or the clairvoyant one."""

    path: Path
    overrides: Sequence[str]
    """`KEY=VALUE` items that hold for all variants."""
    variant: str
    clairvoyant: bool = False


@dataclass(frozen=True)
class Sweep:
    """A key of the scenario and its values in turn."""

    key: str
    values: Sequence[str]


def compare(
    path: Path,
    overrides: Sequence[str] = (),
    names: Sequence[str] | None = None,
    sweep: Sweep | None = None,
    processes: int | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> tuple[dict[str, Any], list[Result]]:
    """Simulate variants of a scenario (default: all), at every value of a sweep. `overrides`: `KEY=VALUE` items that
    hold for all variants; the other arguments and errors are those of `run_jobs`.

    Returns:
        The report as plain data (`points`: one element per value), and the results. After an interruption
        (KeyboardInterrupt) those that are finished.
    """
    along = {"": [*overrides]}
    if sweep is not None:
        along = {value: [*overrides, f"{sweep.key}={value}"] for value in sweep.values}
    jobs = {
        (value, name): VariantJob(path, items, name)
        for value, items in along.items()
        for name in choose_variants(path, items, names)
    }
    found = dict(zip(jobs, run_jobs(list(jobs.values()), processes, on_progress), strict=True))
    points = []
    for value, items in along.items():
        mine = {name: found[at, name] for at, name in jobs if at == value}
        finished = [result for result in mine.values() if result is not None]
        if finished:
            points.append({"value": value, **_point(path, items, list(mine), finished)})
    report = {
        "scenario": str(path),
        "overrides": list(overrides),
        "sweep": sweep.key if sweep is not None else "",
        "status": "interrupted" if None in found.values() else "complete",
        "points": points,
        "versions": versions(),
    }
    return report, [result for result in found.values() if result is not None]


def _point(path: Path, items: Sequence[str], names: Sequence[str], results: Sequence[Result]) -> dict[str, Any]:
    """Finished results at one value of the swept key. The first of the requested variants is the baseline."""
    scenario = load_scenario(path, items)
    speeds = {result.variant: result.tokens_per_s_and_device for result in results}
    return {
        "description": scenario.description,
        "seed": scenario.seed,
        "part": scenario.part,
        "variants": list(names),
        "baseline": names[0],
        "device": "GPU" if scenario.config.target.gpus else "core",
        "results": [result.to_json() for result in results],
        "ratios": {name: speed / speeds[names[0]] for name, speed in speeds.items()} if names[0] in speeds else {},
    }


def choose_variants(path: Path, overrides: Sequence[str] = (), names: Sequence[str] | None = None) -> list[str]:
    """The variants to simulate, each once. Raises ConfigError if the scenario or a variant is wrong or missing."""
    chosen = list(dict.fromkeys(load_scenario(path, overrides).variants if names is None else names))
    if not chosen:
        fix = "add some, such as variants: {plain: [config.mode=plain]}."
        raise ConfigError("variants", "the scenario has none.", fix)
    for name in chosen:
        variant_of(path, overrides, name)
    return chosen


def flattened(path: Path, overrides: Sequence[str], sweep: Sweep | None, names: Sequence[str]) -> list[str]:
    """One line for each override or swept key that replaces a variant's own value."""
    variants = load_scenario(path).variants
    keys = [item.partition("=")[0] for item in overrides] + ([sweep.key] if sweep is not None else [])
    lines = []
    for key in dict.fromkeys(keys):
        for name in names:
            for item in variants.get(name) or ():
                own = item.partition("=")[0]
                if own == key or own.startswith(f"{key}."):
                    lines.append(f"{key} is the same in all variants now; {name} would have {item}")
    return lines


def run_jobs(
    jobs: Sequence[VariantJob], processes: int | None = None, on_progress: Callable[[float], None] = lambda done: None
) -> list[Result | None]:
    """Run all jobs, which start in this order.

    Args:
        processes: Most processes to use at once; default: one per core. With 1, or a single job, everything runs in
            this process.
        on_progress: Called with the number of finished jobs.

    Returns:
        One result per job; after an interruption (KeyboardInterrupt) None for those that did not finish.

    Raises:
        UserError, SimulationError: The error of a job.
        SpecActorError: A process died.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    if processes > 1:
        return _run_in_processes(jobs, processes, on_progress)
    silence()
    results: list[Result | None] = [None] * len(jobs)
    try:
        for index, job in enumerate(jobs):
            results[index] = simulate_variant(job)
            on_progress(index + 1)
    except KeyboardInterrupt:
        return results
    return results


def _run_in_processes(
    jobs: Sequence[VariantJob], processes: int, on_progress: Callable[[float], None]
) -> list[Result | None]:
    others = set(multiprocessing.active_children())
    resource_tracker.ensure_running()  # its own start, at the first process, would unblock the signal again
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), silence) as pool:
        with blocked(signal.SIGINT):  # the processes inherit it: the Ctrl-C of their terminal is handled here
            futures = [pool.submit(simulate_variant, job) for job in jobs]
        try:
            for finished, future in enumerate(as_completed(futures), start=1):
                future.result()
                on_progress(finished)
        except KeyboardInterrupt:
            return [future.result() if _has_ended(future) else None for future in futures]
        except BrokenProcessPool:
            problem = "a process died (killed for memory?)"
            raise SpecActorError(f"{problem}; run fewer variants (--compare) or --processes 1") from None
        finally:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _has_ended(future: Future[Result]) -> bool:
    return future.done() and future.exception() is None


def simulate_variant(job: VariantJob) -> Result:
    """Simulate one variant in this process. Raises ConfigError if the scenario or the variant is wrong, and
    SimulationError if the run cannot end, or the package raised an error."""
    rollouts = SimulatedRollouts(job.variant, variant_of(job.path, job.overrides, job.variant), job.clairvoyant)
    try:
        return rollouts.run()
    except SimulationError as error:
        raise SimulationError(f"variant {job.variant}: {error}") from error
    finally:
        rollouts.kernel.close()
