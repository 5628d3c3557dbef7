"""Requested log-probabilities: of the most probable tokens at committed positions, and of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import TopTokens
from specactor_ray.sampling.cpu import GREEDY_BELOW
from specactor_ray.sampling.keyed import Found
from specactor_ray.sampling.rules import Rules

if TYPE_CHECKING:
    import torch


def most_probable(
    logits: torch.Tensor, offsets: np.ndarray, found: Found, slots: np.ndarray, rules: Rules
) -> TopTokens | None:
    """The most probable tokens at the sampled positions, under softmax(logits / T) (T = 1 at temperature 0).

    They are ordered by (probability descending, id ascending); `topk` selects among equal last ones.
    Log-probabilities are those of the sampled tokens plus the difference of the logits over T: no second sum over the
    vocabulary, and the same bits for the same token. None if they are requested nowhere; `found` is the result of
    `verify_arrays` for the other arguments.
    """
    import torch

    if not rules.any_tops or not (wanted := rules.tops[slots]).any():
        return None
    positions = np.where(wanted > 0, found.counts, 0)
    sampled = torch.from_numpy(found.tokens[np.arange(found.width) < positions[:, None]]).to(logits.device)
    rows = torch.from_numpy(places(offsets, positions)).to(logits.device)
    tokens, gaps = (part.cpu().numpy() for part in ranked(logits[rows], sampled, int(wanted.max())))
    return top_tokens(tokens, gaps, begins(positions)[:-1], found, slots, rules)


def ranked(logits: torch.Tensor, sampled: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with the largest logits of each row, int64 `(n, most)`, and the float64 differences of their logits from
    that of the row's sampled token, int64 `(n,)`. Nothing waits for the device."""
    x = logits.float()
    best = x.topk(min(most, x.shape[1]), dim=1)
    return best.indices, best.values.double() - x.gather(1, sampled.unsqueeze(-1)).double()


def top_tokens(
    tokens: np.ndarray, gaps: np.ndarray, offsets: np.ndarray, found: Found, slots: np.ndarray, rules: Rules
) -> TopTokens | None:
    """`most_probable` from the result of `ranked`, in which the rows of request i begin at `offsets[i]`."""
    wanted = rules.tops[slots]
    positions = np.where(wanted > 0, found.counts, 0)
    if not positions.any():
        return None
    rule = rules.table["temperature"][slots]
    temperature = np.repeat(np.where(rule < GREEDY_BELOW, 1.0, rule), positions)[:, None]
    tokens, gaps = (part[places(offsets, positions)] for part in (tokens, gaps))
    order = np.lexsort((tokens, -gaps))
    tokens, gaps = (np.take_along_axis(part, order, axis=1) for part in (tokens, gaps))
    logprobs = found.logprobs[np.arange(found.width) < positions[:, None]][:, None] + gaps / temperature
    asked = np.arange(tokens.shape[1]) < np.repeat(wanted, positions)[:, None]
    return TopTokens(wanted, tokens[asked].astype(np.int32), logprobs[asked].astype(np.float32))


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
