"""Random models make nearly uniform distributions; this gives their logits the shape of a trained model's.

Scaling all logits alike would not do: with 150,000 Gaussian logits an entropy of 1 nat takes a standard deviation of 10
and top logits of 45, two or three times those of trained models, and the rounding errors of low precision grow with
them. A trained model has a bulk of small logits and few candidates far above it.
"""

from __future__ import annotations

import torch
from torch import Tensor

ENTROPY_NATS = 1.0
"""Mean entropy at temperature 1, of the order of an instruction-tuned model's."""
BULK_STD = 3.0
"""Standard deviation of the logits of ordinary tokens."""
_CANDIDATES = 256
"""Tokens whose logits are spread further, until the entropy is as wanted."""


def mean_entropy(logits: Tensor) -> float:
    """Mean entropy in nats of softmax(logits), (rows, V)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return float(-(logprobs.exp() * logprobs).sum(dim=-1).mean())


@torch.inference_mode()
def spread_head(weight: Tensor, logits: Tensor) -> dict[str, float]:
    """Scale the rows of an output layer in place.

    Args:
        weight: (V, H).
        logits: (rows, V) that it gives for a few random contexts.

    Returns:
        What was reached on these contexts: `entropy_nats`, `bulk_std` and `top_logit`, a mean over the rows.
    """
    factor = BULK_STD / float(logits.float().std())
    bulk = factor * logits.float()
    candidates = slice(0, None, max(len(weight) // _CANDIDATES, 8))

    def spread(further: float) -> Tensor:
        wider = bulk.clone()
        wider[:, candidates] *= further
        return wider

    low, high = 1.0, 100.0
    for _ in range(24):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if mean_entropy(spread(middle)) > ENTROPY_NATS else (low, middle)
    weight.mul_(factor)
    weight[candidates] *= high
    reached = spread(high)
    top = float(reached.amax(dim=-1).mean())
    return {"entropy_nats": mean_entropy(reached), "bulk_std": BULK_STD, "top_logit": top}
