"""Verifying with lists: what tests compare is easier to read request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from specactor_ray.core.ragged import begins
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.keyed import SamplingError, verify_arrays
from specactor_ray.sampling.rules import Rules


@dataclass(frozen=True)
class Verified:
    """What one request may commit: the accepted draft tokens and one recovered or bonus token."""

    token_ids: list[int]
    logprobs: list[float]
    num_accepted: int
    margins: list[float] | None = None


def verify_tails(
    logits: torch.Tensor,
    row_offsets: Sequence[int],
    tails: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    record_margins: bool = False,
    **options: Any,
) -> list[Verified]:
    """`verify_arrays` of lists. Raises SamplingError where a request has logits that cannot be sampled from."""
    lengths = np.array(list(map(len, tails)), np.int64)
    offsets, slots = begins(lengths), np.arange(len(params))
    rules = Rules(len(params), logits.device)
    rules.write(slots.tolist(), params, [0] * len(params))
    drafts = np.fromiter(chain.from_iterable(tails), np.int32, int(offsets[-1]))
    first, at = np.array(row_offsets, np.int64), np.array(positions, np.int64)
    found = verify_arrays(logits, first, offsets, drafts, at, slots, rules, 1 + record_margins, **options)
    if problems := found.problems(lengths):
        raise SamplingError(problems)
    columns = zip(found.tokens.tolist(), found.logprobs.tolist(), found.margins.tolist(), strict=True)
    return [
        Verified(tokens[:count], logprobs[:count], count - 1, margins[:count] if record_margins else None)
        for count, (tokens, logprobs, margins) in zip(found.counts.tolist(), columns, strict=True)
    ]
