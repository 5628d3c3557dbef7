"""Simulations side by side, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

from specactor_ray.errors import UserError
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result
from specactor_ray.simulation.run import silence

_PROGRESS_STEP = 0.005
"""Share of a job after which its process reports progress."""


class Job(Protocol):
    """One result to compute. It travels to another process."""

    @property
    def name(self) -> str:
        """Different for each job."""

    def run(self, on_progress: Callable[[float], None]) -> Result:
        """Compute it, and say which share is done."""


def run_jobs(
    jobs: Sequence[Job],
    processes: int | None = None,
    on_progress: Callable[[Mapping[str, float]], None] = lambda shares: None,
) -> dict[str, Result]:
    """Run all jobs.

    Args:
        jobs: In the order in which they begin.
        processes: Processes to use at once, at most; default: one per core. With 1, or a single job, everything runs
            in this process.
        on_progress: Called with name → share that is done; 1 once its result is there.

    Returns:
        Name → result. An interruption (KeyboardInterrupt) leaves those that had finished.

    Raises:
        UserError, SimulationError: What a job raised.
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


@dataclass(frozen=True)
class _Worker:
    """A process that computes one result."""

    name: str
    receiver: Connection
    process: BaseProcess

    def receive(self) -> float | Result:
        """Its progress, or its result.

        Raises:
            UserError, SimulationError: What it raised.
        """
        try:
            message: float | Exception | Result = self.receiver.recv()
        except EOFError:
            self.process.join()
            problem = f"its process ended with exit code {self.process.exitcode}"
            raise SimulationError(f"{self.name}: {problem}") from None
        if isinstance(message, Exception):
            raise message
        return message

    def end(self) -> None:
        if self.process.pid is not None:
            self.process.terminate()  # harmless once it has ended; its result is here
            self.process.join()
        self.receiver.close()


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
    context = multiprocessing.get_context("spawn")
    waiting, running = deque(jobs), dict[object, _Worker]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(job, sender), name=job.name, daemon=True)
                running[receiver] = _Worker(job.name, receiver, process)
                with _ignoring_ctrl_c():
                    process.start()
                sender.close()
            for ready in wait([worker.receiver for worker in running.values()]):
                worker = running[ready]
                message = worker.receive()
                if isinstance(message, float):
                    show(worker.name, message)
                    continue
                results[worker.name] = message
                show(worker.name, 1.0)
                running.pop(ready).end()
    finally:
        for worker in running.values():
            worker.end()


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """A process started inside ignores Ctrl-C from its first moment: its parent ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(job: Job, sender: Connection) -> None:
    """Run a job in a process of its own; progress, then the result or the error, go through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence()
    sent = 0.0

    def show(share: float) -> None:
        nonlocal sent
        if share - sent >= _PROGRESS_STEP and share < 1.0:
            sent = share
            sender.send(share)

    try:
        sender.send(job.run(show))
    except (UserError, SimulationError) as error:
        sender.send(error)
