"""Proof of an update: an engine computes with new weights what transformers computes with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specactor_ray.core.errors import WeightsError
from specactor_ray.target.base import TargetEngine
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)
_NAMED = 3


def prove(engine: TargetEngine, weights: WeightSet, state_dict: Mapping[str, Any]) -> None:
    """Compare the engine, which has just loaded these weights, with their probe, and tensor by tensor where it can read
    its own. Raises WeightsError, with the names of tensors that did not arrive."""
    if weights.probe is None:
        return
    count = min(len(weights.probe.token_ids), engine.max_model_len - 1)
    gap = weights.probe.gap(engine.prompt_logprobs(weights.probe.token_ids[:count]))
    stale = engine.stale_weights(state_dict)
    logger.info("weights %d: %.3g nats from transformers on average", weights.version, gap)
    if gap <= weights.probe.tolerance and not stale:  # the former is false for NaN
        return
    more = f" and {len(stale) - _NAMED} more" if stale[_NAMED:] else ""
    where = f"; not loaded: {', '.join(stale[:_NAMED])}{more}" if stale else ""
    raise WeightsError(
        f"weights of version {weights.version} did not arrive: the engine's log-probabilities differ by {gap:.3g} nats "
        f"on average from transformers' with them, and rounding explains {weights.probe.tolerance:.3g}{where}. "
        "Fix: serve this model with the other target.backend"
    )
