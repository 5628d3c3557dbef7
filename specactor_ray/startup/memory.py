"""Sizes of caches in place of `auto`, and whether verifiers and drafters fit their devices. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specactor_ray.config.methods import DrafterSpec, drafter_specs
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.config.training_schema import TrainerBackend
from specactor_ray.core.device import device_bytes
from specactor_ray.core.errors import ConfigError
from specactor_ray.draft.proposer import footprint
from specactor_ray.models.shapes import GIB, ITEM_BYTES, count_parameters
from specactor_ray.startup.machine import Machine
from specactor_ray.target.sizes import (
    asleep_bytes,
    cache_bytes,
    gib,
    require_room_on_gpu,
    room_on_cpu,
    room_on_gpu,
    states_beside_the_cache,
    usable_bytes,
)

PROCESS_BYTES = 0.35 * 2**30
"""Memory of Python, torch and Ray in one process."""
_OFFLOADED = 1 * GIB
"""Bytes that an offloaded rank of the trainer keeps on a shared GPU: its context and the workspaces of its kernels."""
_BUCKET_ELEMENTS = 500_000_000
"""Elements of a bucket in which DeepSpeed reduces gradients (`reduce_bucket_size`, its default)."""
FIXES = "a smaller target.kv_cache_gb or target.replicas, or fewer drafters."


# ---- caches ----


def settle_caches(config: Config, machine: Machine) -> None:
    """Set `kv_cache_gb` of target and drafters, where it is not set and their device is known here: a GPU of another
    cluster is known on its node only (`target_on_node`, `drafter_on_node`).

    Raises:
        ConfigError: A GPU cannot hold the target's model, or cannot hold it beside the configured cache; or cannot hold
            that of a draft actor.
    """
    target, gpu, hosted = config.target, None, kept_by_trainer(config)
    if machine.hosts(config.cluster) and machine.gpu_bytes:
        gpu = min(machine.gpu_bytes)
    for drafter, spec in zip(config.drafters, drafter_specs(config).values(), strict=False):  # mode plain uses none
        if not spec.model or (spec.on_gpu and gpu is None):
            continue
        cache, held = footprint(spec, target, gpu if spec.on_gpu else None)
        drafter.kv_cache_gb = cache / GIB
        if spec.hosted:
            hosted += held * (spec.replicas > 0)
        elif spec.on_gpu and gpu is not None and held > usable_bytes(gpu):
            problem = f"{spec.model} with its cache and graphs takes {gib(held)}; a GPU has {gib(gpu)}."
            fix = "use a smaller kv_cache_gb or max_batch of the drafter, or another model."
            raise ConfigError(f"{spec.key}.gpus", problem, fix)
    if not target.gpus:
        free = machine.free_bytes if _judged(config) else float("inf")
        target.kv_cache_gb = cache_bytes(target, room_on_cpu(target, free)) / GIB
    elif gpu is not None:
        target.kv_cache_gb = cache_bytes(target, require_room_on_gpu(target, gpu, hosted)) / GIB


def kept_by_trainer(config: Config) -> float:
    """Bytes on each verifier's GPU that a rank of the trainer keeps."""
    return _OFFLOADED if config.trainer.colocate else 0.0


def target_on_node(target: TargetConfig, hosted: Sequence[DrafterSpec], kept: float = 0.0) -> TargetConfig:
    """The section of a verifier, with a cache by the GPU of this node if it is not settled yet. `hosted`: drafters in
    the same process; `kept`: see `kept_by_trainer`."""
    if target.kv_cache_gb is not None or not target.gpus:
        return target
    total = device_bytes()
    room = room_on_gpu(target, total, kept + sum(footprint(one, target, total)[1] for one in hosted))
    return replace(target, kv_cache_gb=cache_bytes(target, room) / GIB)


def drafter_on_node(drafter: DrafterSpec, target: TargetConfig, device: str) -> DrafterSpec:
    """The record of a drafter, with a cache by the GPU of this node if it is not settled yet."""
    if drafter.kv_cache_gb is not None or not drafter.model:
        return drafter
    cache, _ = footprint(drafter, target, None if device == "cpu" else device_bytes())
    return replace(drafter, kv_cache_gb=cache / GIB)


# ---- plans ----


def plan_rollout_memory(config: Config) -> dict[str, float]:
    """Part of a run → its peak memory: verifiers and draft actors of a configuration with settled caches."""
    target = config.target
    size, _ = count_parameters(target.model, target.trust_remote_code)
    ranks, cache = target.tensor_parallel, (target.kv_cache_gb or 0.0) * GIB
    processes = 1 if ranks == 1 else 1 + ranks
    verifier = size * ITEM_BYTES[target.dtype] + ranks * cache + processes * PROCESS_BYTES
    verifier += states_beside_the_cache(target, cache)
    plan = {f"verifiers, {target.replicas} x (weights + cache)": target.replicas * verifier}
    for spec in drafter_specs(config).values():
        owner, number, process = (
            ("verifiers", target.replicas, 0.0) if spec.hosted else ("draft actors", spec.replicas, PROCESS_BYTES)
        )
        if spec.replicas:
            plan[f"{owner}, {number} x {spec.method}"] = number * (footprint(spec, target, None)[1] + process)
    return plan


def check_memory(config: Config, free: float, plan: Mapping[str, float], fix: str = FIXES) -> None:
    """Refuse a run on this machine's CPU if its plan needs more than the `free` bytes, with a ConfigError that has the
    numbers and the fix."""
    if _judged(config) and (total := sum(plan.values())) > free:
        items = "; ".join(f"{part}: {gib(size)}" for part, size in plan.items())
        problem = f"the run needs about {gib(total)} ({items}), and {gib(free)} are free."
        raise ConfigError("memory", problem, fix)


def check_turn_of_trainer(config: Config, machine: Machine, plan: Mapping[str, float]) -> None:
    """Refuse a GPU that cannot hold a rank of the trainer beside a sleeping verifier, with a ConfigError that has the
    numbers and the fix. `plan` has the parts of all ranks together. The turn of the verifiers is `settle_caches`'s."""
    if not (config.trainer.colocate and machine.gpu_bytes and machine.hosts(config.cluster)):
        return
    parts = {part: size / config.trainer.ranks for part, size in plan.items() if part.startswith("trainer, ")}
    parts |= {"trainer, context": _OFFLOADED, "a verifier asleep": asleep_bytes(config.target)}
    if config.trainer.backend is TrainerBackend.deepspeed:  # one for each data type of gradients
        sizes = {4, ITEM_BYTES[config.trainer.dtype]}
        parts["trainer, buckets of DeepSpeed"] = float(_BUCKET_ELEMENTS * sum(sizes))
    total, gpu = sum(parts.values()), min(machine.gpu_bytes)
    if total > usable_bytes(gpu):
        items = "; ".join(f"{part}: {gib(size)}" for part, size in parts.items())
        usable = f"{gib(usable_bytes(gpu))} of {gib(gpu)} are usable"
        problem = f"an update takes {gib(total)} of each GPU ({items}), and {usable}."
        fix = (
            "use a smaller trainer.micro_batch_tokens, trainer.gradient_checkpointing=true, algorithm.kl_coef=0, more "
            "ranks (trainer.backend=deepspeed), or GPUs of the trainer's own (trainer.colocate=false)."
        )
        raise ConfigError("trainer.colocate", problem, fix)


def _judged(config: Config) -> bool:
    """Whether the memory can be checked here, which excludes other machines and GPUs."""
    return not (config.target.gpus or config.trainer.gpus) and config.cluster.address == "local"
