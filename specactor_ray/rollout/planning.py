"""`mode: auto`: the configuration to run, by the costs of an earlier run or by the devices. Contacts no cluster."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specactor_ray.cluster.cores import draft_cores
from specactor_ray.config.methods import acting_drafters, drafter_specs, traits
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.machine import count_gpus, fitting_dtype
from specactor_ray.plan.costs import Costs, StepTimes, load_costs
from specactor_ray.plan.search import ALL_MODES, Method, Plan, geometric, search_plan

_GPU_CORES = 4
"""Cores of a verifier on GPUs besides one per rank: its loop, the rollout's calls, threads of vLLM and NCCL."""
DEFAULT_METHOD = "suffix"
"""Draft method of `mode: auto` if none is configured: it needs no model and costs almost nothing."""


class Devices(NamedTuple):
    """Devices of a cluster or a layout."""

    cores: int
    gpus: int

    def fit(self, there: Devices) -> bool:
        """Whether these are no more than those that are there."""
        return self.cores <= there.cores and self.gpus <= there.gpus


def resolve(config: Config) -> tuple[Config, list[str]]:
    """Resolve `mode: auto` by `profile`, if it is set, else by the devices. Returns the configuration to run and lines
    with the choices. Errors as in `resolve_by_profile` and `resolve_mode`."""
    asked = config.target.dtype
    config, lines = resolve_by_profile(config)
    config, more = resolve_mode(config, existing_devices(config))
    dtype = config.target.dtype
    return config, [*lines, *more, *([f"target.dtype: {dtype}"] if dtype != asked else [])]


def settle(config: Config, devices: Devices | None) -> Config:
    """Resolve `dtype: auto` and the cores of verifiers on GPUs; `devices` as in `resolve_mode`."""
    settled = copy.deepcopy(config)
    target = settled.target
    if target.cores is None:
        target.cores = _GPU_CORES + target.tensor_parallel
        if devices is not None:
            others = draft_cores(acting_drafters(settled)) + trainer_cores(settled)
            target.cores = max(1, min(target.cores, (devices.cores - others) // target.replicas))
    target.dtype = fitting_dtype(target.dtype, target.gpus > 0, target.backend)
    if settled.mode is not ModeName.auto:  # it may still give a draft model a GPU
        for drafter in settled.drafters:
            on_gpu = (target.gpus if settled.mode is ModeName.coupled else drafter.gpus) > 0
            drafter.dtype = fitting_dtype(drafter.dtype, on_gpu)
    return config if settled == config else settled


def resolve_mode(config: Config, devices: Devices | None) -> tuple[Config, list[str]]:
    """Resolve `mode: auto` without a profile to coupled or decoupled, with one line for the reason; other modes are
    kept, without a line.

    - Drafters that need draft actors (`hosted: false`, GPUs beside a target on CPUs, or all have `replicas: 0`, which
      `specactor scale` may raise): decoupled.
    - A target on CPUs: coupled, and the verifiers get the cores that are configured for draft actors.
    - A target on GPUs: decoupled if there are draft actors, and room for them beside verifiers and trainer, else
      coupled. A draft model without GPUs of its own gets one, or else is hosted by the verifiers.

    Plain is never chosen: both modes decide at every step whether drafting pays (`verify/policy.py`).

    Args:
        config: Any valid configuration; not changed.
        devices: Devices of the cluster of the run; None if unknown: then draft actors beside verifiers on GPUs are
            assumed to fit, and verifiers on CPUs get no more cores.

    Raises:
        ConfigError: The chosen mode contradicts another key.
    """
    if config.mode is not ModeName.auto:
        return settle(config, devices), []
    resolved = settle(_with_drafters(config), devices)
    target = resolved.target
    given = _give_gpus(resolved, devices)
    resolved.mode, reason = _mode_of(resolved, devices)
    line = f"mode: {resolved.mode.value} ({reason})" + "".join(f", {key}=1" for key in given)
    if resolved.mode is ModeName.coupled and not target.gpus and devices is not None:
        more = _spare_cores(resolved, devices)
        target.cores += more
        line += f", target.cores={target.cores}" if more else ""
    if not config.drafters:
        line += f", drafters: {DEFAULT_METHOD}, as none is configured"
    validate(resolved)
    return settle(resolved, devices), [line]


def as_decoupled(config: Config) -> Config:
    """Replace `mode: auto` by `decoupled`, the layout as written, where modes are planned or measured side by side. A
    ConfigError states why that is not possible."""
    if config.mode is ModeName.auto:
        config = _with_drafters(config)
        config.mode = ModeName.decoupled
        validate(config)
    return settle(config, existing_devices(config))


def _with_drafters(config: Config) -> Config:
    """A copy with at least one drafter."""
    resolved = copy.deepcopy(config)
    resolved.drafters = resolved.drafters or [DrafterConfig(DEFAULT_METHOD)]
    return resolved


def _models_on_cores(config: Config) -> list[int]:
    """Indices of the draft models that would draft on CPU cores for a target on GPUs."""
    return [
        number
        for number, drafter in enumerate(config.drafters if config.target.gpus else ())
        if drafter.replicas and not drafter.gpus and not traits(drafter.method, f"drafters.{number}.method").looks_up
    ]


def _give_gpus(config: Config, devices: Devices | None) -> list[str]:
    """Give a GPU to each draft model that would have none, if there is room for all of them. Returns the keys set."""
    numbers = _models_on_cores(config)
    if devices is None or not numbers:
        return []
    for number in numbers:
        config.drafters[number].gpus = 1
    if devices_of(config, trains=True).fit(devices):
        return [f"drafters.{number}.gpus" for number in numbers]
    for number in numbers:
        config.drafters[number].gpus = 0
    return []


def _mode_of(config: Config, devices: Devices | None) -> tuple[ModeName, str]:
    """Mode, and the reason for it."""
    for index, drafter in enumerate(config.drafters):
        if drafter.hosted is False:
            return ModeName.decoupled, f"drafters.{index}.hosted is false, so {drafter.method} has draft actors"
        if drafter.gpus and drafter.replicas and not config.target.gpus:
            return ModeName.decoupled, f"{drafter.method} has GPUs of its own, drafters.{index}.gpus"
    if not any(drafter.replicas for drafter in config.drafters) and acting_drafters(config):
        return ModeName.decoupled, "drafters.*.replicas are all 0: draft actors come by `specactor scale` only"
    if not config.target.gpus:
        return ModeName.coupled, "on CPUs draft actors would take cores from the verifiers"
    if numbers := _models_on_cores(config):
        return ModeName.coupled, f"no GPU for drafters.{numbers[0]}, so verifiers run it on theirs; set its gpus to 1"
    if not acting_drafters(config):
        return ModeName.coupled, "verifiers host all drafters"
    if devices is None:
        return ModeName.decoupled, "draft actors on devices of their own"
    needed = devices_of(config, trains=True)
    if needed.fit(devices):
        return ModeName.decoupled, "there is room for draft actors beside the verifiers"
    wanted, have = f"{needed.gpus} GPU(s) and {needed.cores} core(s)", f"{devices.gpus} and {devices.cores}"
    return ModeName.coupled, f"draft actors beside the verifiers would need {wanted} in all, and there are {have}"


def devices_of(config: Config, trains: bool = False) -> Devices:
    """Devices of verifiers, draft actors and, if it `trains`, the trainer, as configured."""
    target, drafters = config.target, acting_drafters(config)
    gpus = target.replicas * target.gpus + sum(drafter.replicas * drafter.gpus for drafter in drafters)
    cores = target.replicas * target.cores + draft_cores(drafters)
    if trains:
        cores, gpus = cores + trainer_cores(config), gpus + config.trainer.ranks * config.trainer.gpus
    return Devices(cores, gpus)


def trainer_cores(config: Config) -> int:
    """Cores used by the trainer alone: without `trainer.cores` it shares those of the verifiers in turns."""
    trainer = config.trainer
    return trainer.ranks * (trainer.cores or min(trainer.gpus, 1))


def _spare_cores(config: Config, devices: Devices) -> int:
    """Cores that each verifier gets from those configured for draft actors; its ranks share them evenly."""
    target = config.target
    room = (devices.cores - trainer_cores(config)) // target.replicas - target.cores
    more = max(0, min(draft_cores(config.drafters) // target.replicas, room))
    return more - more % target.tensor_parallel


def resolve_by_profile(config: Config, modes: Sequence[ModeName] = ALL_MODES) -> tuple[Config, list[str]]:
    """Resolve `mode: auto` to the fastest of these modes by the costs in `profile`, with lines for the choices. Other
    modes are kept, and so is `auto` without a profile. Raises as `usable_costs`; InputError: no layout fits."""
    if config.mode is not ModeName.auto or config.profile is None:
        return config, []
    written = as_decoupled(config)
    plan = make_plan(written, usable_costs(written), modes)
    resolved = apply_plan(written, plan)
    validate(resolved)
    return resolved, [*plan.notes, f"plan: {plan.words()}"]


def usable_costs(config: Config) -> Costs:
    """The costs in the configured file. Raises ConfigError: it is not set, is damaged, has not enough figures, or they
    are those of another target."""
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


def make_plan(config: Config, costs: Costs, modes: Sequence[ModeName] = ALL_MODES) -> Plan:
    """Plan with the draft methods that are both configured and measured, for all devices of a local cluster beside the
    trainer's, or those that the configuration needs on another one. InputError if no layout fits."""
    methods, unusable = _methods(config, costs)
    there, trainer = existing_devices(config) or devices_of(config, trains=True), config.trainer
    on_gpus, on_cores = there.gpus - trainer.ranks * trainer.gpus, there.cores - trainer_cores(config)
    devices = on_gpus if config.target.gpus else on_cores
    plan = search_plan(costs.verify, methods, devices=devices, requests=requests_of(config), modes=modes)
    return replace(plan, notes=(*unusable, *plan.notes))


def requests_of(config: Config) -> int:
    """B: number of requests that all verifiers together run at once."""
    return config.target.replicas * config.target.max_batch


def apply_plan(config: Config, plan: Plan) -> Config:
    """A copy of the configuration with its plan's choice. The caches of all verifiers on CPUs together keep their size.
    Unless plain, it keeps the chosen method alone, and moves the window to `speculation.window`."""
    chosen, resolved = plan.chosen, copy.deepcopy(config)
    target = resolved.target
    resolved.mode = chosen.mode
    if target.kv_cache_gb and not target.gpus:
        target.kv_cache_gb *= target.replicas / chosen.verifiers
    target.replicas, target.max_batch = chosen.verifiers, chosen.batch
    target.max_step_tokens = max(target.max_step_tokens, chosen.batch + chosen.window)
    if not target.gpus:
        target.cores = chosen.verify_devices
    if chosen.method is None:
        return resolved
    resolved.drafters = [drafter for drafter in resolved.drafters if drafter.method == chosen.method]
    drafter = resolved.drafters[0]
    drafter.replicas, drafter.window = chosen.drafters or chosen.verifiers, None
    most = -(-plan.batch // drafter.replicas)
    drafter.max_batch = drafter.max_batch and max(drafter.max_batch, most)
    if chosen.mode is ModeName.decoupled:
        drafter.hosted = False if chosen.draft_devices else None
        if not drafter.gpus:
            drafter.cores = max(chosen.draft_devices, 1)
    resolved.speculation.window = chosen.window
    return resolved


def existing_devices(config: Config) -> Devices | None:
    """Devices of a cluster that would be started here, with GPUs if some are configured; None for another cluster."""
    cluster = config.cluster
    if cluster.address != "local":
        return None
    cores, gpus = cluster.num_cpus or len(os.sched_getaffinity(0)), cluster.num_gpus
    if gpus is None and config.target.gpus:
        gpus = count_gpus()
    return Devices(cores, gpus or 0)


def _methods(config: Config, costs: Costs) -> tuple[dict[str, Method], list[str]]:
    """Configured methods that were measured, and the others with the reason."""
    usable: dict[str, Method] = {}
    unusable: list[str] = []
    specs = drafter_specs(replace(config, mode=ModeName.decoupled))
    for drafter in config.drafters:
        method, found, spec = drafter.method, costs.drafters.get(drafter.method), specs[drafter.method]
        is_lookup = spec.traits.looks_up
        if found is None or method not in costs.acceptance:
            reason = "that run did not try it"
        elif found.model != drafter.model:
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
