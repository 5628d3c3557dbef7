"""How much memory a rollout will take, and whether that is there. Estimates in bytes, on the safe side."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.config.schema import Config, DrafterConfig, ModeName, TargetConfig
from specactor_ray.draft.registry import reads_head
from specactor_ray.errors import ConfigError
from specactor_ray.models.loading import load_empty_model, parse_dtype

PROCESS_BYTES = 0.35 * 2**30
"""Python, torch and Ray of one process."""
FIXES = "a smaller target.kv_cache_gb or target.replicas, or fewer drafters."


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the plan."""

    owner: str
    what: str
    num_bytes: float


@functools.cache
def count_parameters(name: str, trust_remote_code: bool = False) -> tuple[int, Any]:
    """Number of parameters of a model and its text configuration; no weight is read. Counted once per process."""
    model = load_empty_model(name, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model.config.get_text_config()


def plan_rollout_memory(config: Config) -> list[MemoryItem]:
    """What verifiers and draft actors will hold at their peak."""
    target = config.target
    size, _ = count_parameters(target.model, target.trust_remote_code)
    processes = 1 if target.tensor_parallel == 1 else 1 + target.tensor_parallel
    verifier = size * parse_dtype(target.dtype).itemsize + target.kv_cache_gb * 2**30 + processes * PROCESS_BYTES
    plan = [MemoryItem("verifiers", f"{target.replicas} x (weights + cache)", target.replicas * verifier)]
    if config.mode is not ModeName.plain:
        plan += [_drafter_item(drafter, config) for drafter in config.drafters if drafter.replicas]
    return plan


def _drafter_item(drafter: DrafterConfig, config: Config) -> MemoryItem:
    target, held = config.target, _held_by(drafter, config.target)
    if config.mode is ModeName.coupled:
        return MemoryItem(
            "verifiers", f"{target.replicas} x {drafter.method}", target.replicas * (held - PROCESS_BYTES)
        )
    return MemoryItem("draft actors", f"{drafter.replicas} x {drafter.method}", drafter.replicas * held)


def _held_by(drafter: DrafterConfig, target: TargetConfig) -> float:
    """Bytes of one draft actor."""
    if not drafter.model:
        return PROCESS_BYTES
    if reads_head(drafter.method):
        size = sum(parameter.numel() for parameter in empty_head(drafter, target).parameters())
    else:
        size, _ = count_parameters(drafter.model, drafter.trust_remote_code)
    return PROCESS_BYTES + size * parse_dtype(drafter.dtype).itemsize + drafter.kv_cache_gb * 2**30


def empty_head(drafter: DrafterConfig, target: TargetConfig) -> Any:
    """The drafter's EAGLE head without its weights."""
    import torch

    from specactor_ray.draft.eagle.checkpoint import read_head_config
    from specactor_ray.draft.eagle.head import EagleHead

    assert drafter.model is not None  # validated
    config = read_head_config(drafter.model, target.model, trust_remote_code=target.trust_remote_code)
    with torch.device("meta"):
        return EagleHead(config)


def available_bytes() -> float:
    """Memory of this machine that is free for use, within the limit of its container."""
    import psutil

    free = float(psutil.virtual_memory().available)
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as used,
        ):
            free = min(free, float(limit.read()) - float(used.read()))
    except (OSError, ValueError):
        pass
    return free


def require_memory(config: Config) -> None:
    """Refuse a rollout that cannot fit this machine.

    Raises:
        ConfigError: The numbers are in the message.
    """
    if _judged(config):
        check_memory(config, plan_rollout_memory(config), available_bytes(), FIXES)


def require_caches(config: Config) -> None:
    """Refuse caches that cannot fit this machine, whatever the weights take; no model is read.

    Raises:
        ConfigError: The numbers are in the message.
    """
    target = config.target
    plan = [MemoryItem("verifiers", f"{target.replicas} x cache", target.replicas * target.kv_cache_gb * 2**30)]
    for drafter in config.drafters if config.mode is not ModeName.plain else ():
        copies = target.replicas if config.mode is ModeName.coupled else drafter.replicas
        if drafter.model and copies:
            held = copies * drafter.kv_cache_gb * 2**30
            plan.append(MemoryItem("drafters", f"{copies} x cache of {drafter.method}", held))
    check_memory(config, plan, available_bytes(), FIXES)


def _judged(config: Config) -> bool:
    """Other machines' memory and that of GPUs is not known here."""
    return not (config.target.gpus or config.trainer.gpus) and config.cluster.address == "local"


def check_memory(config: Config, plan: Sequence[MemoryItem], available: float, fix: str) -> None:
    """Refuse a run on this machine's CPU that cannot fit.

    Args:
        config: What is about to run.
        plan: What it will hold.
        available: Bytes that are free.
        fix: Ways out, for the message.

    Raises:
        ConfigError: The plan needs more than there is; the numbers are in the message.
    """
    total = sum(item.num_bytes for item in plan)
    if total > available and _judged(config):
        items = "; ".join(f"{item.owner}, {item.what}: {gib(item.num_bytes)}" for item in plan)
        problem = f"the run needs about {gib(total)} ({items}), and {gib(available)} are free."
        raise ConfigError("memory", problem, fix)


def memory_lines(config: Config, plan: Sequence[MemoryItem] | None = None) -> list[str]:
    """What a run on this machine's CPU will hold (default: a rollout), and what is free now; no line for other runs."""
    if not _judged(config):
        return []
    needed = sum(item.num_bytes for item in plan or plan_rollout_memory(config))
    return [f"memory: about {gib(needed)} will be held, and {gib(available_bytes())} are free now"]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
