"""Requested log-probabilities: of the most probable tokens at committed positions, and of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.core.ragged import places
from specactor_ray.core.types import TopTokens
from specactor_ray.sampling.keyed import Found
from specactor_ray.sampling.numba import GREEDY_BELOW
from specactor_ray.sampling.rules import Rules

if TYPE_CHECKING:
    import torch


def most_probable(
    logits: torch.Tensor, offsets: np.ndarray, found: Found, slots: np.ndarray, rules: Rules
) -> TopTokens | None:
    """The most probable tokens at the sampled positions, under softmax(logits / T) (T = 1 at temperature 0).

    They are ordered by (probability descending, id ascending); `topk` selects among equal last ones.
    Log-probabilities are those of the sampled tokens plus the difference of the logits over T: no second sum over the
    vocabulary, and the same bits for the same token.

    Args:
        logits, offsets, slots, rules: As in `verify_arrays`.
        found: Result of `verify_arrays`.

    Returns:
        The tokens; None if they are requested nowhere.
    """
    if not rules.any_tops or not (wanted := rules.tops[slots]).any():
        return None
    positions = np.where(wanted > 0, found.counts, 0)
    counted = np.arange(found.width) < positions[:, None]
    rule = rules.table["temperature"][slots]
    temperature = np.repeat(np.where(rule < GREEDY_BELOW, 1.0, rule), positions)[:, None]
    tokens, gaps = _ranked(logits, places(offsets, positions), found.tokens[counted], int(wanted.max()))
    logprobs = found.logprobs[counted][:, None] + gaps / temperature
    asked = np.arange(tokens.shape[1]) < np.repeat(wanted, positions)[:, None]
    return TopTokens(wanted, tokens[asked].astype(np.int32), logprobs[asked].astype(np.float32))


def logprobs_of(logits: torch.Tensor, tokens: np.ndarray) -> np.ndarray:
    """float32 `(n,)`: log-probability of one token per row of `(n, vocab)` logits, under softmax(logits)."""
    import torch

    x = logits.float()
    own = x.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(x.device)[:, None])[:, 0]
    found: np.ndarray = (own - x.logsumexp(dim=1)).cpu().numpy()
    return found


def prompt_scores(logits: torch.Tensor, tokens: np.ndarray) -> np.ndarray:
    """float32 `(n, 3)`: log-probability of one token per row of `(n, vocab)` logits, under softmax(logits), the id of
    the most probable token, and its log-probability."""
    import torch

    x = logits.float()
    best, ids = x.max(dim=1)
    own = x.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(x.device)[:, None])[:, 0]
    total = x.logsumexp(dim=1)
    found: np.ndarray = torch.stack((own - total, ids.float(), best - total), dim=1).cpu().numpy()
    return found


def _ranked(logits: torch.Tensor, rows: np.ndarray, sampled: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens with the largest logits of each row, `(n, most)`, and the float64 differences of their logits from the
    sampled token's."""
    import torch

    x = logits[torch.from_numpy(rows).to(logits.device)].float()
    own = x.gather(1, torch.from_numpy(sampled).to(logits.device).unsqueeze(-1))
    best = x.topk(min(most, x.shape[1]), dim=1)
    tokens, values = best.indices.cpu().numpy(), best.values.cpu().numpy()
    order = np.lexsort((tokens, -values))
    gaps = np.take_along_axis(values, order, axis=1).astype(np.float64) - own.double().cpu().numpy()
    return np.take_along_axis(tokens, order, axis=1), gaps
