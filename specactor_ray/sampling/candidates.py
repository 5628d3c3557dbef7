"""Best candidates of keyed draws, for drafters with branches (`draft/chains.py`).

A drafter that samples with the target's noise needs the next best tokens of the same draw as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specactor_ray.sampling.keyed import Backend, verify_arrays, verify_on_device
from specactor_ray.sampling.rules import Rules

if TYPE_CHECKING:
    import torch

MOST = 5
"""Most candidates per draw."""


class Candidates(NamedTuple):
    """Candidates of `n` draws."""

    tokens: np.ndarray
    """int32 `(n, most)`, the best first; `verify_arrays` samples the first one. -1: top-k and top-p leave no more, or
    the logits cannot be sampled from."""
    gaps: np.ndarray
    """float32 `(n,)`: first minus second perturbed score; inf where there is no second."""


def candidates(
    logits: torch.Tensor,
    positions: np.ndarray,
    slots: np.ndarray,
    rules: Rules,
    most: int = MOST,
    *,
    ids: np.ndarray | None = None,
    backend: Backend = "auto",
) -> Candidates:
    """Rank the tokens of one draw per row of `(n, V)` logits. Arguments and errors as in `verify_arrays`.

    Args:
        most: Candidates per draw, `MOST` or 1.
        ids: uint32 `(V,)`, ascending: tokens of the logits, if these are a part of the vocabulary. The result is that
            of logits over the whole vocabulary with -inf elsewhere; only numba supports it.
    """
    rows, tails, drafts = np.arange(len(slots)), np.zeros(len(slots) + 1, np.int64), np.zeros(0, np.int32)
    found = verify_arrays(
        logits, rows, tails, drafts, positions, slots, rules, most, ids=ids, logprobs=False, backend=backend
    )
    return unpacked(found.packed, most)


def candidates_on_device(
    logits: torch.Tensor, positions: torch.Tensor, rules: Rules, most: int, *, ids: np.ndarray | None = None
) -> torch.Tensor:
    """`candidates` for the slots 0, 1, ..., without a wait for the device: int64 `(n, words)`, for `unpacked`. In each
    line word 0 is positive if there is a token, which is word 2. Errors as of `verify_on_device`."""
    import torch

    order = torch.arange(len(positions), device=logits.device)
    none = torch.zeros(len(positions) + 1, dtype=torch.int64, device=logits.device)
    return verify_on_device(logits, order, none, none[:1], 0, positions, rules, most, ids=ids, logprobs=False)


def unpacked(packed: np.ndarray, most: int) -> Candidates:
    """Candidates from int64 `(n, words)`, the buffer of `keyed.Found` without drafts."""
    drawn = packed[:, 0] > 0
    tokens = np.where(drawn, packed[:, [2, *range(5, 4 + most)]].T, -1).T
    gaps = np.where(drawn & (most > 1), packed.view(np.float64)[:, 4], np.inf)
    with np.errstate(over="ignore"):  # a gap to a token that is masked by the lowest float
        return Candidates(np.ascontiguousarray(tokens, np.int32), gaps.astype(np.float32))
