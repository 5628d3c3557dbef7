"""Memory need of a rollout, and whether it is available. Estimates in bytes, on the safe side."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from specactor_ray.cluster.address import is_connected
from specactor_ray.config.methods import DrafterSpec, acting_drafters, drafter_specs, inline_drafters, is_hosted
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.machine import gpu_memories
from specactor_ray.draft.proposer import footprint
from specactor_ray.models.cache_size import (
    GIB,
    available_bytes,
    beside_the_cache,
    cache_bytes,
    count_parameters,
    itemsize_of,
    room_on_cpu,
    room_on_gpu,
    states_beside_the_cache,
    usable_bytes,
)

PROCESS_BYTES = 0.35 * 2**30
"""Memory of Python, torch and Ray in one process."""
FIXES = "a smaller target.kv_cache_gb or target.replicas, or fewer drafters."


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the memory plan."""

    owner: str
    what: str
    num_bytes: float


def plan_rollout_memory(config: Config) -> list[MemoryItem]:
    """Peak memory of verifiers and draft actors."""
    target = config.target
    size, _ = count_parameters(target.model, target.trust_remote_code)
    ranks, cache = target.tensor_parallel, cache_bytes(target, room_on_cpu(available_bytes(), target))
    processes = 1 if ranks == 1 else 1 + ranks
    verifier = size * itemsize_of(target) + ranks * cache + processes * PROCESS_BYTES
    verifier += states_beside_the_cache(target, cache)
    plan = [MemoryItem("verifiers", f"{target.replicas} x (weights + cache)", target.replicas * verifier)]
    if config.mode is not ModeName.plain:
        plan += [_drafter_item(drafter, config) for drafter in drafter_specs(config).values() if drafter.replicas]
    return plan


def _drafter_item(drafter: DrafterSpec, config: Config) -> MemoryItem:
    target, held = config.target, footprint(drafter, config.target, None)
    if is_hosted(drafter, config.mode):
        return MemoryItem("verifiers", f"{target.replicas} x {drafter.method}", target.replicas * held)
    held += PROCESS_BYTES
    return MemoryItem("draft actors", f"{drafter.replicas} x {drafter.method}", drafter.replicas * held)


def with_cache(config: Config) -> Config:
    """A copy with `target.kv_cache_gb` set, if it is not set and the device is known on this machine. A ConfigError if
    the GPU cannot hold the model, or cannot hold it beside the configured cache; or that of a draft actor cannot."""
    target, specs = config.target, drafter_specs(config)
    memories = gpu_memories() if config.cluster.address == "local" and not is_connected() else []
    for one in acting_drafters(config) if memories else ():
        if one.gpus and (held := footprint(specs[one.method], target, min(memories))) > usable_bytes(min(memories)):
            problem = f"{one.model} with its cache and graphs takes {gib(held)}; a GPU has {gib(min(memories))}."
            key = f"drafters.{config.drafters.index(one)}.gpus"
            raise ConfigError(key, problem, "use a smaller kv_cache_gb or max_batch of the drafter, or another model.")
    if not target.gpus:
        room = room_on_cpu(available_bytes() if _judged(config) else float("inf"), target)
    elif memories:
        hosted = sum(footprint(specs[one.method], target, min(memories)) for one in inline_drafters(config))
        room = _require_room_on_gpu(config, min(memories), hosted)
    else:
        return config
    filled = copy.deepcopy(config)
    filled.target.kv_cache_gb = cache_bytes(target, room) / GIB
    return filled


def _require_room_on_gpu(config: Config, total: float, hosted: float) -> float:
    """`room_on_gpu`, checked against the configured cache."""
    target, room = config.target, room_on_gpu(config.target, total, hosted)
    own, beside = (target.kv_cache_gb or 0.0) * GIB, beside_the_cache(target) + hosted
    if room > own:
        return room
    cache = f" beside a cache of {gib(own)}" if own else ""
    problem = (
        f"{target.model} in {target.dtype} with activations, graphs and hosted drafters takes {gib(beside)} of each "
        f"GPU{cache}, and a GPU has {gib(total)}."
    )
    if room > 0:
        raise ConfigError("target.kv_cache_gb", problem, f"use {room / GIB:.3g} or less.")
    smaller = "a smaller target.max_step_tokens, or target.backend=vllm with " if target.backend == "hf" else ""
    more = ", or a smaller kv_cache_gb or max_batch of hosted drafters" if hosted else ""
    raise ConfigError("target.gpus", problem, f"use {smaller}a larger target.tensor_parallel (and gpus){more}.")


def require_memory(config: Config) -> None:
    """Refuse a rollout that cannot fit this machine."""
    if _judged(config):
        check_memory(config, plan_rollout_memory(config), available_bytes(), FIXES)


def _judged(config: Config) -> bool:
    """Whether the memory can be checked here, which excludes other machines and GPUs."""
    return not (config.target.gpus or config.trainer.gpus) and config.cluster.address == "local"


def check_memory(config: Config, plan: Sequence[MemoryItem], available: float, fix: str) -> None:
    """Refuse a run on this machine's CPU if its plan needs more than the bytes that are available, with a ConfigError
    that has the numbers and the fix."""
    total = sum(item.num_bytes for item in plan)
    if total > available and _judged(config):
        items = "; ".join(f"{item.owner}, {item.what}: {gib(item.num_bytes)}" for item in plan)
        problem = f"the run needs about {gib(total)} ({items}), and {gib(available)} are free."
        raise ConfigError("memory", problem, fix)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
