"""Forwards of policy and reference are compared at load with transformers' eager forward in evaluation mode, whatever
else is in the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.learner.batching import Sample, collate
from specactor_ray.learner.engine import PolicyModel
from specactor_ray.models.loading import wrong_value_errors
from specactor_ray.models.probe import eager_logprobs, far_from, probe_model


def attend_as_in_eager_mode(policy: PolicyModel) -> None:
    """Give a loaded policy eager attention if its own form leaves something out: SDPA has no soft cap of scores, and
    what else differs shows in a comparison, of a sequence alone, beside a longer one and beside a shorter one.
    ModelLoadError: with eager attention, too, a sequence has other log-probabilities than in transformers."""
    model = policy.model
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    try:
        found = _difference(policy)
        if found and model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
            found = _difference(policy)
    except torch.OutOfMemoryError:
        raise
    except wrong_value_errors() as error:
        found = f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if found:
        raise ModelLoadError(
            f"{type(model).__name__} does not give the log-probabilities of transformers in a micro-batch of the "
            f"trainer: {found}. Fix: train another model"
        )


def _difference(policy: PolicyModel) -> str:
    """Where the policy differs from transformers by more than rounding explains; empty if it does not."""
    long = probe_model(policy.model)
    tokens = long.token_ids[::-1][: max(len(long.token_ids) // 3, 2)].copy()
    short = long._replace(token_ids=tokens, logprobs=eager_logprobs(policy.model, tokens))
    exact = policy.model.dtype == torch.float32
    (alone,) = _logprobs(policy, [long.token_ids])
    with_shorter, with_longer = _logprobs(policy, [long.token_ids, short.token_ids])
    for what, truth, found in (
        ("alone", long, alone),
        ("beside a shorter one", long, with_shorter),
        ("beside a longer one", short, with_longer),
    ):
        if far := far_from(truth, found, exact):
            return f"those of a sequence {what} differ by {far}"
    return ""


@torch.no_grad()
def _logprobs(policy: PolicyModel, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 `(n - 1,)` for each row of `n` tokens in one micro-batch: log-probabilities at temperature 1 of all its
    tokens but the first."""
    samples = [
        Sample(row[:1], row[1:], np.zeros(len(row) - 1, np.float32), 0.0, 0.0, np.ones(len(row) - 1, np.bool_))
        for row in (row.astype(np.int64) for row in rows)
    ]
    temperature, policy.temperature = policy.temperature, 1.0
    try:
        scores = policy(collate(samples, range(len(samples))).to(policy.model.device)).logprobs
    finally:
        policy.temperature = temperature
    return [found[: len(row) - 1].cpu().numpy() for found, row in zip(scores, rows, strict=True)]
