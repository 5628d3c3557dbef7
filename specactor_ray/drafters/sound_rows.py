"""Sampling for a batch of which some rows may be bad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import SamplingError, sample_rows


def sample_sound_rows(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], positions: Sequence[int]
) -> dict[int, int]:
    """Row → sampled token, without the rows whose logits cannot be sampled from.

    Args:
        logits: (N, V).
        samplings: N; how each row is sampled.
        positions: N output positions that the tokens are for.
    """
    rows = list(range(len(samplings)))
    while rows:
        sound = logits if len(rows) == len(samplings) else logits[rows]
        try:
            sampled = sample_rows(sound, [samplings[row] for row in rows], [positions[row] for row in rows])
        except SamplingError as error:
            rows = [row for index, row in enumerate(rows) if index not in error.problems]
        else:
            return dict(zip(rows, sampled.token_ids, strict=True))
    return {}
