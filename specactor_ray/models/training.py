"""Gradient checkpointing that computes what transformers computes in evaluation mode."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from specactor_ray.core.errors import ModelLoadError


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of decoder layers for the backward pass (gradient checkpointing).

    The model stays in evaluation mode: transformers' own switch needs training mode, which turns dropout and the noise
    of routers on, so that the update is not that of the policy that the rollout ran.

    Raises:
        ModelLoadError: The model has no layers that can be computed again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelLoadError(
            f"{type(model).__name__} does not support gradient checkpointing. Fix: trainer.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
