"""Rollouts on a virtual cluster: variants of one scenario, at one or several values of one of its keys, each in its own
process."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from specactor_ray.actors.process import ActorHost
from specactor_ray.actors.specs import VERIFIER
from specactor_ray.core.errors import ConfigError, SpecActorError
from specactor_ray.core.machine import versions
from specactor_ray.core.signals import blocked
from specactor_ray.core.types import SamplingParams
from specactor_ray.plan.hardware import DeviceSpec, load_hardware
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.simulation.cluster import SimulatedHost, VirtualRun, silence
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.network import Kind, Node, VirtualActor
from specactor_ray.simulation.scenario import ScenarioConfig, fits, labels_of, load_scenario, sizes_of, variant_of
from specactor_ray.simulation.training import training_seconds
from specactor_ray.simulation.world import FIRST_SEED, GeneratedText, World, build_worlds, draw_lengths, num_requests
from specactor_ray.startup.machine import devices_of

_STANDSTILL_S = 3600.0
"""Virtual seconds without a finished request after which a run counts as endless."""
_REPORT_S = 0.5
"""Virtual seconds between reports of progress."""
_FIGURES = (
    *("variant", "mode", "devices", "draft_devices", "rollout_s", "tokens", "tokens_per_s"),
    *("tokens_per_s_and_device", "ended_s", "events", "update_s", "sync_s", "step_s"),
    *("dollars_per_hour", "tokens_per_dollar"),
)
"""Attributes of a `Result` in reports."""


@dataclass
class Result:
    """Result of one variant of a scenario."""

    variant: str
    mode: str
    devices: float
    """GPUs (or, without any, CPU cores) of verifiers and draft actors together."""
    draft_devices: float
    dollars_per_hour: float | None = None
    """Price of these devices, and of the cores of draft actors on nodes without GPUs; None: not all have one."""
    rollout_s: float = 0.0
    """Virtual seconds."""
    update_s: float = 0.0
    sync_s: float = 0.0
    """Seconds of the other parts of a training step; see `training_seconds`."""
    tokens: int = 0
    ended_s: list[float] = field(default_factory=list)
    """End of each request since the begin of the rollout."""
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    events: int = 0
    digest: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole simulated part."""
        return self.tokens / self.rollout_s if self.rollout_s else 0.0

    @property
    def tokens_per_s_and_device(self) -> float:
        return self.tokens_per_s / max(self.devices, 1)

    @property
    def tokens_per_dollar(self) -> float | None:
        return 3600.0 * self.tokens_per_s / self.dollars_per_hour if self.dollars_per_hour else None

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return self.rollout_s + self.update_s + self.sync_s

    def to_json(self) -> dict[str, Any]:
        """Figures as plain data."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "acceptance_length": self.metrics.acceptance_length,
            "supply": self.metrics.supply,
            "digest": f"{self.digest:08x}",
        }


def make_nodes(scenario: ScenarioConfig) -> list[Node]:
    """The nodes of a scenario, kind by kind."""
    nodes = list[Node]()
    for number, one in enumerate(scenario.machines):
        rate = math.inf if one.link.gbit_s is None else one.link.gbit_s * 1e9 / 8
        kind = Kind(number, one.link.latency_ms / 1e3, rate)
        nodes += [
            Node(f"node-{len(nodes) + n}", one.cpus, one.gpus, labels=labels_of(one), kind=kind)
            for n in range(one.nodes)
        ]
    return nodes


def price_of(scenario: ScenarioConfig, kind: int) -> float | None:
    """Dollars per hour of a GPU of this kind of machines (of a CPU core, if they have no GPUs); None: unknown."""
    machine = scenario.machines[kind]
    if machine.price is not None:
        return machine.price
    hardware = load_hardware(machine.accelerator or "")
    return hardware.price if isinstance(hardware, DeviceSpec) and machine.gpus else None


def _used(scenario: ScenarioConfig) -> list[int]:
    """Kinds of machines of which actors may have GPUs, or cores if there are no GPUs."""
    sizes = sizes_of(scenario.config).values()
    return [
        number
        for number, one in enumerate(scenario.machines)
        if any(fits(one, size) and (size.gpus or not one.gpus) for size in sizes)
    ]


def require_prices(scenario: ScenarioConfig) -> None:
    """Refuse machines without a price that actors may use. The ConfigError has the key."""
    for kind in _used(scenario):
        if not price_of(scenario, kind):
            problem = f"{scenario.machines[kind].accelerator} has no price, and --per-dollar compares by it."
            raise ConfigError(f"machines.{kind}.price", problem, "set it: dollars per GPU-hour (without GPUs: core).")


class SimulatedRollouts(VirtualRun):
    """The rollout of one variant. `worlds`: those of its kinds of machines, default that of the scenario. Raises
    ConfigError as `build_worlds`."""

    def __init__(self, variant: str, scenario: ScenarioConfig, worlds: list[World] | None = None) -> None:
        network, self._worlds = scenario.network, worlds or build_worlds(scenario)
        training_seconds(scenario, 0, {kind: scenario.machines[kind].gpus for kind in _used(scenario)})  # refuses early
        super().__init__(scenario.config, self._worlds[0], make_nodes(scenario), scenario.seed)
        self.scenario = scenario
        call_s = network.call_ms / 1e3
        self.network.latency_s = (call_s * (1.0 - network.jitter), call_s * (1.0 + network.jitter))
        target, devices = scenario.config.target, devices_of(scenario.config)
        total, each = (devices.gpus, target.gpus) if target.gpus else (devices.cores, target.cores)
        self.result = Result(variant, scenario.config.mode.value, total, total - target.replicas * each)
        workload = scenario.workload
        self._tokens = sum(draw_lengths(workload, workload.requests, f"lengths {scenario.seed} 0"))
        self._done = False

    def run(self, on_progress: Callable[[float], None] = lambda share: None) -> Result:
        """Simulate the rollout; `on_progress` is called with the share of it that is done. Raises SimulationError if
        the run cannot end, or the package raised an error."""
        kernel, result = self.kernel, self.result
        kernel.spawn(self._drive, "main", self.driver.process)
        ended, changed_s = 0, 0.0
        while not self._done and not kernel.crashes and kernel.now < changed_s + _STANDSTILL_S:
            kernel.run(until=kernel.now + _REPORT_S, done=lambda: self._done or bool(kernel.crashes))
            on_progress(self._share())
            if ended != len(result.ended_s):
                ended, changed_s = len(result.ended_s), kernel.now
        for name, crash in kernel.crashes:
            raise SimulationError(f"{name} raised {type(crash).__name__}: {crash}")
        if not self._done:
            raise SimulationError(f"no request has ended for {_STANDSTILL_S:.0f} virtual seconds")
        result.events, result.digest = kernel.events, kernel.digest
        return result

    def make_host(self, actor: VirtualActor) -> ActorHost:
        return SimulatedHost(self.network, actor, self._worlds[actor.node.kind.number])

    def _share(self) -> float:
        """Share of the output tokens that are there; those of requests that begin at the end of a run do not count."""
        there = self.queues[0].dispatcher.journal.committed_tokens if self.queues else 0
        return min(there / self._tokens, 1.0)

    # ---- the driver ----

    def _drive(self) -> None:
        self.start_run()
        journal, begin, result = self.queue.dispatcher.journal, self.clock.now(), self.result
        self._stream(begin)
        result.rollout_s, result.tokens = self.clock.now() - begin, journal.committed_tokens
        result.dollars_per_hour, gpus, verifying = self._bill()
        result.update_s, result.sync_s = training_seconds(self.scenario, result.tokens, gpus, verifying)
        result.metrics = self.queue.metrics()
        self.shut_down()
        self._done = True

    def _stream(self, begin: float) -> None:
        stream = self.stream(self.entries())
        for entry in stream:
            assert entry.finished is not None
            if entry.finished.error:
                raise SimulationError(f"request {entry.request_id} failed: {entry.finished.error}")
            self.result.ended_s.append(self.clock.now() - begin)
            if len(self.result.ended_s) >= self.scenario.workload.requests:
                break
        stream.close()
        if self.queue.dispatcher.reissues:
            raise SimulationError("verifiers were lost without a fault")

    def _bill(self) -> tuple[float | None, dict[int, float], set[int]]:
        """Dollars per hour of what the actors take, None without a price; GPUs in use by kind of machines, and
        kinds with verifiers."""
        gpus, paid, verifying = dict[int, float](), dict[int, float](), set[int]()
        for group in self.machines.groups:
            for node, demand in zip(group.nodes, group.demands, strict=True):
                if node is not None:
                    kind, count = node.kind.number, demand.gpus if node.gpus else demand.cpus
                    gpus[kind] = gpus.get(kind, 0.0) + demand.gpus
                    paid[kind] = paid.get(kind, 0.0) + count
                    verifying |= {kind} if demand.owner.startswith(VERIFIER) else set()
        prices = {kind: price_of(self.scenario, kind) for kind, count in paid.items() if count}
        dollars = [None if price is None else price * paid[kind] for kind, price in prices.items()]
        return None if None in dollars else sum(one for one in dollars if one is not None), gpus, verifying

    # ---- requests ----

    def entries(self) -> list[JournalEntry]:
        workload, seed = self.scenario.workload, self.scenario.seed
        rng, prompt, entries = random.Random(f"prompts {seed} 0"), tuple[int, ...](), list[JournalEntry]()
        for index in range(num_requests(self.scenario)):
            if index % workload.group == 0:
                prompt = tuple(rng.randrange(GeneratedText.vocab_size) for _ in range(workload.prompt_tokens))
            sampling = SamplingParams(max_tokens=workload.max_tokens, seed=FIRST_SEED + index)
            entries.append(JournalEntry(f"0/{index}", prompt, sampling))
        return entries


_POLL_S = 0.5
"""Longest wait until a signal is handled."""
Job = tuple[Path, Sequence[str], str]
"""One variant of a scenario to simulate: file, `KEY=VALUE` items that hold for all variants, and its name."""


def compare(
    path: Path,
    overrides: Sequence[str] = (),
    names: Sequence[str] | None = None,
    sweep: tuple[str, Sequence[str]] | None = None,
    processes: int | None = None,
    on_progress: Callable[[float, int], None] = lambda done, total: None,
    priced: bool = False,
) -> dict[str, Any]:
    """Simulate variants of a scenario (default: all), at every value of a key if `sweep` names one and its values.
    `overrides`: `KEY=VALUE` items that hold for all variants; `on_progress` also gets the number of jobs; `priced` is
    that of `choose_variants`; the other arguments and errors are those of `run_jobs`.

    Returns:
        The report as plain data (`points`: one element per value).
    """
    along = {"": [*overrides]}
    if sweep is not None:
        along = {value: [*overrides, f"{sweep[0]}={value}"] for value in sweep[1]}
    chosen = {value: choose_variants(path, items, names, priced) for value, items in along.items()}
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
        "dollar_ratios": {one.variant: _ratio(one.tokens_per_dollar, first.tokens_per_dollar) for one in results},
        "step_ratios": {one.variant: _tokens_of_a_step(one) / _tokens_of_a_step(first) for one in results},
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def _tokens_of_a_step(result: Result) -> float:
    """Tokens per second of a training step and device."""
    return result.tokens / result.step_s / max(result.devices, 1)


def choose_variants(
    path: Path, overrides: Sequence[str] = (), names: Sequence[str] | None = None, priced: bool = False
) -> list[str]:
    """The variants to simulate, each once. Raises ConfigError if the scenario or a variant is wrong or missing, or has
    machines without a price although it must be `priced`."""
    chosen = list(dict.fromkeys(load_scenario(path, overrides).variants if names is None else names))
    if not chosen:
        fix = "add some, such as variants: {plain: [config.mode=plain]}."
        raise ConfigError("variants", "the scenario has none.", fix)
    for name in chosen:
        scenario = variant_of(path, overrides, name)
        if priced:
            require_prices(scenario)
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
        on_progress: Called with the number of finished jobs, plus the finished share of one that runs in this process.

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
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), silence) as pool:
        with blocked(signal.SIGINT):  # the processes inherit it: the Ctrl-C of their terminal is handled here
            futures = [pool.submit(simulate_variant, *job) for job in jobs]
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                on_progress(len(jobs) - len(pending))
        except BrokenProcessPool:
            problem = "a process died (killed for memory?)"
            raise SpecActorError(f"{problem}; run fewer variants (--compare) or --processes 1") from None
        finally:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


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
