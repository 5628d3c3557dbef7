"""`mode: auto` with `profile`: the configuration of the plan search, by the costs of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specactor_ray.config.methods import drafter_specs
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.plan.costs import Costs, usable_costs
from specactor_ray.plan.search import ALL_MODES, Plan, search_plan, usable_methods
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
    plan = make_plan(config, usable_costs(config.profile, config.target), machine, modes)
    apply_plan(config, plan)
    validate(config)
    return config, plan


def make_plan(config: Config, costs: Costs, machine: Machine, modes: Sequence[ModeName] = ALL_MODES) -> Plan:
    """Plan with the draft methods that are both configured and measured, for all devices of a local cluster beside the
    trainer's, or those that the configuration needs on another one. InputError if no layout fits."""
    specs = drafter_specs(replace(config, mode=ModeName.decoupled))
    methods, unusable = usable_methods(costs, specs, config.target.gpus > 0)
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
