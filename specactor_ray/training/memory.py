"""How much memory a training run will take, and whether that is there. Estimates in bytes, on the safe side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.config.inline import is_inline
from specactor_ray.config.lending import lendable_methods
from specactor_ray.config.online import OnlineConfig, OnlineWhere
from specactor_ray.config.schema import Config, DrafterConfig, ModeName, TargetConfig, reads_features
from specactor_ray.errors import ConfigError
from specactor_ray.modeling.loading import load_empty_model, parse_dtype

_FLOAT32 = 4
_PROCESS = 0.35 * 2**30
"""Python, torch and Ray of one actor."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the plan."""

    owner: str
    what: str
    num_bytes: float


def count_parameters(name: str, trust_remote_code: bool = False) -> tuple[int, Any]:
    """Number of parameters of a model and its text configuration; no weight is read."""
    model = load_empty_model(name, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model.config.get_text_config()


def plan_memory(config: Config) -> list[MemoryItem]:
    """What each part of the run will hold at its peak."""
    target, trainer = config.target, config.trainer
    size, text = count_parameters(target.model, target.trust_remote_code)
    item = parse_dtype(target.dtype).itemsize
    verifier = size * item + target.kv_cache_gb * 2**30 + _PROCESS
    plan = [MemoryItem("verifiers", f"{target.replicas} x (weights + cache)", target.replicas * verifier)]
    if config.mode is not ModeName.plain:
        plan += [_drafter_item(drafter, config) for drafter in config.drafters if drafter.replicas]
        plan += _lent_items(config)
        plan += _learner_items(config)
    # Weights, gradients and two moments in float32; ZeRO spreads them (stage 3 all, below only the moments).
    states = 4 * size * _FLOAT32 * 1.0 + trainer.ranks * _PROCESS
    if trainer.ranks > 1 and trainer.zero_stage < 3:
        states += (trainer.ranks - 1) * 2 * size * _FLOAT32
    plan.append(MemoryItem("trainer", "weights, gradients, moments", states))
    if config.algorithm.kl_coef:
        plan.append(MemoryItem("trainer", "reference model", trainer.ranks * size * _FLOAT32))
    plan.append(MemoryItem("trainer", "activations", trainer.ranks * _activation_bytes(config, text)))
    # The version in the object store, and the next one while it is handed over.
    plan.append(MemoryItem("object store", "two versions of the weights", 2.0 * size * item))
    return plan


def _drafter_item(drafter: DrafterConfig, config: Config) -> MemoryItem:
    target, held = config.target, _held_by(drafter, config.target)
    if is_inline(config, drafter):
        return MemoryItem("verifiers", f"{target.replicas} x {drafter.method}", target.replicas * (held - _PROCESS))
    return MemoryItem("draft actors", f"{drafter.replicas} x {drafter.method}", drafter.replicas * held)


def _learner_items(config: Config) -> list[MemoryItem]:
    """Who learns a head online, where one does."""
    items = []
    for drafter in config.drafters:
        online = drafter.online
        if online.where is OnlineWhere.trainer or (online.where is OnlineWhere.drafter and drafter.replicas):
            owner = "trainer" if online.where is OnlineWhere.trainer else "draft actors"
            held = _held_by_learner(drafter, online, config.target)
            items.append(MemoryItem(owner, f"learning of {drafter.method}", held))
    return items


def _lent_items(config: Config) -> list[MemoryItem]:
    """At the tail all verifiers but one may sleep, without their caches, with a draft actor each on their seats."""
    methods = lendable_methods(config)
    held = [_held_by(drafter, config.target) for drafter in config.drafters if drafter.method in methods]
    more = max(held, default=0.0) - config.target.kv_cache_gb * 2**30
    lent = config.target.replicas - 1
    return [MemoryItem("draft actors", f"{lent} x on seats of verifiers", lent * more)] if held and more > 0 else []


def _held_by(drafter: DrafterConfig, target: TargetConfig) -> float:
    """Bytes of one draft actor."""
    if not drafter.model:
        return _PROCESS
    if reads_features(drafter):
        size = sum(parameter.numel() for parameter in _empty_head(drafter, target).parameters())
    else:
        size, _ = count_parameters(drafter.model, drafter.trust_remote_code)
    return _PROCESS + size * parse_dtype(drafter.dtype).itemsize + drafter.kv_cache_gb * 2**30


def _held_by_learner(drafter: DrafterConfig, online: OnlineConfig, target: TargetConfig) -> float:
    """Bytes of a copy of the head with gradients and two moments in float32, and of the hidden states that are kept."""
    head = _empty_head(drafter, target)
    size = sum(parameter.numel() for name, parameter in head.named_parameters() if name != "embed_tokens.weight")
    states = 2 * online.buffer_tokens * head.config.feature_size * parse_dtype(target.dtype).itemsize
    return float(4 * size * _FLOAT32 + states)


def _empty_head(drafter: DrafterConfig, target: TargetConfig) -> Any:
    """The drafter's EAGLE head without its weights."""
    import torch

    from specactor_ray.modeling.eagle_checkpoint import read_head_config
    from specactor_ray.modeling.eagle_head import EagleHead

    assert drafter.model is not None  # validated
    config = read_head_config(drafter.model, target.model, trust_remote_code=target.trust_remote_code)
    with torch.device("meta"):
        return EagleHead(config)


def _activation_bytes(config: Config, text: Any) -> float:
    """Of one micro-batch: about 34 hidden-sized values per token and layer (Korthikanti et al. 2022, arXiv 2205.05198,
    eq. 1, in float32 twice their bytes), and four copies of the logits of its output tokens."""
    tokens = config.trainer.micro_batch_tokens
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    per_layer = 2 if config.trainer.gradient_checkpointing else 34
    logits = 4.0 * tokens * int(text.vocab_size) * _FLOAT32
    return float(per_layer * layers * hidden * tokens * _FLOAT32 / 2 + logits)


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


def check_memory(config: Config, plan: Sequence[MemoryItem], available: float) -> None:
    """Refuse a run on this machine's CPU that cannot fit.

    Raises:
        ConfigError: The plan needs more than there is; the numbers are in the message.
    """
    if config.target.gpus or config.trainer.gpus or config.cluster.address != "local":
        return  # other machines' memory: shown, not judged
    total = sum(item.num_bytes for item in plan)
    if total > available:
        lines = "\n".join(f"  {item.owner:<14} {item.what:<32} {gib(item.num_bytes)}" for item in plan)
        problem = f"the run needs about {gib(total)}, and {gib(available)} are free.\n{lines}\n"
        fix = (
            "a smaller trainer.micro_batch_tokens, target.kv_cache_gb or target.replicas, "
            "trainer.gradient_checkpointing=true, or algorithm.kl_coef=0."
        )
        raise ConfigError("memory", problem, fix)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
