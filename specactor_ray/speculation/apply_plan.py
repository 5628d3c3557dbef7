"""From a plan to the configuration that runs it."""

from __future__ import annotations

import copy
import math

from specactor_ray.config.schema import Config, ModeName, PlanPolicy
from specactor_ray.errors import ConfigError
from specactor_ray.speculation.plan import Plan


def requests_of(config: Config) -> int:
    """B: the requests that all verifiers together run at once."""
    return config.target.replicas * config.target.max_batch


def devices_of(config: Config) -> int:
    """Cores (or GPUs) that the configuration takes as it is written."""
    target = config.target
    if target.gpus:
        verifiers = target.replicas * target.gpus
        drafters = sum(drafter.replicas * drafter.gpus for drafter in config.drafters)
    else:
        verifiers = target.replicas * target.cores
        drafters = math.ceil(sum(drafter.replicas * drafter.cores for drafter in config.drafters))
    return verifiers + (drafters if config.mode is ModeName.decoupled else 0)


def apply_plan(config: Config, plan: Plan) -> Config:
    """A copy of the configuration with the plan's choice in it, and `plan: fixed`, so that it is not planned again.

    Set are `mode`, `target.replicas`, `target.cores` (on CPUs), `target.max_batch`; unless plain, the chosen method
    alone is kept, with `replicas`, `cores`, room for the batch, and the plan's window as `speculation.window`. The
    memory of the verifiers' caches stays the same in all. A plain plan leaves `drafters` as they are: the mode uses
    none of them.

    Raises:
        ConfigError: The chosen method is not among the configured ones, or a verifier would span several GPUs.
    """
    chosen, resolved = plan.chosen, copy.deepcopy(config)
    target = resolved.target
    if target.gpus and chosen.verify_devices > 1:
        problem = f"the plan wants verifiers of {chosen.verify_devices} GPUs, and a model runs on one."
        raise ConfigError("plan", problem, "profile with --devices 1.")
    resolved.plan, resolved.mode = PlanPolicy.fixed, chosen.mode
    target.kv_cache_gb *= target.replicas / chosen.groups
    target.replicas, target.max_batch = chosen.groups, chosen.batch
    target.max_step_tokens = max(target.max_step_tokens, chosen.batch)
    if not target.gpus:
        target.cores = chosen.verify_devices
    if chosen.method is None:
        return resolved
    kept = [drafter for drafter in resolved.drafters if drafter.method == chosen.method]
    if not kept:
        problem = f"the plan chose {chosen.method}, which is not configured."
        raise ConfigError("drafters", problem, f"add it: 'drafters=[{{method: {chosen.method}}}]'.")
    drafter = kept[0]
    drafter.replicas, drafter.window = chosen.groups, None
    drafter.max_batch = max(drafter.max_batch, chosen.batch)
    if chosen.mode is ModeName.decoupled and not drafter.gpus:
        drafter.cores = max(chosen.draft_devices, 1)
    resolved.drafters = kept
    resolved.speculation.window = chosen.window
    return resolved
