"""Sampling and verifying with lists: what tests compare is easier to read request by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from specactor_ray.core.ragged import begins
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling import keyed
from specactor_ray.sampling.keyed import Found, verify_arrays
from specactor_ray.sampling.noise import keyed_gumbel
from specactor_ray.sampling.rules import Rules


@dataclass(frozen=True)
class Drawn:
    """Tokens, one per row or those that one request may commit; margins only if they were asked for."""

    token_ids: list[int]
    logprobs: list[float]
    margins: list[float] | None = None


class BadLogitsError(Exception):
    """Requests with logits that cannot be sampled from, and why."""


def refuse_bad(found: Found, lengths: np.ndarray) -> None:
    if problems := found.problems(lengths):
        raise BadLogitsError("; ".join(f"row {i}: {text}" for i, text in problems.items()))


def sample_rows(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    record_margins: bool = False,
    **options: Any,
) -> Drawn:
    found = keyed.sample_rows(logits, params, positions, 1 + record_margins, **options)
    refuse_bad(found, np.zeros(len(params), np.int64))
    tokens, logprobs, margins = (one[:, 0].tolist() for one in (found.tokens, found.logprobs, found.margins))
    return Drawn(tokens, logprobs, margins if record_margins else None)


def verify_tails(
    logits: torch.Tensor,
    row_offsets: Sequence[int],
    tails: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    record_margins: bool = False,
    **options: Any,
) -> list[Drawn]:
    lengths = np.array(list(map(len, tails)), np.int64)
    offsets, slots = begins(lengths), np.arange(len(params))
    rules = Rules(len(params), logits.device)
    rules.write(slots.tolist(), params, [0] * len(params))
    drafts = np.fromiter(chain.from_iterable(tails), np.int32, int(offsets[-1]))
    first, at = np.array(row_offsets, np.int64), np.array(positions, np.int64)
    found = verify_arrays(logits, first, offsets, drafts, at, slots, rules, 1 + record_margins, **options)
    refuse_bad(found, lengths)
    columns = zip(found.tokens.tolist(), found.logprobs.tolist(), found.margins.tolist(), strict=True)
    return [
        Drawn(tokens[:count], logprobs[:count], margins[:count] if record_margins else None)
        for count, (tokens, logprobs, margins) in zip(found.counts.tolist(), columns, strict=True)
    ]


BAD_LOGITS = [
    ({300: math.nan}, "NaN"),
    ({0: -math.nan}, "NaN"),
    ({600: math.nan, 4: math.inf}, "NaN"),
    ({699: math.inf}, r"\+inf"),
    ({7: 2e30}, "above 1e"),
    (dict.fromkeys(range(700), -math.inf), "all logits are -inf"),
]
"""Values of a row of 700 zeros, and what is wrong with it."""


def check_bad_logits(values: dict[int, float], problem: str, rule: SamplingParams, **options: Any) -> None:
    """Rows that are reached are named; those past a wrong draft are not looked at."""
    logits = torch.zeros(5, 700)
    for v, value in values.items():
        logits[1, v] = logits[3, v] = logits[4, v] = value
    good = sample_rows(logits[2:3], [rule], [5]).token_ids
    with pytest.raises(BadLogitsError, match=f"^row 1: .*{problem}.*row 0 of 1.*row 2: .*row 1 of 3"):
        verify_tails(logits, [0, 1, 2], [(), (), (*good, 1)], [rule] * 3, [0, 0, 5], **options)
    wrong = (good[0] + 1) % 700
    assert verify_tails(logits, [2], [(wrong, 1)], [rule], [5], **options)[0].token_ids == good


@njit
def _fill(low: np.uint32, high: np.uint32, position: np.uint32, out: np.ndarray) -> None:
    for v in range(len(out)):
        out[v] = keyed_gumbel((low, high, position), v)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The noise g(seed, position, v) of all v: (vocab_size,) float32."""
    out = np.empty(vocab_size, np.float32)
    _fill(np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32), np.uint32(position), out)
    return out
