"""`plan: auto`: from the profile and this machine to the configuration that runs. Asks no cluster anything."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

from specactor_ray.config.schema import Config, ModeName, PlanPolicy
from specactor_ray.config.validate import validate
from specactor_ray.errors import ConfigError
from specactor_ray.observability.environment import hardware, versions
from specactor_ray.speculation.apply_plan import apply_plan, devices_of, requests_of
from specactor_ray.speculation.candidates import Plan, Rejected
from specactor_ray.speculation.plan import ALL_MODES, search_plan
from specactor_ray.speculation.profile import Profile, load_profile, reject_foreign_profile
from specactor_ray.speculation.survival import Survival

logger = logging.getLogger(__name__)

MESSAGE_ROUND_TRIP_S = 0.003
"""What a commit and its answer take over Ray, 2 to 4 ms on two cores. The paper's equations have no
messages; without this, decoupled steps that wait for drafts would be promised time they do not have."""


def resolve_plan(config: Config, modes: Sequence[ModeName] = ALL_MODES) -> tuple[Config, list[str]]:
    """The configuration to run, and lines that say what was chosen; with `plan: fixed` as it is, and no line.

    Args:
        config: A checked configuration; not changed.
        modes: Modes the plan may choose.

    Raises:
        ConfigError, InputError: The profile cannot be used here, or nothing in it fits.
    """
    if config.plan is PlanPolicy.fixed:
        return config, []
    profile, warnings = usable_profile(config, config.plan_force)
    plan = make_plan(config, profile, devices_to_plan_for(config), requests_of(config), modes=modes)
    resolved = apply_plan(config, plan)
    validate(resolved)
    plain = [c.tokens_per_s for c in plan.candidates if c.mode is ModeName.plain]
    against = f" (plain: {max(plain):.1f})" if plain else ""
    line = f"plan: {plan.chosen.words()}, batch {plan.chosen.batch}; predicted {plan.chosen.tokens_per_s:.1f} tokens/s"
    return resolved, [*(f"warning: {warning}" for warning in warnings), *plan.notes, line + against]


def usable_profile(config: Config, force: bool) -> tuple[Profile, list[str]]:
    """The configured profile, checked against the target and this machine, and warnings.

    Raises:
        InputError: The file is missing, damaged or of another schema.
        ConfigError: It is of another model; or of other hardware or another torch, and not forced.
    """
    from specactor_ray.modeling.identity import gpu_name, model_identity

    if config.profile is None:
        raise ConfigError("profile", "is not set.", "name the file: profile=profile.json")
    profile, target = load_profile(config.profile), config.target
    device = "cuda" if target.gpus else "cpu"
    if profile.device != device:
        problem = f"{config.profile} was measured on {profile.device}, and target.gpus is {target.gpus}."
        raise ConfigError("profile", problem, "name a profile of the same kind of device.")
    here = {**hardware(), "gpu": gpu_name() if device == "cuda" else None}
    model = model_identity(target.model, target.dtype, target.trust_remote_code)
    return profile, reject_foreign_profile(profile, config.profile, model, here, versions(), force)


def ladder_priors(config: Config) -> dict[str, float]:
    """Draft method → chance that a draft token is right given that those before it are, as the configured profile says;
    nothing without a profile.

    Raises:
        ConfigError, InputError: The profile cannot be used here.
    """
    if config.profile is None or config.mode is ModeName.plain:
        return {}
    profile, _ = usable_profile(config, config.plan_force)
    priors = {}
    for drafter in config.drafters:
        survival = profile.acceptance.get(drafter.method)
        if survival is not None:
            priors[drafter.method] = survival.probability(drafter.window or config.speculation.window)
    return priors


def make_plan(
    config: Config,
    profile: Profile,
    devices: int,
    requests: int,
    *,
    context: float | None = None,
    acceptance: float | None = None,
    modes: Sequence[ModeName] = ALL_MODES,
    paper: bool = False,
) -> Plan:
    """Plan with the draft methods that are both configured and measured.

    Args:
        config: Its drafters are the methods to choose from.
        profile: Costs and acceptance.
        devices: G.
        requests: B.
        context: Mean tokens of prompt and output. Default: the profile's prompts and half of sampling.max_tokens.
        acceptance: p of every method, in place of what was measured.
        modes: Modes that may be chosen.
        paper: The paper's equations as they stand: messages take no time, decoupled verifiers never wait for drafts.

    Raises:
        InputError: Nothing that was measured fits.
    """
    usable, unusable = _methods(config, profile)
    survival = {m: s for m, s in profile.acceptance.items() if m in usable}
    if acceptance is not None:
        survival = dict.fromkeys(usable, Survival.constant(acceptance))
    plan = search_plan(
        profile.verify,
        {method: profile.drafting[method] for method in usable},
        survival,
        devices=devices,
        requests=requests,
        context=profile.prompt_tokens + config.sampling.max_tokens / 2 if context is None else context,
        modes=modes,
        round_trip_s=0.0 if paper else MESSAGE_ROUND_TRIP_S,
        waits=not paper,
    )
    return replace(plan, rejected=(*unusable, *plan.rejected))


def devices_to_plan_for(config: Config) -> int:
    """`plan_devices`, or all devices of a local cluster, or as many as the configuration takes on another one.

    Raises:
        ConfigError: More are asked for than a local cluster has.
    """
    return checked_devices(config, config.plan_devices, "plan_devices")


def checked_devices(config: Config, wanted: int | None, key: str) -> int:
    """As `devices_to_plan_for`, for a number that was given as `key`."""
    existing = _existing_devices(config)
    if existing is None:
        return devices_of(config) if wanted is None else wanted
    if wanted is not None and wanted > existing:
        kind = "GPU(s)" if config.target.gpus else "core(s)"
        problem = f"the plan may use {wanted} {kind}, and there are {existing}."
        raise ConfigError(key, problem, f"use {existing} or fewer, or name a bigger cluster in cluster.address.")
    return existing if wanted is None else wanted


def _existing_devices(config: Config) -> int | None:
    """Devices of a cluster that would be started here; None for one that runs elsewhere."""
    cluster = config.cluster
    if cluster.address != "local":
        return None
    if not config.target.gpus:
        return cluster.num_cpus or len(os.sched_getaffinity(0))
    if cluster.num_gpus is not None:
        return cluster.num_gpus
    from specactor_ray.modeling.identity import count_gpus

    return count_gpus()


def _methods(config: Config, profile: Profile) -> tuple[list[str], list[Rejected]]:
    """Configured methods the profile speaks of, and the others with the reason."""
    from specactor_ray.modeling.identity import method_identity, same_method

    usable, unusable = [], []
    for drafter in config.drafters:
        entry = profile.data["methods"].get(drafter.method)
        if entry is None:
            reason = "the profile does not have it; measure again with it configured"
        elif not same_method(entry["identity"], method_identity(drafter)):
            reason = "the profile was measured with another model or other settings of it"
        else:
            usable.append(drafter.method)
            continue
        logger.warning("plan: %s is left out: %s", drafter.method, reason)
        unusable += [
            Rejected(mode, drafter.method, 0, 0, "not measured", reason)
            for mode in (ModeName.coupled, ModeName.decoupled)
        ]
    return usable, unusable
