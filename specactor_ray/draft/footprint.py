"""Memory of a drafter beside its process: weights and cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specactor_ray.config.methods import reads_head
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.models.cache_size import count_parameters, drafter_cache_bytes
from specactor_ray.models.loading import parse_dtype


def footprint(drafter: DrafterConfig, target: TargetConfig, total: float | None) -> float:
    """Bytes of one drafter; 0 without a model.

    Args:
        drafter: Its record; its data type is resolved.
        target: The target that it drafts for.
        total: Bytes of its GPU; None on the CPU.
    """
    if not drafter.model:
        return 0.0
    if reads_head(drafter.method):
        head = empty_head(drafter, target)
        size, text = sum(parameter.numel() for parameter in head.parameters()), head_text(head)
    else:
        size, text = count_parameters(drafter.model, drafter.trust_remote_code)
    itemsize = parse_dtype(drafter.dtype, total is not None).itemsize
    return float(size * itemsize + drafter_cache_bytes(drafter, text, itemsize, total))


def head_text(head: Any) -> Any:
    """The configuration of an EAGLE head's layers in the form of a model's."""
    return SimpleNamespace(**{**head.config.layer, "num_hidden_layers": len(head.layers)})


def empty_head(drafter: DrafterConfig, target: TargetConfig) -> Any:
    """The drafter's EAGLE head without its weights."""
    import torch

    from specactor_ray.draft.eagle.checkpoint import read_head_config
    from specactor_ray.draft.eagle.head import EagleHead

    assert drafter.model is not None  # validated
    config = read_head_config(drafter.model, target.model, trust_remote_code=target.trust_remote_code)
    with torch.device("meta"):
        return EagleHead(config)
