"""The configuration that a plan stands for."""

from __future__ import annotations

import copy

from specactor_ray.config.schema import Config, ModeName, PlanPolicy
from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.search import Plan


def requests_of(config: Config) -> int:
    """B: number of requests that all verifiers together run at once."""
    return config.target.replicas * config.target.max_batch


def apply_plan(config: Config, plan: Plan) -> Config:
    """A copy of the configuration with the plan's choice and `plan: fixed`, so that it is not planned again.

    Sets `mode`, `target.replicas`, `target.cores` (on CPUs), `target.max_batch`, `target.max_step_tokens` and, where it
    is set, `target.kv_cache_gb`; the caches of all verifiers on CPUs together keep their size. Unless plain, it keeps
    the chosen method alone, with its `replicas`, `max_batch` and (decoupled, on CPUs) `cores`, and moves the window to
    `speculation.window`. A plain plan leaves `drafters` as they are: the mode uses none of them.

    Raises:
        ConfigError: The chosen method is not among the configured ones, or a verifier would span several GPUs.
    """
    chosen, resolved = plan.chosen, copy.deepcopy(config)
    target = resolved.target
    if target.gpus and chosen.verify_devices > 1:
        problem = f"the plan wants verifiers of {chosen.verify_devices} GPUs, and a model runs on one."
        raise ConfigError("plan", problem, "profile with --devices 1.")
    resolved.plan, resolved.mode = PlanPolicy.fixed, chosen.mode
    if target.kv_cache_gb and not target.gpus:
        target.kv_cache_gb *= target.replicas / chosen.verifiers
    target.replicas, target.max_batch = chosen.verifiers, chosen.batch
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
    drafter.replicas, drafter.window = chosen.drafters or chosen.verifiers, None
    most = -(-plan.batch // drafter.replicas)
    drafter.max_batch = drafter.max_batch and max(drafter.max_batch, most)
    if chosen.mode is ModeName.decoupled:
        drafter.hosted = False if chosen.draft_devices else None
        if not drafter.gpus:
            drafter.cores = max(chosen.draft_devices, 1)
    resolved.drafters = kept
    resolved.speculation.window = chosen.window
    return resolved
