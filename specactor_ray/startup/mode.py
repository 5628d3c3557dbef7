"""`auto` by the devices, or with `profile` by the costs of an earlier run: the mode, data types, cores, GPUs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specactor_ray.cluster.cores import draft_cores
from specactor_ray.config.accelerators import label_selector, of_kind
from specactor_ray.config.methods import acting_drafters, drafter_specs, traits
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, DrafterConfig, ModeName, TargetConfig
from specactor_ray.plan.costs import Costs, usable_costs
from specactor_ray.plan.search import ALL_MODES, Method, Plan, search_plan, usable_methods
from specactor_ray.startup.machine import Devices, Machine, devices_of, trainer_cores, trainer_gpus

_GPU_CORES = 4
"""Cores of a verifier on GPUs besides one per rank: its loop, the rollout's calls, threads of vLLM and NCCL."""
_TARGET = "target"
"""Key of the verifiers beside those of draft methods, in `Plan.kinds`."""
DEFAULT_METHOD = "suffix"
"""Draft method of `mode: auto` if none is configured: it needs no model and costs almost nothing."""


def settle(
    config: Config, machine: Machine, there: Devices | None = None, mode: ModeName | None = None
) -> tuple[Config, list[str]]:
    """A copy of a valid configuration with mode, data types and cores in place of `auto`, and a line for each choice.

    `mode: auto` becomes what a plan by `profile` finds best; without a `profile` coupled or decoupled, never plain,
    since both decide at every step whether drafting pays (`verify/policy.py`).

    - Drafters that need draft actors (`hosted: false`, GPUs beside a target on CPUs, or all have `replicas: 0`, which
      `specactor scale` may raise): decoupled.
    - A target on CPUs: coupled, and the verifiers get the cores that are configured for draft actors.
    - A target on GPUs: decoupled if there are draft actors, and room for them beside verifiers and trainer, on GPUs of
      their kind (`accelerator`), else coupled. A draft model without GPUs of its own gets one, or else is hosted by the
      verifiers.

    Args:
        there: Devices of the cluster of the run. Default: those of the machine if the cluster is local; else they are
            unknown: draft actors beside verifiers on GPUs are assumed to fit, and verifiers on CPUs get no more cores.
        mode: Taken for `auto`, with the layout as written: where modes are planned or measured side by side.

    Raises:
        ConfigError: The chosen mode contradicts another key.
    """
    if config.mode is ModeName.auto and mode is None and config.profile is not None:
        config, plan = plan_config(given := config, machine)
        return config, [*plan.lines(), *_dtype_line(given, config)]
    config, given, lines = copy.deepcopy(config), config, list[str]()
    target, there, kind = config.target, there or machine.devices(config.cluster), machine.kind_of(config.cluster)
    target.dtype = machine.fitting_dtype(target.dtype, target.gpus > 0, target.backend, target.accelerator, kind)
    if target.cores is None:
        target.cores = _GPU_CORES + target.tensor_parallel
        if there is not None:
            others = draft_cores(acting_drafters(config)) + trainer_cores(config.trainer)
            target.cores = max(1, min(target.cores, (there.cores - others) // target.replicas))
    if config.mode is ModeName.auto:
        config.drafters = config.drafters or [DrafterConfig(DEFAULT_METHOD)]
        if mode is None:
            line = _choose_mode(config, there)
            lines.append(line if given.drafters else f"{line}, drafters: {DEFAULT_METHOD}, as none is configured")
        config.mode = mode or config.mode
        validate(config)
    for drafter in config.drafters:
        place = target if config.mode is ModeName.coupled else drafter
        drafter.dtype = machine.fitting_dtype(drafter.dtype, place.gpus > 0, "hf", place.accelerator, kind)
    return config, [*lines, *_dtype_line(given, config)]


def _dtype_line(given: Config, settled: Config) -> list[str]:
    dtype = settled.target.dtype
    return [f"target.dtype: {dtype}"] if dtype != given.target.dtype else []


def _choose_mode(config: Config, there: Devices | None) -> str:
    """Set the mode, and the devices that follow from it. Returns the choice in words."""
    target, given = config.target, give_gpus(config, there)
    config.mode, reason = _mode_of(config, there)
    line = f"mode: {config.mode.value} ({reason})" + "".join(f", {key}=1" for key in given)
    if config.mode is ModeName.coupled and not target.gpus and there is not None:
        more = _spare_cores(config, there)
        target.cores += more
        line += f", target.cores={target.cores}" if more else ""
    return line


def models_on_cores(config: Config) -> list[int]:
    """Indices of the draft models that would draft on CPU cores for a target on GPUs."""
    return [
        number
        for number, drafter in enumerate(config.drafters if config.target.gpus else ())
        if drafter.replicas and not drafter.gpus and not traits(drafter.method, f"drafters.{number}.method").looks_up
    ]


def give_gpus(config: Config, there: Devices | None) -> list[str]:
    """Give a GPU to each draft model that would have none beside a target on GPUs, if there is room for all of them.
    Returns the keys set."""
    numbers = models_on_cores(config)
    if there is None or not numbers:
        return []
    for number in numbers:
        config.drafters[number].gpus = 1
    if devices_of(config, trains=True).fit(there):
        return [f"drafters.{number}.gpus" for number in numbers]
    for number in numbers:
        config.drafters[number].gpus = 0
    return []


def _mode_of(config: Config, there: Devices | None) -> tuple[ModeName, str]:
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
    if numbers := models_on_cores(config):
        return ModeName.coupled, f"no GPU for drafters.{numbers[0]}, so verifiers run it on theirs; set its gpus to 1"
    if not acting_drafters(config):
        return ModeName.coupled, "verifiers host all drafters"
    if there is None:
        return ModeName.decoupled, "draft actors on devices of their own"
    needed = devices_of(config, trains=True)
    if needed.fit(there):
        return ModeName.decoupled, "there is room for draft actors beside the verifiers"
    all_of = f"{needed.gpus} GPU(s) and {needed.cores} core(s) in all, and there are {there.gpus} and {there.cores}"
    return ModeName.coupled, f"draft actors beside the verifiers would need {needed.shortage(there) or all_of}"


def _spare_cores(config: Config, there: Devices) -> int:
    """Cores that each verifier gets from those configured for draft actors; its ranks share them evenly."""
    target = config.target
    room = (there.cores - trainer_cores(config.trainer)) // target.replicas - target.cores
    more = max(0, min(draft_cores(config.drafters) // target.replicas, room))
    return more - more % target.tensor_parallel


# ---- by the costs of an earlier run ----


def plan_config(config: Config, machine: Machine, modes: Sequence[ModeName] = ALL_MODES) -> tuple[Config, Plan]:
    """The configuration of the fastest of these modes by the costs in `profile`, and the plan.

    Raises:
        ConfigError: `profile` is not set, is damaged, has not enough figures, or they are those of another target.
        InputError: No layout fits.
    """
    config, _ = settle(config, machine, mode=ModeName.decoupled)
    costs = usable_costs(config.profile, config.target, machine.kind_of(config.cluster))
    plan = make_plan(config, costs, machine, modes)
    apply_plan(config, plan)
    validate(config)
    return config, plan


def make_plan(config: Config, costs: Costs, machine: Machine, modes: Sequence[ModeName] = ALL_MODES) -> Plan:
    """Plan with the draft methods that are both configured and measured, for all devices of a local cluster beside the
    trainer's, or those that the configuration needs on another one. InputError if no layout fits."""
    specs = drafter_specs(replace(config, mode=ModeName.decoupled))
    methods, unusable = usable_methods(costs, specs, config.target.gpus > 0)
    kinds = {name: kind for name, kind in ((_TARGET, costs.kind), *((n, m.kind) for n, m in methods.items())) if kind}
    config, pinned = copy.deepcopy(config), list[str]()
    if config.target.gpus:
        pinned = _pin(config, kinds)
    there, trainer = machine.devices(config.cluster) or devices_of(config, trains=True), config.trainer
    target, requests = config.target, config.target.replicas * config.target.max_batch
    devices = there.cores - trainer_cores(trainer)
    if target.gpus:
        devices, methods = _pools(config, there, methods)
    plan = search_plan(costs.verify, methods, devices=devices, requests=requests, modes=modes)
    holds = [f"costs are of one kind of GPUs each, so {', '.join(pinned)}"] if pinned else []
    return replace(plan, notes=(*unusable, *holds, *plan.notes), kinds=kinds)


def _pin(config: Config, kinds: Mapping[str, str]) -> list[str]:
    """Set `accelerator` of verifiers and draft actors on GPUs to their kinds. Returns the keys and values set."""
    sections: list[tuple[str, str, TargetConfig | DrafterConfig]] = [("target", _TARGET, config.target)]
    sections += [(f"drafters.{number}", one.method, one) for number, one in enumerate(config.drafters)]
    found = []
    for key, name, section in sections:
        pinned = of_kind(section.accelerator, kinds.get(name) or "")
        if section.gpus and name in kinds and label_selector(section.accelerator) != label_selector(pinned):
            section.accelerator = pinned
            found.append(f"{key}.accelerator={pinned}")
    if config.trainer.colocate:
        config.trainer.accelerator = None  # that of the target
    return found


def _pools(config: Config, there: Devices, methods: Mapping[str, Method]) -> tuple[int, dict[str, Method]]:
    """GPUs for verifiers, and the methods with those of draft actors of another kind, without the trainer's."""
    target, trained, taken = config.target.accelerator, config.trainer.accelerator, trainer_gpus(config.trainer)
    with_target = there.share(target, trained)
    found, drafters = dict(methods), {one.method: one for one in config.drafters}
    for name, method in methods.items():
        kind = drafters[name].accelerator
        if drafters[name].gpus and not there.share(target, kind):
            rest = 0 if with_target or not there.share(kind, trained) else taken
            found[name] = replace(method, devices=there.of_kind(kind) - rest)
    return there.of_kind(target) - taken * with_target, found


def apply_plan(config: Config, plan: Plan) -> None:
    """Set a plan's choice. The caches of all verifiers on CPUs together keep their size. Unless plain, the chosen
    method alone remains, and its window moves to `speculation.window`."""
    chosen, target = plan.chosen, config.target
    config.mode = chosen.mode
    if target.gpus:
        _pin(config, plan.kinds)
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
