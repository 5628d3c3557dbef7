"""Whether sampled tokens come from the target's own distribution, computed anew in float64 from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from specactor_ray.core.types import SamplingParams

ALPHA = 1e-4
"""Tests are seeded, so one that passes goes on passing."""


def assert_sampled_from(
    model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: SamplingParams
) -> None:
    """Every sampled token, placed within the cumulative distribution that it was to be drawn from, must give uniform
    numbers (the probability integral transform; ties within a token are broken at random): once with tokens in order
    of their ids, once of their probabilities.

    Args:
        model: A transformers model.
        sequences: `(prompt, output)` pairs.
        sampling: Temperature, top-k and top-p that the outputs were sampled with.
    """
    rng = np.random.default_rng(5)
    by_id, by_probability = [], []
    for prompt, output in sequences:
        ids = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].double().numpy()
        for row, token in zip(logits, output, strict=True):
            probabilities = _filtered(row, sampling)
            assert probabilities[token] > 0, f"token {token} was filtered out"
            by_id.append(_place(probabilities, token, rng))
            order = np.argsort(-probabilities, kind="stable")
            by_probability.append(_place(probabilities[order], int(np.flatnonzero(order == token)[0]), rng))
    for places in (by_id, by_probability):
        assert stats.kstest(places, "uniform").pvalue > ALPHA


def _filtered(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, then top-k, then top-p: the fewest tokens that hold `top_p` of the mass."""
    scaled = logits / sampling.temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities, kind="stable")
    kept = order[: sampling.top_k or len(order)]
    mass = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: int(np.searchsorted(mass, sampling.top_p)) + 1]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def _place(probabilities: np.ndarray, index: int, rng: np.random.Generator) -> float:
    return float(probabilities[:index].sum() + rng.random() * probabilities[index])
