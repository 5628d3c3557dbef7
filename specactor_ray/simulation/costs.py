"""Makes a `World` of costs from a scenario's hardware."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from specactor_ray.config.methods import inline_drafters, traits
from specactor_ray.config.schema import DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.costs import CostPoint, cost_grids
from specactor_ray.simulation.hardware import Hardware, ProfiledHardware, RooflineHardware, load_hardware
from specactor_ray.simulation.hardware_files import find_model, load_models
from specactor_ray.simulation.roofline import ForwardCost, RooflineCost
from specactor_ray.simulation.scenario import ScenarioConfig, SkillConfig
from specactor_ray.simulation.world import DraftTime, LinearTime, Times, World

_LOOKUP = LinearTime(0.0, row_s=5e-6)
"""Time of a lookup without a profile: 3.3 us an answer and 0.74 us a committed token
(docs/design/suffix-drafter.md)."""

_MERGE_LAYER_S = 14e-6
"""Additional seconds of a layer if the rows of a request read their common pages once: 5 kernels of 2 us, which gather
and merge, with gaps of 0.8 us."""


def build_world(scenario: ScenarioConfig) -> World:
    """Cost models, times and cache of a scenario; `SimulatedRollouts` sets text, Python and record.

    Raises:
        ConfigError: The hardware does not exist, or has no figures for a model.
    """
    hardware, target = load_hardware(scenario.hardware), scenario.config.target
    world = _timed_world(scenario, hardware)
    if isinstance(hardware, ProfiledHardware):
        known = load_models().get(target.model.lower())
        world.vocab_size = known.vocabulary if known is not None else None
        return world
    devices = target.gpus or target.cores
    world.vocab_size = find_model(target.model).vocabulary
    world.cache_tokens = hardware.cache_tokens(target.model, devices, scenario.cache_share, _beside(scenario, hardware))
    world.stream_bytes_per_token = _stream_bytes(scenario, hardware)
    return world


def profile_world(
    scenario: ScenarioConfig, verify: Sequence[CostPoint], drafting: Mapping[str, Sequence[CostPoint]]
) -> World:
    """The world of a measured machine: points of verifying, and of each draft method. Repeated points are averaged."""
    costs = {method: cost_grids(_mean(points)) for method, points in drafting.items()}
    hardware = ProfiledHardware("profile", scenario.config.target.model, cost_grids(_mean(verify)), costs)
    return _timed_world(scenario, hardware)


def _timed_world(scenario: ScenarioConfig, hardware: Hardware) -> World:
    """A world with durations only."""
    target, steps = scenario.config.target, scenario.steps
    try:
        cost = hardware.target_cost(target.model, target.gpus or target.cores)
    except ConfigError as error:
        raise ConfigError("config.target", f"{error.key}: {error.problem}", error.fix) from None
    times = Times(steps.load_s, steps.sync_s)
    return World(target=cost, drafting=_drafting(scenario, hardware), times=times)


def _mean(points: Sequence[CostPoint]) -> list[CostPoint]:
    seconds: dict[CostPoint, list[float]] = defaultdict(list)
    for point in points:
        seconds[replace(point, seconds=0.0)].append(point.seconds)
    return [replace(point, seconds=fmean(values)) for point, values in seconds.items()]


def _drafting(scenario: ScenarioConfig, hardware: Hardware) -> dict[str, DraftTime]:
    if scenario.config.mode is ModeName.plain:
        return {}
    skills = {one.method: one for one in scenario.skills}
    times = {}
    for index, drafter in enumerate(scenario.config.drafters):
        skill = skills.get(drafter.method, SkillConfig())
        time = _draft_time(index, drafter, hardware, skill.forward_ms)
        times[drafter.method] = replace(time, block=skill.block)
    return times


def _draft_time(index: int, drafter: DrafterConfig, hardware: Hardware, forward_ms: float | None) -> DraftTime:
    is_lookup = traits(drafter.method, f"config.drafters.{index}.method").looks_up
    if forward_ms is not None:
        return DraftTime(LinearTime(forward_ms / 1e3), is_lookup)
    try:
        if isinstance(hardware, ProfiledHardware):
            cost: ForwardCost = hardware.draft_cost(drafter.method, max(1, round(drafter.cores)))
            return DraftTime(_Lookup(cost) if is_lookup else cost, is_lookup)
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


class _Lookup:
    """Seconds of a lookup: those of one token times the tokens of each row, at least one, whether found or not."""

    def __init__(self, token: ForwardCost) -> None:
        self._token = token

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        return self._token.seconds(rows, rows, context_tokens) * max(positions / rows, 1.0)


def _beside(scenario: ScenarioConfig, hardware: Hardware) -> float:
    """Bytes of drafters' weights on each GPU of a verifier."""
    if not isinstance(hardware, RooflineHardware):
        return 0.0
    models = [drafter.model for drafter in inline_drafters(scenario.config) if drafter.model]
    return sum(hardware.target_cost(model).weight_bytes for model in models)


def _stream_bytes(scenario: ScenarioConfig, hardware: Hardware) -> float:
    """Bytes of a drafter's cache per token of its requests: the maximum over methods."""
    if scenario.config.mode is ModeName.plain or not isinstance(hardware, RooflineHardware):
        return 0.0
    models = [drafter.model for drafter in scenario.config.drafters if drafter.model]
    return max((hardware.target_cost(model).kv_bytes_per_token for model in models), default=0.0)
