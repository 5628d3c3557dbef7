"""Speed of rollouts on a virtual cluster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.simulation.cluster import VirtualRun
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.scenario import ScenarioConfig
from specactor_ray.simulation.text import FIRST_SEED, GeneratedText, draw_lengths, num_requests
from specactor_ray.simulation.world import build_world
from specactor_ray.startup.machine import devices_of

_STANDSTILL_S = 3600.0
"""Virtual seconds without a finished request after which a run counts as endless."""
_REPORT_S = 0.5
"""Virtual seconds between reports of progress."""
_FIGURES = (
    *("variant", "mode", "devices", "draft_devices", "rollout_s", "tokens", "tokens_per_s"),
    *("tokens_per_s_and_device", "ended_s", "events"),
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
    rollout_s: float = 0.0
    """Virtual seconds."""
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

    def to_json(self) -> dict[str, Any]:
        """Figures as plain data."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "acceptance_length": self.metrics.acceptance_length,
            "supply": self.metrics.supply,
            "digest": f"{self.digest:08x}",
        }


class SimulatedRollouts(VirtualRun):
    """The rollout of one variant. Raises ConfigError as `build_world`."""

    def __init__(self, variant: str, scenario: ScenarioConfig) -> None:
        machines, network = scenario.machines, scenario.network
        nodes = [Node(f"node-{number}", machines.cpus, machines.gpus) for number in range(machines.nodes)]
        super().__init__(scenario.config, build_world(scenario), nodes, scenario.seed)
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
