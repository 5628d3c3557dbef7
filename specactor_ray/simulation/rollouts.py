"""Speed of rollouts on a virtual cluster: generated or recorded requests, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.config.methods import acting_drafters
from specactor_ray.config.schema import ModeName
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.simulation.cluster import VirtualRun
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.scenario import Arrival, ScenarioConfig
from specactor_ray.simulation.text import (
    GeneratedText,
    RecordedRequest,
    RecordedText,
    Text,
    draw_arrivals,
    draw_lengths,
)
from specactor_ray.simulation.world import Span, World

_STANDSTILL_S = 3600.0
"""Virtual seconds without a finished request after which a run counts as endless."""
_DAY_TICK_S = 0.25
_FIRST_SEED = 1_000_000
_FIGURES = (
    *("variant", "mode", "devices", "draft_devices", "rollout_s", "tokens", "tokens_per_s"),
    *("tokens_per_s_and_device", "ended_s", "latency_s"),
    *("peak_streams", "peak_stream_tokens", "peak_stream_bytes", "moves", "events"),
)
"""Attributes of a `Result` in reports."""


@dataclass
class Result:
    """Result of one variant of a scenario."""

    variant: str
    mode: str
    devices: float
    """GPUs (or, without any, CPU cores) of verifiers and draft actors together; `daily`: their mean."""
    draft_devices: float
    rollout_s: float = 0.0
    """Virtual seconds."""
    tokens: int = 0
    ended_s: list[float] = field(default_factory=list)
    """End of each request since the begin of the rollout."""
    latency_s: list[float] = field(default_factory=list)
    """`daily`: seconds from the arrival of each request to its end, in the order of the ends."""
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    peak_streams: int = 0
    peak_stream_tokens: int = 0
    """See `world.Recorder`."""
    peak_stream_bytes: float = 0.0
    drafting_s: float = 0.0
    """`daily`: seconds that draft actors held their devices, summed over devices."""
    draft_actors: list[tuple[float, float]] = field(default_factory=list)
    """`daily`: (seconds since midnight, devices of draft actors from then on)."""
    moves: int = 0
    events: int = 0
    digest: int = 0
    spans: list[Span] = field(default_factory=list)
    """The first and the last spans."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole simulated part."""
        return self.tokens / self.rollout_s if self.rollout_s else 0.0

    @property
    def tokens_per_s_and_device(self) -> float:
        return self.tokens_per_s / max(self.devices, 1)

    def to_json(self) -> dict[str, Any]:
        """Figures as plain data, without spans."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "acceptance_length": self.metrics.acceptance_length,
            "supply": self.metrics.supply,
            "digest": f"{self.digest:08x}",
        }


class SimulatedRollouts(VirtualRun):
    """The rollout of one variant.

    Args:
        name, scenario: The variant, and its scenario.
        world: Cost models; the text is set here.
        recording: Recorded requests, in place of drawn ones.
    """

    def __init__(
        self,
        name: str,
        scenario: ScenarioConfig,
        world: World,
        recording: Sequence[RecordedRequest] | None = None,
    ) -> None:
        machines, network = scenario.machines, scenario.network
        nodes = [Node(f"node-{number}", machines.cpus, machines.gpus) for number in range(machines.nodes)]
        super().__init__(scenario.config, world, nodes, scenario.seed)
        self.scenario, self._recording = scenario, recording
        self._lengths: dict[int, int] = {}
        world.text = self._text()
        self.network.set_links(network.call_ms / 1e3, network.jitter, network.bandwidth_gb_s * 1e9)
        devices, draft_devices = count_devices(scenario)
        self.result = Result(name, scenario.config.mode.value, devices, draft_devices)
        self._done = False

    def run(self) -> Result:
        """Simulate the rollout. Raises SimulationError if the run cannot end, or the package raised an error."""
        kernel, result = self.kernel, self.result
        kernel.spawn(self._drive, "main", self.driver.process)
        before = -1
        while not self._done and not kernel.crashes and before != len(result.ended_s):
            before = len(result.ended_s)
            kernel.run(until=kernel.now + _STANDSTILL_S, done=lambda: self._done or bool(kernel.crashes))
        for name, crash in kernel.crashes:
            raise SimulationError(f"{name} raised {type(crash).__name__}: {crash}")
        if not self._done:
            raise SimulationError(f"no request has ended for {_STANDSTILL_S:.0f} virtual seconds")
        record = self.world.record
        result.events, result.digest, result.spans = kernel.events, kernel.digest, record.spans
        result.peak_streams, result.peak_stream_tokens = record.peak_streams, record.peak_tokens
        result.peak_stream_bytes = record.peak_tokens * self.world.stream_bytes_per_token
        kernel.close()
        return result

    # ---- the driver ----

    def _drive(self) -> None:
        self.start_run()
        journal, begin, result = self.client.dispatcher.journal, self.clock.now(), self.result
        if self.scenario.workload.arrival is Arrival.daily:
            self._day(begin)
        else:
            self._stream(begin)
        result.rollout_s, result.tokens = self.clock.now() - begin, journal.committed_tokens
        if result.drafting_s:
            verifying, drafting = result.devices - result.draft_devices, result.drafting_s / result.rollout_s
            result.devices, result.draft_devices = verifying + drafting, drafting
        result.metrics, result.moves = self.client.metrics(), self.client.dispatcher.moves
        self.client.shutdown()
        self._done = True

    def _stream(self, begin: float) -> None:
        stream = self.client.run(self.entries())
        for entry in stream:
            assert entry.finished is not None
            if entry.finished.error:
                raise SimulationError(f"request {entry.request_id} failed: {entry.finished.error}")
            self.result.ended_s.append(self.clock.now() - begin)
            if len(self.result.ended_s) >= self.scenario.workload.requests:
                break
        stream.close()
        if self.client.dispatcher.reissues:
            raise SimulationError(f"verifiers were lost without a fault: {'; '.join(self.client.view().errors)}")

    def _day(self, begin: float) -> None:
        """Send requests at their times through the engine."""
        clock, entries, result = self.clock, self.entries(), self.result
        arrivals = draw_arrivals(self.scenario.workload, f"arrivals {self.scenario.seed} 0")

        def submit(entry: JournalEntry) -> None:
            arrived = clock.now()

            def end(_future: Future[Any]) -> None:
                result.latency_s.append(clock.now() - arrived)
                result.ended_s.append(clock.now() - begin)

            handle = self.client.engine.submit(list(entry.prompt_token_ids), entry.sampling)
            handle.future.add_done_callback(end)

        for at, entry in zip(arrivals, entries, strict=True):
            self._count_drafters(begin, begin + at)
            submit(entry)
        while len(result.ended_s) < len(entries):
            self._count_drafters(begin, clock.now() + _DAY_TICK_S)

    def _count_drafters(self, begin: float, until: float) -> None:
        """Sleep, and add the devices of draft actors meanwhile."""
        result, clock, target = self.result, self.clock, self.config.target
        while (now := clock.now()) < until:
            seconds = min(_DAY_TICK_S, until - now)
            clock.sleep(seconds)
            demands = [group.demand for group in self.machines.groups if group.node is not None]
            mine = [demand for demand in demands if not demand.owner.startswith(f"{VERIFIER}-")]
            held = sum(demand.gpus if target.gpus else demand.cpus for demand in mine)
            result.drafting_s += seconds * held
            if not result.draft_actors or result.draft_actors[-1][1] != held:
                result.draft_actors.append((now - begin, held))

    # ---- requests ----

    def entries(self) -> list[JournalEntry]:
        entries = list(self._drawn() if self._recording is None else self._recorded(self._recording))
        if self.world.clairvoyant and self.scenario.workload.arrival is Arrival.at_once:  # the longest first
            entries.sort(key=lambda entry: -len(self.world.text.output(entry.sampling, 0)))
        return entries

    def _drawn(self) -> Iterator[JournalEntry]:
        workload, target = self.scenario.workload, self.config.target
        count = workload.requests
        if workload.arrival is Arrival.continuous:  # more than can have begun at the end of the last one that counts
            count += 2 * target.max_batch * target.replicas
        rng = random.Random(f"prompts {self.scenario.seed} 0")
        lengths = draw_lengths(workload, count, f"lengths {self.scenario.seed} 0")
        prompt: tuple[int, ...] = ()
        for index, length in enumerate(lengths):
            if index % workload.group == 0:
                prompt = tuple(rng.randrange(GeneratedText.vocab_size) for _ in range(workload.prompt_tokens))
            seed = _FIRST_SEED + index
            self._lengths[seed] = length
            sampling = SamplingParams(max_tokens=workload.max_tokens, seed=seed)
            yield JournalEntry(f"0/{index}", prompt, sampling)

    def _recorded(self, recording: Sequence[RecordedRequest]) -> Iterator[JournalEntry]:
        for seed, request in enumerate(recording):
            sampling = SamplingParams(max_tokens=request.max_tokens, seed=seed)
            yield JournalEntry(f"0/{request.request_id}", request.prompt, sampling)

    def _text(self) -> Text:
        scenario = self.scenario
        if self._recording is not None:
            return RecordedText(self._recording, scenario.skills)
        plain = self.config.mode is ModeName.plain
        methods = [] if plain else [drafter.method for drafter in self.config.drafters]
        return GeneratedText(self._lengths, scenario.skills, scenario.correlation, scenario.seed, methods)


def count_devices(scenario: ScenarioConfig) -> tuple[int, int]:
    """GPUs of verifiers and draft actors in total, and of draft actors alone; cores if there are no GPUs."""
    target, drafters = scenario.config.target, acting_drafters(scenario.config)
    if target.gpus:
        draft = sum(drafter.gpus * drafter.replicas for drafter in drafters)
        return target.gpus * target.replicas + draft, draft
    draft = round(sum(drafter.cores * drafter.replicas for drafter in drafters))
    return target.cores * target.replicas + draft, draft
