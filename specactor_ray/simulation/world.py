"""Ground truth of one simulation: text, durations, faults of engines, and a record of its steps."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from specactor_ray.config.methods import inline_drafters, traits
from specactor_ray.config.schema import DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.costs import CostPoint, cost_grids
from specactor_ray.simulation.hardware import Hardware, ProfiledHardware, find_model, load_hardware, load_models
from specactor_ray.simulation.kernel import Kernel, Process
from specactor_ray.simulation.roofline import ForwardCost, RooflineCost
from specactor_ray.simulation.scenario import ScenarioConfig
from specactor_ray.simulation.text import HashedText, Text

_KEPT_SPANS = 20_000
_MERGE_LAYER_S = 14e-6
"""Additional seconds of a layer if the rows of a request read their common pages once: 5 kernels of 2 us, which gather
and merge, with gaps of 0.8 us."""


@dataclass(frozen=True)
class LinearTime:
    """Fixed seconds per forward, seconds per position, and per row."""

    forward_s: float
    position_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        return self.forward_s + self.row_s * rows + self.position_s * (positions + prefill_tokens)


_LOOKUP = LinearTime(0.0, row_s=5e-6)
"""Time of a lookup without a profile: 3.3 us an answer and 0.74 us a committed token
(docs/design/suffix-drafter.md)."""


@dataclass(frozen=True)
class PythonTime:
    """Time of the package's Python beside forwards: a figure per row, or as measured on this machine by a kernel."""

    verify_row_s: float = 0.0
    """Seconds per row of a verify step with drafts."""
    plain_row_s: float = 0.0
    """Seconds per row of a verify step without drafts."""
    draft_row_s: float = 0.0
    kernel: Kernel | None = None
    """Kernel with `measures`, in place of the figures."""

    def verify_s(self, process: Process, rows: int, speculates: bool) -> float:
        """Seconds to charge for one verify step."""
        row_s = self.verify_row_s if speculates else self.plain_row_s
        return rows * row_s if self.kernel is None else self.kernel.take_spent(process)

    def draft_s(self, process: Process, rows: int) -> float:
        """Seconds to charge for one draft step."""
        return rows * self.draft_row_s if self.kernel is None else self.kernel.take_spent(process)

    def begin(self, process: Process) -> None:
        """Begin the measurement of the process's time."""
        if self.kernel is not None:
            self.kernel.take_spent(process)


@dataclass(frozen=True)
class DraftTime:
    """Durations of a draft method."""

    forward: ForwardCost
    """Cost of one forward, which drafts one token for each of its rows; for a lookup, which drafts whole tails, the
    seconds of `positions` found tokens."""
    is_lookup: bool = False
    fusion: Callable[[int], float] | None = None
    """EAGLE heads: number of committed positions → seconds to fuse their hidden states."""
    merge_s: float = math.inf
    """Additional seconds of a forward if the rows of each request read their common pages once; infinity: each row
    reads all of its pages."""

    def seconds(self, rows: int, context: int, shared: int, prefill: int) -> float:
        """Duration of a forward with the faster way of attention. `context`: tokens of all chains; `shared`: the same
        with common pages counted once; `prefill`: prompt tokens in the same forward."""
        seconds = self.forward.seconds(rows, rows, context, prefill)
        if shared < context:
            seconds = min(seconds, self.forward.seconds(rows, rows, shared, prefill) + self.merge_s)
        return seconds


_USUAL = DraftTime(LinearTime(0.004))


class Span(NamedTuple):
    """One operation of an actor."""

    actor: str
    what: str
    """`verify` or `draft`: one forward, or one lookup for many requests."""
    begin: float
    """Virtual seconds."""
    end: float
    rows: int
    positions: int


class Recorder:
    """The first and the last spans, and the requests that are drafted for at once."""

    def __init__(self) -> None:
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=_KEPT_SPANS)
        self._streams: dict[str, tuple[int, int]] = {}
        self._open = self._tokens = 0
        self.peak_streams = 0
        """Most requests of drafters at once, summed over drafters."""
        self.peak_tokens = 0
        """Most tokens in the caches of drafters at once, summed over drafters."""

    def add(self, span: Span) -> None:
        (self._first if len(self._first) < _KEPT_SPANS else self._last).append(span)

    def streams(self, actor: str, count: int, context_tokens: int) -> None:
        """Record that a drafter has `count` requests with `context_tokens` tokens in total."""
        old_count, old_tokens = self._streams.get(actor, (0, 0))
        self._streams[actor] = (count, context_tokens)
        self._open += count - old_count
        self._tokens += context_tokens - old_tokens
        self.peak_streams, self.peak_tokens = max(self.peak_streams, self._open), max(self.peak_tokens, self._tokens)

    @property
    def spans(self) -> list[Span]:
        return [*self._first, *self._last]


@dataclass
class World:
    """Ground truth of a simulation."""

    text: Text = field(default_factory=HashedText)
    target: ForwardCost = LinearTime(0.02, 0.0002)
    drafting: Mapping[str, DraftTime] = field(default_factory=dict)
    """Draft method → its durations; others take 4 ms per forward."""
    python: PythonTime = PythonTime()
    load_s: float = 0.5
    """Seconds to load a model, for verifiers and draft actors."""
    sync_s: float = 0.5
    """Seconds to load new weights."""
    clairvoyant: bool = False
    """Whether decisions use true acceptance and cost; see `cluster.KnownAcceptance`."""
    cache_tokens: float = float("inf")
    """Tokens of each verifier's cache."""
    max_model_len: int = 100_000
    stream_bytes_per_token: float = 0.0
    """Bytes of a drafter's cache per token of its requests."""
    vocab_size: int | None = None
    """Vocabulary size of the target model; None: any token is valid."""
    record: Recorder = field(default_factory=Recorder)
    poison: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Seed of a request → its fault (`crash` or `wedge` of the engine), and the output position of the fault."""
    wedged: set[str] = field(default_factory=set)
    """Verifiers whose engine does not return from its next step."""
    busy: set[str] = field(default_factory=set)
    """Verifiers that are in a step."""
    corrupt: set[str] = field(default_factory=set)
    """Draft actors with wrong drafts."""
    version_of: dict[int, int] = field(default_factory=dict)
    """Seed of a request → version of its weights."""

    def draft_time(self, method: str) -> DraftTime:
        return self.drafting.get(method) or _USUAL


def build_world(scenario: ScenarioConfig) -> World:
    """Cost models, times and cache of a scenario; `SimulatedRollouts` sets text and Python.

    Raises:
        ConfigError: The hardware does not exist, or has no figures for a model.
    """
    hardware, target = load_hardware(scenario.hardware), scenario.config.target
    world = _timed_world(scenario, hardware)
    if isinstance(hardware, ProfiledHardware):
        known = load_models().get(target.model.lower())
        world.vocab_size = known.vocabulary if known is not None else None
        return world
    shapes = [find_model(drafter.model) for drafter in inline_drafters(scenario.config) if drafter.model]
    beside = sum(shape.parameters * shape.weight_bytes for shape in shapes)
    world.vocab_size = find_model(target.model).vocabulary
    share, devices = scenario.cache_share, target.gpus or target.cores
    world.cache_tokens = hardware.cache_tokens(target.model, devices, share, beside)
    drafters = scenario.config.drafters if scenario.config.mode is not ModeName.plain else []
    caches = [find_model(drafter.model).kv_bytes_per_token for drafter in drafters if drafter.model]
    world.stream_bytes_per_token = max(caches, default=0.0)
    return world


def profile_world(
    scenario: ScenarioConfig, verify: Sequence[CostPoint], drafting: Mapping[str, Sequence[CostPoint]]
) -> World:
    """The world of a measured machine: points of verifying, and of each draft method. Repeated points are averaged."""
    costs = {method: cost_grids(_mean(points)) for method, points in drafting.items()}
    hardware = ProfiledHardware("profile", scenario.config.target.model, cost_grids(_mean(verify)), costs)
    return _timed_world(scenario, hardware)


def _mean(points: Sequence[CostPoint]) -> list[CostPoint]:
    seconds: dict[CostPoint, list[float]] = defaultdict(list)
    for point in points:
        seconds[replace(point, seconds=0.0)].append(point.seconds)
    return [replace(point, seconds=fmean(values)) for point, values in seconds.items()]


def _timed_world(scenario: ScenarioConfig, hardware: Hardware) -> World:
    """A world with durations only."""
    target, steps = scenario.config.target, scenario.steps
    try:
        cost = hardware.target_cost(target.model, target.gpus or target.cores)
    except ConfigError as error:
        raise ConfigError("config.target", f"{error.key}: {error.problem}", error.fix) from None
    forwards = {skill.method: skill.forward_ms for skill in scenario.skills}
    drafting = {}
    for index, drafter in enumerate(scenario.config.drafters if scenario.config.mode is not ModeName.plain else ()):
        drafting[drafter.method] = _draft_time(index, drafter, hardware, forwards.get(drafter.method))
    return World(target=cost, drafting=drafting, load_s=steps.load_s)


def _draft_time(index: int, drafter: DrafterConfig, hardware: Hardware, forward_ms: float | None) -> DraftTime:
    is_lookup = traits(drafter.method, f"config.drafters.{index}.method").looks_up
    if forward_ms is not None:
        return DraftTime(LinearTime(forward_ms / 1e3), is_lookup)
    try:
        if isinstance(hardware, ProfiledHardware):
            cost: ForwardCost = hardware.draft_cost(drafter.method, max(1, round(drafter.cores)))
            return DraftTime(_ProfiledLookup(cost) if is_lookup else cost, is_lookup)
        if is_lookup:
            return DraftTime(_LOOKUP, is_lookup)
        if drafter.model is None:
            raise ConfigError("model", "is not set.", "name a shape of conf/simulation/hardware/models.yaml.")
        known = load_models().get(drafter.model.lower())
        merge_s = math.inf if known is None else known.layers * _MERGE_LAYER_S
        cost = hardware.draft_cost(drafter.model, max(drafter.gpus, 1))
        fusion = cost.fusion_seconds if isinstance(cost, RooflineCost) and cost.model.features else None
        return DraftTime(cost, fusion=fusion, merge_s=merge_s)
    except ConfigError as error:
        raise ConfigError(f"config.drafters.{index}", f"{error.key}: {error.problem}", error.fix) from None


@dataclass(frozen=True)
class _ProfiledLookup:
    """Seconds of a lookup: those of one token times the tokens of each row, at least one, whether found or not."""

    token: ForwardCost

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        return self.token.seconds(rows, rows, context_tokens) * max(positions / rows, 1.0)
