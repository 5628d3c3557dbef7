"""Proof of an engine: it computes with its weights what transformers computes with them, after the load of a model and
after each update."""

from __future__ import annotations

import logging

import numpy as np

from specactor_ray.core.errors import WeightsError
from specactor_ray.core.types import Probe
from specactor_ray.target.base import TargetEngine

logger = logging.getLogger(__name__)


def prove(engine: TargetEngine, probe: Probe | None, what: str) -> None:
    """Compare the engine, which has just loaded weights, with their probe. WeightsError: it computes something else;
    the message begins with `what`."""
    count = min(len(probe.token_ids), engine.max_model_len - 1) if probe is not None else 0
    if probe is None or count < 2:
        return
    found = engine.prompt_logprobs(probe.token_ids[:count])
    gap = probe.gap(found)
    logger.info("%s: %.3g nats from transformers on average, %.3g is rounding", what, gap, probe.tolerance)
    if gap <= probe.tolerance:  # false for NaN
        return
    apart = np.flatnonzero(~(np.abs(found - probe.logprobs[: len(found)]) <= 10 * probe.tolerance))
    begin = f", from token {apart[0] + 1} of {count} on" if len(apart) and apart[0] else ""
    raise WeightsError(
        f"{what}: the engine's log-probabilities differ by {gap:.3g} nats on average from transformers' with the same "
        f"weights{begin}, and rounding explains {probe.tolerance:.3g}. Fix: serve this model with the other "
        "target.backend"
    )
