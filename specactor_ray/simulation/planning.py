"""Plan search (`plan/search.py`) on a scenario's cost models, workload and skills."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np

from specactor_ray.config.methods import drafter_specs, traits
from specactor_ray.config.schema import ModeName
from specactor_ray.plan.costs import CostPoint, GridCost, cost_grids
from specactor_ray.plan.search import Method, Plan, SliceLoad, search_plan
from specactor_ray.simulation.hardware import ForwardCost
from specactor_ray.simulation.scenario import Arrival, ScenarioConfig, SkillConfig
from specactor_ray.simulation.text import draw_lengths
from specactor_ray.simulation.world import build_world

_BATCHES = tuple(1 << power for power in range(14))
_WINDOWS = (0, 1, 2, 4, 8, 16)
_CONTEXTS = (1, 1 << 14)
"""Contexts of the grid, in tokens; cost models are linear in the context."""
_SLICES = 12
_QUANTILES = 64
NOT_PLANNED = "note: coupled layouts are not planned, nor lookups, whatever config.mode is; simulate them"
"""Features that `plan_scenario` ignores."""


def plan_scenario(scenario: ScenarioConfig, devices: int | None = None, requests: int | None = None) -> Plan:
    """The fastest layout, plain or decoupled with the models that have draft actors in this scenario.

    Args:
        scenario: A decoupled scenario.
        devices: G. Default: GPUs (without GPUs: cores) of the whole cluster, of which the scenario simulates a part.
        requests: B, which all run at once. Default: requests of the whole cluster.

    Raises:
        ConfigError: See `build_world`.
        InputError: See `search_plan`.
    """
    config, workload, world = scenario.config, scenario.workload, build_world(scenario)
    shrinks = workload.arrival is Arrival.at_once
    if requests is None:
        running = workload.requests if shrinks else config.target.max_batch * config.target.replicas
        requests = running * scenario.part
    if devices is None:
        machines = scenario.machines
        devices = round((machines.gpus if config.target.gpus else machines.cpus) * machines.nodes) * scenario.part
    lengths = np.array(draw_lengths(workload, 4096, "plan"))
    mean = workload.prompt_tokens + float((lengths**2).sum() / lengths.sum()) / 2.0
    slices = tuple(_slices(lengths, workload.prompt_tokens, requests)) if shrinks else ()
    skills = {skill.method: skill for skill in scenario.skills}
    each, methods = config.target.gpus or config.target.cores, {}
    for name, drafter in drafter_specs(config).items():
        if not traits(name).looks_up:
            row_s, own = scenario.python.draft_row_us / 1e6, drafter.gpus or max(1, round(drafter.cores))
            costs = {own: _grid(world.draft_time(name).forward, (0,), own, row_s)}
            survival = _survival(skills[name], drafter.window, mean - workload.prompt_tokens)
            methods[name] = Method(costs, survival, branches=drafter.branches)
    verify = {each: _grid(world.target, _WINDOWS, each, scenario.python.verify_row_us / 1e6)}
    modes = [ModeName.plain, ModeName.decoupled]
    return search_plan(verify, methods, devices=devices, requests=requests, context=mean, modes=modes, slices=slices)


def _grid(cost: ForwardCost, windows: tuple[int, ...], devices: int, row_s: float) -> GridCost:
    if isinstance(cost, GridCost):
        return cost
    points = [
        CostPoint(
            devices, window, context, batch, cost.seconds(batch, batch * (window + 1), batch * context) + batch * row_s
        )
        for window in windows
        for context in _CONTEXTS
        for batch in _BATCHES
    ]
    return cost_grids(points)[devices]


def _slices(lengths: np.ndarray, prompt: int, requests: int) -> Iterator[SliceLoad]:
    """Running requests and their context at the middle of equal slices of a rollout."""
    for middle in (np.arange(_SLICES) + 0.5) * lengths.max() / _SLICES:
        yield SliceLoad(requests * float((lengths > middle).mean()), prompt + float(middle))


def _survival(skill: SkillConfig, window: int, position: float) -> np.ndarray:
    """S_0 to S_window: requests and stretches differ, so a tail that was right so far is more likely to continue."""
    standard = NormalDist()
    mean = skill.mean * (1.0 - skill.decay) ** (position / 1000.0)
    spread = math.hypot(skill.spread, skill.burst)
    threshold = standard.inv_cdf(min(max(mean, 1e-6), 1.0 - 1e-6)) * math.hypot(1.0, spread)
    draws = [threshold + spread * standard.inv_cdf((one + 0.5) / _QUANTILES) for one in range(_QUANTILES)]
    chances = np.array([standard.cdf(draw) for draw in draws])
    survival: np.ndarray = (chances[:, None] ** np.arange(window + 1)).mean(axis=0)
    return survival
