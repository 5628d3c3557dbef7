"""Comparison of variants of one scenario, at one or several values of one of its keys, each in its own process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import ConfigError, SpecActorError
from specactor_ray.core.machine import versions
from specactor_ray.core.signals import blocked
from specactor_ray.simulation.cluster import silence
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result, SimulatedRollouts
from specactor_ray.simulation.scenario import load_scenario, variant_of

_POLL_S = 0.5
"""Seconds between reports of progress."""
_shares = list[Any]()
"""In a process of the pool: the array of finished shares of all jobs."""


Job = tuple[Path, Sequence[str], str]
"""One variant of a scenario to simulate: file, `KEY=VALUE` items that hold for all variants, and its name."""


def compare(
    path: Path,
    overrides: Sequence[str] = (),
    names: Sequence[str] | None = None,
    sweep: tuple[str, Sequence[str]] | None = None,
    processes: int | None = None,
    on_progress: Callable[[float, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Simulate variants of a scenario (default: all), at every value of a key if `sweep` names one and its values.
    `overrides`: `KEY=VALUE` items that hold for all variants; `on_progress` also gets the number of jobs; the other
    arguments and errors are those of `run_jobs`.

    Returns:
        The report as plain data (`points`: one element per value).
    """
    along = {"": [*overrides]}
    if sweep is not None:
        along = {value: [*overrides, f"{sweep[0]}={value}"] for value in sweep[1]}
    chosen = {value: choose_variants(path, items, names) for value, items in along.items()}
    jobs = [(path, items, name) for value, items in along.items() for name in chosen[value]]
    points, results = [], iter(run_jobs(jobs, processes, lambda done: on_progress(done, len(jobs))))
    for value, items in along.items():
        points.append({"value": value, **_point(path, items, [*itertools.islice(results, len(chosen[value]))])})
    return {
        "scenario": str(path),
        "overrides": list(overrides),
        "sweep": sweep[0] if sweep is not None else "",
        "points": points,
        "versions": versions(),
    }


def _point(path: Path, items: Sequence[str], results: Sequence[Result]) -> dict[str, Any]:
    """Results at one value of the swept key. The first variant is the baseline."""
    scenario, first = load_scenario(path, items), results[0]
    return {
        "description": scenario.description,
        "seed": scenario.seed,
        "part": scenario.part,
        "baseline": first.variant,
        "device": "GPU" if scenario.config.target.gpus else "core",
        "results": [result.to_json() for result in results],
        "ratios": {one.variant: one.tokens_per_s_and_device / first.tokens_per_s_and_device for one in results},
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


def quick_overrides(path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Items for a run in about a quarter of the time: shorter prompts and outputs."""
    workload, keys = load_scenario(path, overrides).workload, ("prompt_tokens", "median_tokens", "max_tokens")
    return [f"workload.{key}={max(getattr(workload, key) // 4, 1)}" for key in keys]


def run_jobs(
    jobs: Sequence[Job], processes: int | None = None, on_progress: Callable[[float], None] = lambda done: None
) -> list[Result]:
    """Run all jobs, which start in this order.

    Args:
        processes: Most processes to use at once; default: one per core. With 1, or a single job, everything runs in
            this process.
        on_progress: Called with the number of finished jobs, plus the finished shares of running ones.

    Raises:
        UserError, SimulationError: The error of a job.
        SpecActorError: A process died.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    if processes > 1:
        return _run_in_processes(jobs, processes, on_progress)
    silence()
    results = list[Result]()
    for job in jobs:
        results.append(simulate_variant(*job, lambda share: on_progress(len(results) + share)))
        on_progress(len(results))
    return results


def _run_in_processes(jobs: Sequence[Job], processes: int, on_progress: Callable[[float], None]) -> list[Result]:
    others = set(multiprocessing.active_children())
    resource_tracker.ensure_running()  # its own start, at the first process, would unblock the signal again
    context = multiprocessing.get_context("spawn")
    shares = context.RawArray("d", len(jobs))
    with ProcessPoolExecutor(processes, context, _start_process, (shares,)) as pool:
        with blocked(signal.SIGINT):  # the processes inherit it: the Ctrl-C of their terminal is handled here
            futures = [pool.submit(_run_in_process, job, number) for number, job in enumerate(jobs)]
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                on_progress(sum(shares))
        except BrokenProcessPool:
            problem = "a process died (killed for memory?)"
            raise SpecActorError(f"{problem}; run fewer variants (--compare) or --processes 1") from None
        finally:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _start_process(shares: Any) -> None:
    """Keep the common shares of finished work, in a process of the pool."""
    _shares[:] = [shares]
    silence()


def _run_in_process(job: Job, number: int) -> Result:
    result = simulate_variant(*job, lambda share: _shares[0].__setitem__(number, share))
    _shares[0][number] = 1.0
    return result


def simulate_variant(
    path: Path, overrides: Sequence[str], variant: str, on_progress: Callable[[float], None] = lambda share: None
) -> Result:
    """Simulate one variant in this process; `on_progress` is called with its finished share. Raises ConfigError if the
    scenario or the variant is wrong, and SimulationError if the run cannot end, or the package raised an error."""
    rollouts = SimulatedRollouts(variant, variant_of(path, overrides, variant))
    try:
        return rollouts.run(on_progress)
    except SimulationError as error:
        raise SimulationError(f"variant {variant}: {error}") from error
    finally:
        rollouts.kernel.close()
