"""Variants of one scenario side by side, each simulated in a process of its own."""

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
from pathlib import Path
from typing import Any

from specactor_ray.errors import ConfigError, InputError, UserError
from specactor_ray.observability.environment import versions
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result, SimulatedRollouts, shares_of
from specactor_ray.simulation.run import silence
from specactor_ray.simulation.schema import Arrival, ScenarioConfig, load_scenario, variant_of
from specactor_ray.simulation.workload import Recording, load_recording
from specactor_ray.simulation.world import World

ORACLE = "oracle"
"""Name of the clairvoyant's result."""
_PROGRESS_STEP = 0.005
"""Share of a variant after which its process reports progress."""


@dataclass(frozen=True)
class _Job:
    """One result to compute."""

    name: str
    path: Path
    overrides: Sequence[str]
    variants: Sequence[str]
    """All variants of the comparison: the clairvoyant is their upper bound."""

    def run(self, on_progress: Callable[[float], None]) -> Result:
        if self.name != ORACLE:
            return simulate_variant(self.path, self.overrides, self.name, on_progress)
        from specactor_ray.simulation.clairvoyant import simulate_oracle

        return simulate_oracle(self.path, self.overrides, self.variants, on_progress)


def compare(
    path: Path,
    overrides: Sequence[str] = (),
    names: Sequence[str] | None = None,
    oracle: bool = False,
    processes: int | None = None,
    on_progress: Callable[[Mapping[str, float]], None] = lambda shares: None,
) -> list[Result]:
    """Simulate variants of a scenario.

    Args:
        path: The scenario's file.
        overrides: `KEY=VALUE` items that hold for all variants.
        names: Variants to simulate; default: all of the scenario.
        oracle: Add a result named `oracle`: a clairvoyant drafter as the upper bound.
        processes: Processes to use at once, at most; default: one per core. With 1, or a single variant, everything
            runs in this process.
        on_progress: Called with variant → share of it that is done; 1 once its result is there.

    Returns:
        The results in the order of `names`. An interruption (KeyboardInterrupt) leaves those that had finished.

    Raises:
        UserError: The scenario, a variant or a recorded file is wrong.
        SimulationError: A variant cannot end, or the product raised.
    """
    chosen = choose_variants(path, overrides, names, oracle)
    jobs = [_Job(name, path, tuple(overrides), chosen) for name in ([*chosen, ORACLE] if oracle else chosen)]
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
    return [results[job.name] for job in jobs if job.name in results]


def choose_variants(
    path: Path, overrides: Sequence[str] = (), names: Sequence[str] | None = None, oracle: bool = False
) -> list[str]:
    """The variants to simulate, each checked and named once.

    Raises:
        ConfigError: The scenario or a variant is wrong, or there is no such variant.
    """
    available = list(load_scenario(path, overrides).variants)
    chosen = list(dict.fromkeys(available if names is None else names))
    if not chosen:
        fix = "add some, such as variants: {plain: [config.mode=plain]}."
        raise ConfigError("variants", "the scenario has none.", fix)
    if oracle and ORACLE in chosen:
        raise ConfigError(f"variants.{ORACLE}", "--oracle adds a result of this name.", "rename the variant.")
    for name in chosen:
        variant_of(path, overrides, name)
    return chosen


def simulate_variant(
    path: Path, overrides: Sequence[str], name: str, on_progress: Callable[[float], None] = lambda share: None
) -> Result:
    """Simulate one variant in this process.

    Raises:
        UserError: The scenario, the variant or a recorded file is wrong.
        SimulationError: The run cannot end, or the product raised.
    """
    from specactor_ray.simulation.costs import build_world

    scenario = variant_of(path, overrides, name)
    world, recording = build_world(scenario), _read_recording(scenario)
    check_requests(scenario, world, recording)
    rollouts = SimulatedRollouts(name, scenario, world, recording, on_progress)
    try:
        return rollouts.run()
    except SimulationError as error:
        raise SimulationError(f"variant {name}: {error}") from error
    finally:
        rollouts.kernel.close()


def _read_recording(scenario: ScenarioConfig) -> Recording | None:
    workload = scenario.workload
    if workload.trajectories is None:
        return None
    everything = workload.arrival is Arrival.continuous  # more requests wait than are measured
    return load_recording(Path(workload.trajectories), None if everything else workload.requests)


def check_requests(scenario: ScenarioConfig, world: World, recording: Recording | None) -> None:
    """Reject requests that the target model cannot serve.

    Raises:
        ConfigError: A verifier's cache or the model's context is too short for a request.
        InputError: Recorded tokens are not in the model's vocabulary.
    """
    workload, key = scenario.workload, "workload.max_tokens"
    longest = workload.prompt_tokens + workload.max_tokens
    if recording is not None:
        key = "workload.trajectories"
        longest = max(len(request.prompt) + request.max_tokens for request in recording.requests)
        if world.vocab_size is not None and recording.vocab_size > world.vocab_size:
            problem = f"{workload.trajectories} holds token {recording.vocab_size - 1:,}, and the vocabulary of"
            problem += f" {scenario.config.target.model} has {world.vocab_size:,} tokens"
            raise InputError(f"{key}: {problem}; set config.target.model to the model that was recorded")
    if longest > world.cache_tokens:
        problem = f"a request can have {longest:,} tokens, and the cache of a verifier holds {world.cache_tokens:,.0f}."
        raise ConfigError(key, problem, "use shorter requests, a larger cache_share or more config.target.gpus.")
    if longest > world.max_model_len:
        problem = f"a request can have {longest:,} tokens, and the model's context {world.max_model_len:,}."
        raise ConfigError(key, problem, "use shorter requests.")


def build_report(
    path: Path, overrides: Sequence[str], names: Sequence[str], results: Sequence[Result], oracle: bool
) -> dict[str, Any]:
    """The results of a comparison as plain data.

    Args:
        path: The scenario's file.
        overrides: As for `compare`.
        names: The variants that were asked for; the first is the baseline.
        results: Those that finished.
        oracle: Whether the clairvoyant was asked for.
    """
    scenario = load_scenario(path, overrides)
    device = "GPU" if scenario.config.target.gpus else "core"
    return {
        "scenario": str(path),
        "overrides": list(overrides),
        "description": scenario.description,
        "seed": scenario.seed,
        "part": scenario.part,
        "status": "complete" if len(results) == len(names) + oracle else "interrupted",
        "variants": list(names),
        "baseline": names[0],
        "device": device,
        "results": [result.to_json() for result in results],
        "ratios": _ratios(results, names[0]),
        "of_oracle": _ratios(results, ORACLE) if oracle else {},
        "versions": versions(),
    }


def _ratios(results: Sequence[Result], baseline: str) -> dict[str, float]:
    """Variant → its tokens per second and device relative to the baseline; empty if the baseline did not finish."""
    base = [result for result in results if result.variant == baseline]
    return shares_of([*base, *results]) if base else {}


# ---- processes ----


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
            raise SimulationError(f"variant {self.name}: {problem}") from None
        if isinstance(message, Exception):
            raise message
        return message

    def end(self) -> None:
        if self.process.pid is not None:
            self.process.terminate()  # harmless once it has ended; its result is here
            self.process.join()
        self.receiver.close()


def _run_here(jobs: Sequence[_Job], results: dict[str, Result], show: Callable[[str, float], None]) -> None:
    silence()
    for job in jobs:

        def show_share(share: float, name: str = job.name) -> None:
            if share < 1.0:
                show(name, share)

        results[job.name] = job.run(show_share)
        show(job.name, 1.0)


def _run_in_processes(
    jobs: Sequence[_Job], processes: int, results: dict[str, Result], show: Callable[[str, float], None]
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


def _work(job: _Job, sender: Connection) -> None:
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
