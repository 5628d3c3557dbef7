"""Variants of a comparison of modes: on CPUs every one on the same cores, drafters' cores included; on GPUs on those of
the verifiers alone, and on all of them, drafters' GPUs included."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.cluster.cores import draft_cores
from specactor_ray.config.accelerators import within
from specactor_ray.config.methods import acting_drafters, is_hosted
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.startup.machine import Machine, devices_of
from specactor_ray.startup.mode import give_gpus, models_on_cores, plan_config, settle


@dataclass(frozen=True)
class Variant:
    """One configuration to measure."""

    label: str
    """Mode and layout: `plain 1x2` is one verifier of two cores, `decoupled 1x1 + 1` adds a draft core."""
    batch: int
    """Requests that run at once for each verifier of the given configuration."""
    config: Config

    @property
    def total_cores(self) -> int:
        """Cores of verifiers and draft actors; hosted drafters take turns with the verifier on its cores."""
        return devices_of(self.config).cores

    def facts(self) -> dict[str, Any]:
        """Label, mode, batch and cores for a report."""
        mode = self.config.mode.value
        return {"variant": self.label, "mode": mode, "batch": self.batch, "total_cores": self.total_cores}


MODES = ("plain", "auto", "coupled", "decoupled", "fon")
"""Modes of the comparison: `auto` is what `specactor rollout` runs, with all draft methods; `fon` all draft methods
together, decoupled and coupled: Fastest-of-N, in races as set by `speculation.race`."""


def side_by_side(config: Config) -> tuple[Config, list[str]]:
    """The configuration of which variants are compared, and the plan in words. `mode: auto` becomes `decoupled`, with
    the layout as written but for a GPU of each draft model where there is room, or as planned with `profile`. Raises as
    `plan_config`."""
    machine = Machine.here()
    if config.mode is not ModeName.auto:
        return settle(config, machine)[0], []
    if config.profile is None:
        settled, _ = settle(config, machine, mode=ModeName.decoupled)
        if not (keys := give_gpus(settled, machine.devices(settled.cluster))):
            return settled, []
        for drafter, given in zip(settled.drafters, config.drafters, strict=True):
            drafter.dtype = given.dtype  # settled again, for its GPU
        lines = [f"{key}=1: a draft actor's model beside verifiers on GPUs" for key in keys]
        return settle(settled, machine, mode=ModeName.decoupled)[0], lines
    planned, plan = plan_config(config, machine, [ModeName.decoupled])
    return planned, plan.lines()


def auto_of(config: Config) -> Config:
    """The configuration that `rollout` runs in mode auto."""
    chosen = copy.deepcopy(config)
    chosen.mode = ModeName.auto
    return settle(chosen, Machine.here())[0]


def plan_variants(
    config: Config, modes: Sequence[str], batches: Sequence[int], auto: Config | None = None
) -> tuple[list[Variant], list[str]]:
    """The variants in the order they run: batch by batch, plain first; and a line for each one that is left out, since
    it cannot be measured or equals an earlier one. `auto`: what `rollout` runs; all variants get the cores that it
    takes.

    `decoupled` is the configuration as given, with each method of draft actors alone on all the draft cores (a hosted
    lookup alone is as in `coupled`); `fon` is the one with all of them. Plain and coupled verifiers get the drafters'
    cores on top of their own. Plain decoding may use the cores in the layout that suits it best: all cores in the given
    verifiers, as many verifiers more as the drafters' cores can hold (the batch is then shared out), or one core per
    verifier (and rank). With a target on GPUs, plain and coupled also run with as many verifiers more as the drafters'
    GPUs can hold, and `decoupled` needs one for each draft model.

    Raises:
        InputError: `modes` lacks plain, which the others are compared with, or `fon` has only one method to race.
        ConfigError: The drafters' cores cannot be shared out evenly, or a batch contradicts another key.
    """
    if "plain" not in modes:
        raise InputError("--modes must contain plain: the other modes are compared with it")
    if "fon" in modes and len(config.drafters) < 2:
        raise InputError("--modes: fon races draft methods, and fewer than two are in `drafters`")
    _reject_drafters_on_gpus(config)
    if auto is not None:
        config = with_cores_of(auto, config)
    variants, left_out = list[Variant](), list[str]()
    for batch in batches:
        found = list[Variant]()
        for mode in (mode for mode in MODES if mode in modes):
            for variant in _variants(config, mode, batch, auto or config, left_out):
                same = next((one for one in found if one.config == variant.config), None)
                if same is None:
                    validate(variant.config)
                    found.append(variant)
                else:
                    left_out.append(f"{variant.label}, batch {batch}: left out, it is the same as {same.label}")
        variants += found
    return variants, list(dict.fromkeys(left_out))


def with_cores_of(auto: Config, config: Config) -> Config:
    """A copy with all cores of mode `auto`: verifiers have those beyond what the variant uses."""
    chosen, target = copy.deepcopy(config), config.target
    more = devices_of(auto).cores - devices_of(config).cores
    share = more // target.replicas
    if not target.gpus and auto.target.replicas == target.replicas and more > 0 and more % target.replicas == 0:
        chosen.target.cores += share - share % target.tensor_parallel
    return chosen


def _variants(config: Config, mode: str, batch: int, auto: Config, left_out: list[str]) -> Iterator[Variant]:
    target = config.target
    all_cores = (target.replicas, target.cores + (0 if config.paced.device else _extra_cores(config)))
    if mode == "plain":
        more = () if config.paced.device else _more_verifiers(config, batch, mode, left_out)
        fewest = [] if target.gpus or config.paced.device else [(target.replicas, target.tensor_parallel)]
        for layout in dict.fromkeys([all_cores, *more, *fewest]):
            yield _variant(config, ModeName.plain, batch, "plain", layout)
    elif mode == "auto":
        own = (auto.target.replicas, auto.target.cores)
        yield _variant(
            auto, auto.mode, batch, "auto", own if config.profile or auto.mode is not ModeName.coupled else all_cores
        )
    elif mode == "fon":
        yield _variant(config, ModeName.decoupled, batch, "fon")
        if not config.paced.device:
            yield _variant(config, ModeName.coupled, batch, "fon coupled", all_cores)
    else:
        for number, drafter in enumerate(config.drafters):
            name = mode if len(config.drafters) == 1 else f"{mode} {drafter.method}"
            if mode == "coupled":
                for layout in [all_cores, *(_more_verifiers(config, batch, name, left_out) if target.gpus else ())]:
                    variant = _variant(config, ModeName.coupled, batch, name, layout)
                    variant.config.drafters = [one for one in variant.config.drafters if one.method == drafter.method]
                    yield variant
            elif number in models_on_cores(config) and drafter.hosted is None:
                left_out.append(f"{name}: left out, there is no GPU for {drafter.method} beside those of the verifiers")
            elif not is_hosted(drafter, config.mode):
                yield _variant(_method_alone(config, drafter), ModeName.decoupled, batch, name)
            else:
                left_out.append(f"{name}: left out, verifiers host {drafter.method}, so it is coupled")


def _variant(config: Config, mode: ModeName, batch: int, name: str, layout: tuple[int, int] | None = None) -> Variant:
    """The configuration in another mode and layout (verifiers, and cores of each), with room for as many requests."""
    replicas, cores = layout or (config.target.replicas, config.target.cores)
    chosen = copy.deepcopy(config)
    chosen.mode = mode
    chosen.run.name = None  # every variant is a run of its own
    chosen.target.replicas, chosen.target.cores = replicas, cores
    chosen.target.max_batch = -(-batch * config.target.replicas // replicas)
    chosen.target.record_margins = True  # so that a difference is distinguished from a near-tie
    beside = f" + {draft_cores(acting_drafters(config))}" if mode is ModeName.decoupled else ""
    gpus = f" on {devices_of(chosen).gpus} GPU(s)" if chosen.target.gpus else ""
    if config.paced.device:
        verifying, drafting = emulated_gpus(chosen)
        cores, beside = verifying // replicas, f" + {drafting}" if drafting else ""
    return Variant(f"{name} {replicas}x{cores}{beside}{gpus}", batch, chosen)


def emulated_gpus(config: Config) -> tuple[int, int]:
    """Emulated GPUs of the verifiers and of the draft actors, see `PacedConfig`."""
    models = sum(one.replicas for one in acting_drafters(config) if one.model)
    return config.target.replicas * config.paced.target_gpus, models * config.paced.drafter_gpus


def _method_alone(config: Config, drafter: DrafterConfig) -> Config:
    """One method alone with all the draft cores: as many draft actors as there are cores, or as it has."""
    if len(config.drafters) == 1:
        return config
    chosen = copy.deepcopy(config)
    alone = copy.deepcopy(drafter)
    cores = draft_cores(acting_drafters(config))
    alone.replicas = max(1, min(drafter.replicas, cores))
    alone.cores = float(max(1, cores // alone.replicas)) if cores else drafter.cores
    chosen.drafters = [alone]
    return chosen


def _reject_drafters_on_gpus(config: Config) -> None:
    for index, drafter in enumerate(config.drafters):
        if drafter.gpus and not config.target.gpus:
            problem = "only CPU cores are shared out among the variants; plain decoding would go without this GPU."
            raise ConfigError(f"drafters.{index}.gpus", problem, "use 0 in this benchmark, or target.gpus.")


def _extra_cores(config: Config) -> int:
    """Additional cores of each verifier when there are no drafters."""
    extra, rest = divmod(draft_cores(acting_drafters(config)), config.target.replicas)
    if rest:
        problem = f"{draft_cores(acting_drafters(config))} draft cores cannot be shared out evenly among the verifiers."
        fix = f"choose drafters with cores that are a multiple of target.replicas ({config.target.replicas})."
        raise ConfigError("drafters", f"{problem} Plain decoding on the same cores cannot be measured.", fix)
    if extra % config.target.tensor_parallel and not config.target.gpus:
        ranks = config.target.tensor_parallel
        problem = f"plain decoding gets {extra} draft core(s) on top, which {ranks} ranks cannot share evenly."
        raise ConfigError("drafters", problem, f"choose drafters with a multiple of {ranks} cores per verifier.")
    return extra


def _more_verifiers(config: Config, batch: int, name: str, left_out: list[str]) -> Iterator[tuple[int, int]]:
    """As many verifiers more as the draft actors' devices can hold: cores, or with a target on GPUs those."""
    target, drafters = config.target, acting_drafters(config)
    kind, each, taken = "cores", target.cores, draft_cores(drafters)
    if target.gpus:
        usable = [one for one in drafters if not one.accelerator or within(one.accelerator, target.accelerator)]
        kind, each, taken = "GPUs", target.gpus, sum(one.replicas * one.gpus for one in usable)
        if other := sum(one.replicas * one.gpus for one in drafters) - taken:
            left_out.append(f"{name} with {other} more GPU(s): left out, they are not of target.accelerator")
    more, rest = divmod(taken, each)
    replicas = target.replicas + more
    if more and not rest and batch * target.replicas % replicas == 0:
        yield replicas, target.cores
    elif more:
        why = f"{replicas} verifiers cannot share {batch * target.replicas} requests evenly"
        why = f"{each} {kind} a verifier leave {rest} of the drafters' {kind} over" if rest else why
        left_out.append(f"{name} {replicas}x{target.cores}, batch {batch}: left out, {why}")
