"""`mode: auto` with `profile`: the configuration of the plan search, by the costs of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specactor_ray.config.methods import drafter_specs
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.costs import Costs, StepTimes, load_costs
from specactor_ray.plan.search import ALL_MODES, Method, Plan, geometric, search_plan
from specactor_ray.startup.machine import Machine, devices_of, trainer_cores
from specactor_ray.startup.mode import as_decoupled, settle


def settle_auto(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """As `settle`; with a `profile` `mode: auto` is resolved by `plan_config`."""
    if config.mode is not ModeName.auto or config.profile is None:
        return settle(config, machine, machine.devices(config.cluster))
    planned, plan = plan_config(config, machine)
    dtype = planned.target.dtype
    return planned, [*plan.lines(), *([f"target.dtype: {dtype}"] if dtype != config.target.dtype else [])]


def plan_config(config: Config, machine: Machine, modes: Sequence[ModeName] = ALL_MODES) -> tuple[Config, Plan]:
    """The configuration of the fastest of these modes by the costs in `profile`, and the plan.

    Raises:
        ConfigError: `profile` is not set, is damaged, has not enough figures, or they are those of another target.
        InputError: No layout fits.
    """
    config = as_decoupled(config, machine)
    plan = make_plan(config, _usable_costs(config), machine, modes)
    apply_plan(config, plan)
    validate(config)
    return config, plan


def _usable_costs(config: Config) -> Costs:
    """The costs in the configured file."""
    if config.profile is None:
        raise ConfigError("profile", "is not set.", "name the summary of a run: profile=runs/NAME/summary.json")
    costs, where = load_costs(config.profile), config.profile
    for name, there in costs.target.items():
        if there != (here := getattr(config.target, name)):
            problem = f"{where} was measured with target.{name}={there}, and here it is {here}."
            raise ConfigError("profile", problem, "name the summary of a run of this target, or leave it out.")
    if not costs.acceptance:
        problem = f"{where} has no draft ladder: its run verified no drafts, or was too short."
        raise ConfigError("profile", problem, "name the summary of a longer run with mode=coupled or decoupled.")
    return costs


def make_plan(config: Config, costs: Costs, machine: Machine, modes: Sequence[ModeName] = ALL_MODES) -> Plan:
    """Plan with the draft methods that are both configured and measured, for all devices of a local cluster beside the
    trainer's, or those that the configuration needs on another one. InputError if no layout fits."""
    methods, unusable = _methods(config, costs)
    there, trainer = machine.devices(config.cluster) or devices_of(config, trains=True), config.trainer
    on_gpus, on_cores = there.gpus - trainer.ranks * trainer.gpus, there.cores - trainer_cores(trainer)
    devices, requests = on_gpus if config.target.gpus else on_cores, config.target.replicas * config.target.max_batch
    plan = search_plan(costs.verify, methods, devices=devices, requests=requests, modes=modes)
    return replace(plan, notes=(*unusable, *plan.notes))


def apply_plan(config: Config, plan: Plan) -> None:
    """Set a plan's choice. The caches of all verifiers on CPUs together keep their size. Unless plain, the chosen
    method alone remains, and its window moves to `speculation.window`."""
    chosen, target = plan.chosen, config.target
    config.mode = chosen.mode
    if target.kv_cache_gb and not target.gpus:
        target.kv_cache_gb *= target.replicas / chosen.verifiers
    target.replicas, target.max_batch = chosen.verifiers, chosen.batch
    target.max_step_tokens = max(target.max_step_tokens, chosen.batch + chosen.window)
    if not target.gpus:
        target.cores = chosen.verify_devices
    if chosen.method is None:
        return
    config.drafters = [drafter for drafter in config.drafters if drafter.method == chosen.method]
    drafter = config.drafters[0]
    drafter.replicas, drafter.window = chosen.drafters or chosen.verifiers, None
    most = -(-plan.batch // drafter.replicas)
    drafter.max_batch = drafter.max_batch and max(drafter.max_batch, most)
    if chosen.mode is ModeName.decoupled:
        drafter.hosted = False if chosen.draft_devices else None
        if not drafter.gpus:
            drafter.cores = max(chosen.draft_devices, 1)
    config.speculation.window = chosen.window


def _methods(config: Config, costs: Costs) -> tuple[dict[str, Method], list[str]]:
    """Configured methods that were measured, and the others with the reason."""
    usable: dict[str, Method] = {}
    unusable: list[str] = []
    specs = drafter_specs(replace(config, mode=ModeName.decoupled))
    for method, spec in specs.items():
        found, is_lookup = costs.drafters.get(method), spec.traits.looks_up
        if found is None or method not in costs.acceptance:
            reason = "that run did not try it"
        elif found.model != spec.model:
            reason = f"that run tried it with model {found.model}"
        elif not (found.seconds or is_lookup):
            reason = "that run has no time of its drafts"
        else:
            seconds = dict.fromkeys((1, *costs.verify), StepTimes()) if is_lookup else found.seconds
            survival = geometric(np.array([costs.acceptance[method]]), spec.window)[0]
            supply = costs.supply if is_lookup else 1.0  # a model has a guess at any time
            usable[method] = Method(seconds, survival, is_lookup and config.target.gpus > 0, supply, spec.branches)
            continue
        unusable.append(f"{method} is left out: {reason}")
    return usable, unusable
