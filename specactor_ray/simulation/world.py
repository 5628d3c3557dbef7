"""Ground truth of one simulation: text and durations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from specactor_ray.config.methods import inline_drafters, traits
from specactor_ray.config.schema import DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.simulation.hardware import (
    DeviceSpec,
    MeasuredHardware,
    RooflineCost,
    StepSeconds,
    find_model,
    load_hardware,
)
from specactor_ray.simulation.scenario import PythonConfig, ScenarioConfig
from specactor_ray.simulation.text import GeneratedText, draw_text

_MERGE_LAYER_S = 14e-6
"""Additional seconds of a layer if the rows of a request read their common pages once: 5 kernels of 2 us, which gather
and merge, with gaps of 0.8 us."""


def linear(forward_s: float, position_s: float = 0.0, row_s: float = 0.0) -> StepSeconds:
    """Fixed seconds per forward, per position, and per row."""
    return lambda rows, positions, context_tokens, prefill_tokens: (
        forward_s + row_s * rows + position_s * (positions + prefill_tokens)
    )


_STEP = linear(0.02, 0.0002)
_LOOKUP = linear(0.0, row_s=5e-6)
"""Time of a lookup: 3.3 us an answer and 0.74 us a committed token
(docs/design/suffix-drafter.md)."""


@dataclass(frozen=True)
class DraftTime:
    """Durations of a draft method."""

    forward: StepSeconds
    """Seconds of one forward, which drafts one token for each of its rows; for a lookup, which drafts whole tails, the
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
        seconds = self.forward(rows, rows, context, prefill)
        if shared < context:
            seconds = min(seconds, self.forward(rows, rows, shared, prefill) + self.merge_s)
        return seconds


_USUAL = DraftTime(linear(0.004))


@dataclass
class World:
    """Ground truth of a simulation."""

    text: GeneratedText
    target: StepSeconds = _STEP
    drafting: Mapping[str, DraftTime] = field(default_factory=dict)
    """Draft method → its durations; others take 4 ms per forward."""
    python: PythonConfig = field(default_factory=lambda: PythonConfig(0.0, 0.0, 0.0))
    load_s: float = 0.5
    """Seconds to load a model, for verifiers and draft actors."""
    sync_s: float = 0.5
    """Seconds to load new weights."""
    cache_tokens: float = float("inf")
    """Tokens of each verifier's cache."""
    max_model_len: int = 100_000
    version_of: dict[int, int] = field(default_factory=dict)
    """Seed of a request → version of its weights."""

    def draft_time(self, method: str) -> DraftTime:
        return self.drafting.get(method) or _USUAL


def build_world(scenario: ScenarioConfig) -> World:
    """The ground truth of a scenario. ConfigError: the hardware does not exist or has no figures for a model, or a
    request is too long."""
    hardware, target = load_hardware(scenario.hardware), scenario.config.target
    devices = target.gpus or target.cores
    with _keys_of("config.target"):
        cost = hardware.cost(target.model, devices)
    drafters = scenario.config.drafters if scenario.config.mode is not ModeName.plain else []
    forwards = {skill.method: skill.forward_ms for skill in scenario.skills}
    drafting = {
        drafter.method: _draft_time(index, drafter, hardware, forwards.get(drafter.method))
        for index, drafter in enumerate(drafters)
    }
    world = World(draw_text(scenario), drafting=drafting, python=scenario.python, load_s=scenario.load_s)
    if isinstance(cost, RooflineCost):
        shapes = [find_model(drafter.model) for drafter in inline_drafters(scenario.config) if drafter.model]
        beside = sum(shape.parameters * shape.weight_bytes for shape in shapes)
        world.target, world.cache_tokens = cost.seconds, cost.cache_tokens(scenario.cache_share, beside)
    else:
        world.target = cost
    longest = scenario.workload.prompt_tokens + scenario.workload.max_tokens
    if longest > min(world.cache_tokens, world.max_model_len):
        problem = f"a request can have {longest:,} tokens, and the cache of a verifier holds {world.cache_tokens:,.0f}"
        problem += f", its context {world.max_model_len:,}."
        fix = "use shorter requests, a larger cache_share or more config.target.gpus."
        raise ConfigError("workload.max_tokens", problem, fix)
    return world


def _draft_time(
    index: int, drafter: DrafterConfig, hardware: DeviceSpec | MeasuredHardware, forward_ms: float | None
) -> DraftTime:
    is_lookup = traits(drafter.method, f"config.drafters.{index}.method").looks_up
    if forward_ms is not None and (is_lookup or drafter.model is None or isinstance(hardware, MeasuredHardware)):
        return DraftTime(linear(forward_ms / 1e3), is_lookup)
    if is_lookup:
        return DraftTime(_LOOKUP, is_lookup)
    with _keys_of(f"config.drafters.{index}"):
        if isinstance(hardware, MeasuredHardware):
            return DraftTime(hardware.cost(drafter.method, max(1, round(drafter.cores))))
        if drafter.model is None:
            raise ConfigError("model", "is not set.", "name a shape of conf/simulation/hardware/models.yaml.")
        cost = hardware.cost(drafter.model, max(drafter.gpus, 1))
    forward, model = cost.seconds, cost.model
    if forward_ms is not None:
        more_s = forward_ms / 1e3 - cost.seconds(1, 1, 0)
        forward = lambda *step: max(cost.seconds(*step) + more_s, 0.0)  # noqa: E731
    return DraftTime(forward, False, cost.fusion_seconds if model.features else None, model.layers * _MERGE_LAYER_S)


@contextlib.contextmanager
def _keys_of(section: str) -> Iterator[None]:
    """Errors inside name this section of the configuration."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(section, f"{error.key}: {error.problem}", error.fix) from None
