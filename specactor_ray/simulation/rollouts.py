"""Speed of rollouts on a virtual cluster: RL steps of generated or recorded requests, in virtual time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.config.methods import acting_drafters
from specactor_ray.config.schema import ModeName
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.run import VirtualRun
from specactor_ray.simulation.scenario import Arrival, ScenarioConfig
from specactor_ray.simulation.text import GeneratedText, RecordedText, Skill
from specactor_ray.simulation.workload import Recording, draw_arrivals, draw_lengths
from specactor_ray.simulation.world import MeasuredPython, PythonTime, WorkRecorder, World
from specactor_ray.transport.messages import WeightSet

_STANDSTILL_S = 3600.0
"""Virtual seconds without a finished request after which a run counts as endless."""
_KEPT_SPANS = 20_000
_DAY_TICK_S = 0.25
_SEEDS_PER_STEP = 1_000_000


class Span(NamedTuple):
    """One operation of an actor; times in virtual seconds since the begin of the rollout."""

    actor: str
    what: str
    """Operation: `verify` or `draft`, which is one forward, or one lookup for many requests."""
    begin: float
    end: float
    rows: int
    positions: int


@dataclass
class StepTimes:
    """Times of one RL step in virtual seconds."""

    rollout_s: float
    update_s: float
    sync_s: float
    tokens: int
    ended_s: list[float] = field(default_factory=list)
    """End of each request since the begin of the step's rollout."""
    latency_s: list[float] = field(default_factory=list)
    """`daily`: seconds from the arrival of each request to its end, in the order of the ends."""

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.update_s + self.sync_s


@dataclass
class Result:
    """Result of one variant of a scenario."""

    variant: str
    mode: str
    devices: float
    """GPUs (or, without any, CPU cores) of verifiers and draft actors together; `daily`: their mean."""
    draft_devices: float
    steps: list[StepTimes] = field(default_factory=list)
    verifier_s: float = 0.0
    """Seconds of all verifiers in total during rollouts."""
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    peak_streams: int = 0
    """Most requests of drafters at once, summed over drafters."""
    peak_stream_tokens: int = 0
    """Most tokens in the caches of drafters at once, summed over drafters."""
    peak_stream_bytes: float = 0.0
    """Bytes of these tokens."""
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
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def rollout_s(self) -> float:
        return sum(step.rollout_s for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole simulated part."""
        return self.tokens / self.rollout_s if self.rollout_s else 0.0

    @property
    def tokens_per_s_and_device(self) -> float:
        return self.tokens_per_s / max(self.devices, 1)

    def shares(self) -> dict[str, float]:
        """Shares of the verifiers' time: forwards, waiting for drafts, the package's Python, and without requests."""
        total, metrics = max(self.verifier_s, 1e-9), self.metrics
        busy = {
            "forward": (metrics.forward_s + metrics.sampling_s) / total,
            "waiting": metrics.waiting_s / total,
            "protocol": metrics.protocol_s / total,
        }
        return {**busy, "idle": max(0.0, 1.0 - sum(busy.values()))}

    def to_json(self) -> dict[str, Any]:
        """Figures as plain data, without spans."""
        metrics = self.metrics
        return {
            "variant": self.variant,
            "mode": self.mode,
            "devices": self.devices,
            "draft_devices": self.draft_devices,
            "rollout_s": self.rollout_s,
            "step_s": [step.seconds for step in self.steps],
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_and_device": self.tokens_per_s_and_device,
            "acceptance_length": metrics.acceptance_length,
            "supply": metrics.supply,
            "shares": self.shares(),
            "peak_streams": self.peak_streams,
            "peak_stream_tokens": self.peak_stream_tokens,
            "peak_stream_bytes": self.peak_stream_bytes,
            "moves": self.moves,
            "events": self.events,
            "digest": f"{self.digest:08x}",
            "steps": [asdict(step) for step in self.steps],
        }


class Recorder(WorkRecorder):
    """Keeps the first and the last spans, and the number of requests that are drafted for at once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=_KEPT_SPANS)
        self._streams: dict[str, tuple[int, int]] = {}
        self._open = self._tokens = self.peak_streams = self.peak_tokens = 0

    def span(self, actor: str, what: str, begin: float, end: float, rows: int, positions: int) -> None:
        now = self._now()
        kept = self._first if len(self._first) < _KEPT_SPANS else self._last
        kept.append(Span(actor, what, now - (end - begin), now, rows, positions))

    def streams(self, actor: str, count: int, context_tokens: int) -> None:
        old_count, old_tokens = self._streams.get(actor, (0, 0))
        self._streams[actor] = (count, context_tokens)
        self._open += count - old_count
        self._tokens += context_tokens - old_tokens
        self.peak_streams, self.peak_tokens = max(self.peak_streams, self._open), max(self.peak_tokens, self._tokens)

    @property
    def spans(self) -> list[Span]:
        return [*self._first, *self._last]


class SimulatedRollouts(VirtualRun):
    """The RL steps of one variant.

    Args:
        name, scenario: The variant, and its scenario.
        world: Cost models; text, Python and record are set here.
        recording: Recorded requests, if the scenario has any.
        on_progress: Called with the share of requests that have ended.
    """

    def __init__(
        self,
        name: str,
        scenario: ScenarioConfig,
        world: World,
        recording: Recording | None = None,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        machines = scenario.machines
        nodes = [Node(f"node-{number}", machines.cpus, machines.gpus) for number in range(machines.nodes)]
        super().__init__(scenario.config, world, nodes, scenario.seed)
        self.scenario, self._recording, self._on_progress = scenario, recording, on_progress
        self.recorder = world.record = Recorder(lambda: self.kernel.now)
        world.python = self._python()
        self._lengths: dict[int, int] = {}
        world.text = self._text()
        network = scenario.network
        self.network.set_links(network.call_ms / 1e3, network.jitter, network.bandwidth_gb_s * 1e9)
        devices, draft_devices = count_devices(scenario)
        self.result = Result(name, scenario.config.mode.value, devices, draft_devices)
        self._done = False
        self._ended = 0

    def run(self) -> Result:
        """Simulate all steps.

        Raises:
            SimulationError: The run cannot end, or the package raised an error.
        """
        kernel, result = self.kernel, self.result
        kernel.spawn(self._drive, "main", self.driver.process)
        before = -1
        while not self._done and not kernel.crashes and before != self._ended:
            before = self._ended
            kernel.run(until=kernel.now + _STANDSTILL_S, done=lambda: self._done or bool(kernel.crashes))
        for name, crash in kernel.crashes:
            raise SimulationError(f"{name} raised {type(crash).__name__}: {crash}")
        if not self._done:
            raise SimulationError(f"no request has ended for {_STANDSTILL_S:.0f} virtual seconds")
        result.events, result.digest, result.spans = kernel.events, kernel.digest, self.recorder.spans
        result.peak_streams, result.peak_stream_tokens = self.recorder.peak_streams, self.recorder.peak_tokens
        result.peak_stream_bytes = result.peak_stream_tokens * self.world.stream_bytes_per_token
        kernel.close()
        return result

    # ---- the driver ----

    def _drive(self) -> None:
        self.start_run()
        for number in range(self.scenario.steps.steps):
            if number:
                self._sync(number)
            if self.scenario.workload.arrival is Arrival.daily:
                self._day(number)
            else:
                self._step(number)
        self.result.metrics = self.client.metrics()
        self.result.moves = self.client.dispatcher.moves
        self.client.shutdown()
        self._done = True

    def _step(self, number: int) -> None:
        workload, clock = self.scenario.workload, self.clock
        entries = self.entries(number)
        journal = self.client.dispatcher.journal
        begin, before = clock.now(), journal.committed_tokens
        times = StepTimes(0.0, 0.0, 0.0, 0)
        stream = self.client.run(entries)
        for entry in stream:
            assert entry.finished is not None
            if entry.finished.error:
                raise SimulationError(f"request {entry.request_id} failed: {entry.finished.error}")
            self._ended += 1
            times.ended_s.append(clock.now() - begin)
            self._on_progress(self._ended / (workload.requests * self.scenario.steps.steps))
            if len(times.ended_s) >= workload.requests:
                break
        times.rollout_s, times.tokens = clock.now() - begin, journal.committed_tokens - before
        stream.close()
        if self.client.dispatcher.reissues:
            raise SimulationError(f"verifiers were lost without a fault: {'; '.join(self.client.view().errors)}")
        self.result.verifier_s += times.rollout_s * self.config.target.replicas
        self.result.steps.append(times)
        self._update(times)

    def _day(self, number: int) -> None:
        """Send requests at their times through the engine."""
        clock, entries = self.clock, self.entries(number)
        arrivals = draw_arrivals(self.scenario.workload, f"arrivals {self.scenario.seed} {number}")
        begin, before = clock.now(), self.client.dispatcher.journal.committed_tokens
        times = StepTimes(0.0, 0.0, 0.0, 0)

        def submit(entry: JournalEntry) -> None:
            arrived = clock.now()

            def end(_future: Future[Any]) -> None:
                times.ended_s.append(clock.now() - begin)
                times.latency_s.append(clock.now() - arrived)
                self._ended += 1
                self._on_progress(self._ended / (len(entries) * self.scenario.steps.steps))

            handle = self.client.engine.submit(list(entry.prompt_token_ids), entry.sampling)
            handle.future.add_done_callback(end)

        for at, entry in zip(arrivals, entries, strict=True):
            self._count_drafters(begin, begin + at)
            submit(entry)
        while len(times.ended_s) < len(entries):
            self._count_drafters(begin, clock.now() + _DAY_TICK_S)
        times.rollout_s, times.tokens = clock.now() - begin, self.client.dispatcher.journal.committed_tokens - before
        self.result.verifier_s += times.rollout_s * self.config.target.replicas
        self.result.steps.append(times)
        verifying = self.result.devices - self.result.draft_devices
        self.result.draft_devices = self.result.drafting_s / self.result.rollout_s
        self.result.devices = verifying + self.result.draft_devices

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

    def _update(self, times: StepTimes) -> None:
        steps, workload = self.scenario.steps, self.scenario.workload
        if steps.update_tokens_per_s:
            learned = times.tokens + workload.requests * workload.prompt_tokens
            times.update_s = learned / steps.update_tokens_per_s
            self.clock.sleep(times.update_s)

    def _sync(self, version: int) -> None:
        begin = self.clock.now()
        self.client.update_weights(WeightSet(version, (self.calls.transport.put("weights"),), 1))
        self.result.steps[-1].sync_s = self.clock.now() - begin

    # ---- requests ----

    def entries(self, number: int) -> list[JournalEntry]:
        """The requests of a step."""
        entries = list(self._recorded(number) if self._recording is not None else self._drawn(number))
        if self.world.clairvoyant and self.scenario.workload.arrival is Arrival.at_once:  # the longest first
            entries.sort(key=lambda entry: -len(self.world.text.output(entry.sampling, number)))
        return entries

    def _drawn(self, number: int) -> Iterator[JournalEntry]:
        workload, target = self.scenario.workload, self.config.target
        count = workload.requests
        if workload.arrival is Arrival.continuous:  # more than can have begun at the end of the last one that counts
            count += 2 * target.max_batch * target.replicas
        rng = random.Random(f"prompts {self.scenario.seed} {number}")
        lengths = draw_lengths(workload, count, f"lengths {self.scenario.seed} {number}")
        prompt: tuple[int, ...] = ()
        for index, length in enumerate(lengths):
            if index % workload.group == 0:
                prompt = tuple(rng.randrange(GeneratedText.vocab_size) for _ in range(workload.prompt_tokens))
            seed = (number + 1) * _SEEDS_PER_STEP + index
            self._lengths[seed] = length
            sampling = SamplingParams(max_tokens=workload.max_tokens, seed=seed)
            yield JournalEntry(f"{number}/{index}", prompt, sampling)

    def _recorded(self, number: int) -> Iterator[JournalEntry]:
        assert self._recording is not None
        for seed, request in enumerate(self._recording.requests):
            sampling = SamplingParams(max_tokens=request.max_tokens, seed=seed)
            yield JournalEntry(f"{number}/{request.request_id}", request.prompt, sampling)

    def _text(self) -> GeneratedText | RecordedText:
        scenario = self.scenario
        if self._recording is not None:
            return self._recording.text(scenario.skills)
        skills = {
            one.method: Skill(**{part.name: getattr(one, part.name) for part in fields(Skill)})
            for one in scenario.skills
        }
        plain = self.config.mode is ModeName.plain
        methods = [] if plain else [drafter.method for drafter in self.config.drafters]
        return GeneratedText(self._lengths, skills, scenario.correlation, scenario.seed, methods)

    def _python(self) -> PythonTime:
        python = self.scenario.python
        if python.measured:
            return MeasuredPython(self.kernel)
        return PythonTime(python.verify_row_us / 1e6, python.plain_row_us / 1e6, python.draft_row_us / 1e6)


def count_devices(scenario: ScenarioConfig) -> tuple[int, int]:
    """GPUs of verifiers and draft actors in total, and of draft actors alone; cores if there are no GPUs."""
    target, drafters = scenario.config.target, acting_drafters(scenario.config)
    if target.gpus:
        draft = sum(drafter.gpus * drafter.replicas for drafter in drafters)
        return target.gpus * target.replicas + draft, draft
    draft = round(sum(drafter.cores * drafter.replicas for drafter in drafters))
    return target.cores * target.replicas + draft, draft
