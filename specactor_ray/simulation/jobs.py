"""Parallel simulations, each in its own process."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from specactor_ray.core.child import Child, Done
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result
from specactor_ray.simulation.run import silence

_PROGRESS_STEP = 0.005
"""Share of a job after which its process reports progress."""


class Job(Protocol):
    """One result to compute; it is sent to another process."""

    @property
    def name(self) -> str:
        """Unique name of the job."""

    def run(self, on_progress: Callable[[float], None]) -> Result:
        """Compute the result, and report the finished share."""


def run_jobs(
    jobs: Sequence[Job],
    processes: int | None = None,
    on_progress: Callable[[Mapping[str, float]], None] = lambda shares: None,
) -> dict[str, Result]:
    """Run all jobs, which start in this order.

    Args:
        processes: Most processes to use at once; default: one per core. With 1, or a single job, everything runs in
            this process.
        on_progress: Called with name → finished share; 1 once the result is there.

    Returns:
        Name → result; after an interruption (KeyboardInterrupt) those of the finished jobs.

    Raises:
        UserError, SimulationError: The error of a job.
        SpecActorError: A job failed otherwise, or its process died.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    shares = dict.fromkeys((job.name for job in jobs), 0.0)
    results: dict[str, Result] = {}

    def show(name: str, share: float) -> None:
        shares[name] = share
        on_progress(shares)

    with contextlib.suppress(KeyboardInterrupt):
        if processes == 1:
            _run_here(jobs, results, show)
        else:
            _run_in_processes(jobs, processes, results, show)
    return results


def _run_here(jobs: Sequence[Job], results: dict[str, Result], show: Callable[[str, float], None]) -> None:
    silence()
    for job in jobs:

        def show_share(share: float, name: str = job.name) -> None:
            if share < 1.0:
                show(name, share)

        results[job.name] = job.run(show_share)
        show(job.name, 1.0)


def _run_in_processes(
    jobs: Sequence[Job], processes: int, results: dict[str, Result], show: Callable[[str, float], None]
) -> None:
    waiting, running = deque(jobs), dict[Any, Child]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.popleft()
                child = Child(_run_job, job, job.name)
                running[child.channel] = child
            for ready in wait(list(running)):
                child = running[ready]
                message = child.receive()
                if not isinstance(message, Done):
                    show(child.name, message)
                    continue
                if isinstance(message.result, SimulationError):
                    raise message.result
                results[child.name] = message.result
                show(child.name, 1.0)
                running.pop(ready).end()
    finally:
        for child in running.values():
            child.end()


def _run_job(job: Job, channel: Connection) -> Result | SimulationError:
    """Run a job in its own process; progress is sent through the channel."""
    silence()
    sent = 0.0

    def show(share: float) -> None:
        nonlocal sent
        if share - sent >= _PROGRESS_STEP and share < 1.0:
            sent = share
            channel.send(share)

    try:
        return job.run(show)
    except SimulationError as error:
        return error
