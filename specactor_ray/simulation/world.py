"""Ground truth of one simulation: text, durations, faults of engines, and a record of its steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from specactor_ray.config.methods import inline_drafters, traits
from specactor_ray.config.schema import DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.simulation.hardware import (
    ForwardCost,
    Hardware,
    MeasuredHardware,
    RooflineCost,
    find_model,
    load_hardware,
    load_models,
)
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
    """Seconds of the package's Python beside forwards."""

    verify_row_s: float = 0.0
    """Seconds per row of a verify step with drafts."""
    plain_row_s: float = 0.0
    """Seconds per row of a verify step without drafts."""
    draft_row_s: float = 0.0
    """Seconds per chain of a draft step."""


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
    """Durations and cache of a scenario; `SimulatedRollouts` sets the text.

    Raises:
        ConfigError: The hardware does not exist, or has no figures for a model.
    """
    hardware, target = load_hardware(scenario.hardware), scenario.config.target
    devices = target.gpus or target.cores
    try:
        cost = hardware.cost(target.model, devices)
    except ConfigError as error:
        raise ConfigError("config.target", f"{error.key}: {error.problem}", error.fix) from None
    drafters = scenario.config.drafters if scenario.config.mode is not ModeName.plain else []
    forwards = {skill.method: skill.forward_ms for skill in scenario.skills}
    drafting = {
        drafter.method: _draft_time(index, drafter, hardware, forwards.get(drafter.method))
        for index, drafter in enumerate(drafters)
    }
    python = scenario.python
    rows_s = PythonTime(python.verify_row_us / 1e6, python.plain_row_us / 1e6, python.draft_row_us / 1e6)
    world = World(target=cost, drafting=drafting, python=rows_s, load_s=scenario.steps.load_s)
    if isinstance(hardware, MeasuredHardware) and hardware.is_profile:
        known = load_models().get(target.model.lower())
        world.vocab_size = known.vocabulary if known is not None else None
        return world
    shapes = [find_model(drafter.model) for drafter in inline_drafters(scenario.config) if drafter.model]
    beside = sum(shape.parameters * shape.weight_bytes for shape in shapes)
    world.vocab_size = find_model(target.model).vocabulary
    world.cache_tokens = hardware.cache_tokens(target.model, devices, scenario.cache_share, beside)
    caches = [find_model(drafter.model).kv_bytes_per_token for drafter in drafters if drafter.model]
    world.stream_bytes_per_token = max(caches, default=0.0)
    return world


def _draft_time(index: int, drafter: DrafterConfig, hardware: Hardware, forward_ms: float | None) -> DraftTime:
    is_lookup = traits(drafter.method, f"config.drafters.{index}.method").looks_up
    if forward_ms is not None:
        return DraftTime(LinearTime(forward_ms / 1e3), is_lookup)
    try:
        if isinstance(hardware, MeasuredHardware) and hardware.is_profile:
            cost: ForwardCost = hardware.cost(drafter.method, max(1, round(drafter.cores)))
            return DraftTime(_ProfiledLookup(cost) if is_lookup else cost, is_lookup)
        if is_lookup:
            return DraftTime(_LOOKUP, is_lookup)
        if drafter.model is None:
            raise ConfigError("model", "is not set.", "name a shape of conf/simulation/hardware/models.yaml.")
        known = load_models().get(drafter.model.lower())
        merge_s = math.inf if known is None else known.layers * _MERGE_LAYER_S
        cost = hardware.cost(drafter.model, max(drafter.gpus, 1))
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
