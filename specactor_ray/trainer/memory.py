"""Memory need of a training run. Estimates in bytes, on the safe side."""

from __future__ import annotations

from typing import Any

from specactor_ray.config.methods import taught_by_trainer
from specactor_ray.config.schema import Config, DrafterConfig, TargetConfig
from specactor_ray.draft.footprint import empty_head
from specactor_ray.models.cache_size import count_parameters, itemsize_of
from specactor_ray.rollout.memory import PROCESS_BYTES, MemoryItem, plan_rollout_memory

_FLOAT32 = 4
FIXES = (
    "a smaller trainer.micro_batch_tokens, target.kv_cache_gb or target.replicas, "
    "trainer.gradient_checkpointing=true, or algorithm.kl_coef=0."
)


def plan_memory(config: Config) -> list[MemoryItem]:
    """Peak memory of each part of the run."""
    target, trainer = config.target, config.trainer
    size, text = count_parameters(target.model, target.trust_remote_code)
    plan = plan_rollout_memory(config)
    pupil = taught_by_trainer(config)
    if pupil is not None:
        plan.append(MemoryItem("trainer", f"learning of {pupil.method}", _held_by_learner(pupil, target)))
    # Weights, gradients and two moments in float32; ZeRO spreads them (stage 3 all, below only the moments).
    states = 4 * size * _FLOAT32 * 1.0 + trainer.ranks * PROCESS_BYTES
    if trainer.ranks > 1 and trainer.zero_stage < 3:
        states += (trainer.ranks - 1) * 2 * size * _FLOAT32
    plan.append(MemoryItem("trainer", "weights, gradients, moments", states))
    if config.algorithm.kl_coef:
        plan.append(MemoryItem("trainer", "reference model", trainer.ranks * size * _FLOAT32))
    plan.append(MemoryItem("trainer", "activations", trainer.ranks * _activation_bytes(config, text)))
    # The version in the object store, and the next one while it is sent.
    plan.append(MemoryItem("object store", "two versions of the weights", 2.0 * size * itemsize_of(target)))
    return plan


def _held_by_learner(drafter: DrafterConfig, target: TargetConfig) -> float:
    """Bytes of a head, of gradients and moments of all but its embedding, and of its hidden states, in float32."""
    head = empty_head(drafter, target)
    size = sum(parameter.numel() for parameter in head.parameters())
    trained = size - head.embed_tokens.weight.numel()
    states = drafter.online.buffer_tokens * head.config.feature_size
    return float(_FLOAT32 * (size + 3 * trained + states))


def _activation_bytes(config: Config, text: Any) -> float:
    """Bytes of one micro-batch: about 34 hidden-sized values per token and layer (Korthikanti et al. 2022, arXiv
    2205.05198, eq. 1, in float32 twice their bytes), and four copies of the logits of its output tokens."""
    tokens = config.trainer.micro_batch_tokens
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    per_layer = 2 if config.trainer.gradient_checkpointing else 34
    logits = 4.0 * tokens * int(text.vocab_size) * _FLOAT32
    return float(per_layer * layers * hidden * tokens * _FLOAT32 / 2 + logits)
