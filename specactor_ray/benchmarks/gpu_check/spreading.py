"""Random models make nearly uniform distributions; these helpers give them the spread of a trained one."""

from __future__ import annotations

import torch
from torch import Tensor

ENTROPY_NATS = 1.0
"""Mean entropy at temperature 1 that random models are given: of the order of an instruction-tuned model's."""


def mean_entropy(logits: Tensor) -> float:
    """Mean entropy in nats of softmax(logits), (rows, V)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return float(-(logprobs.exp() * logprobs).sum(dim=-1).mean())


def spread_factor(logits: Tensor, entropy: float = ENTROPY_NATS) -> float:
    """What the logits (rows, V) have to be multiplied by for this mean entropy; by bisection."""
    logits, (low, high) = logits.float(), (1e-3, 1e3)
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if mean_entropy(middle * logits) > entropy else (low, middle)
    return (low * high) ** 0.5
