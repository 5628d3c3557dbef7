"""Sampling parameters say what is wrong with them when they are made."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import RangeError, clipped
from specactor_ray.core.types import SamplingParams
from tests.tails import sample_rows

NUMBER, WHOLE = "a number from 0 to 1e30", "a whole number from"
TOKENS = "at most 65536 token ids, each from 0 to 2**31 - 1"
TEXTS = "at most 64 texts, each of 1 to 256 characters"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(("temperature", value, NUMBER) for value in (-1.0, "1", True, float("nan"), 1.1e30, 10**400, None)),
        *(("top_k", value, f"{WHOLE} 0 (off) to 2**31 - 1") for value in (-1, 2.0, 2**31, 2**63)),
        *(("top_p", value, "a number above 0 and at most 1") for value in (0.0, 1.5, 10**400)),
        *(("max_tokens", value, f"{WHOLE} 1 to 2**31 - 1") for value in (0, 2**31, "5")),
        *(("seed", value, f"{WHOLE} 0 to 2**64 - 1") for value in (None, -1, 2**64)),
        *(("logprobs", value, f"{WHOLE} 0 to 20") for value in (-1, 21, 1.5, True)),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", None, "true or false"),
        *(("stop_token_ids", value, TOKENS) for value in ([-1], [2**31], 5, [1.0], [1] * 65_537, np.ones(1, int))),
        *(("stop", value, TEXTS) for value in ("a", [""], ["a" * 257], None, ["a"] * 65, np.array(["a"]))),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RangeError) as caught:
        SamplingParams(**{name: value})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.key, again.value) == (f"sampling.{name}", clipped(value)) and len(str(again)) < 400
    assert again.allowed.partition(" ")[2] == allowed


def test_a_number_that_python_does_not_write_is_named_too() -> None:
    with pytest.raises(RangeError, match=r"sampling\.seed "):
        SamplingParams(seed=10**5000)


def test_extreme_values_within_the_bounds_can_be_sampled() -> None:
    extremes = [
        SamplingParams(temperature, top_k, top_p, seed=2**64 - 1)
        for temperature in (0.0, 5e-324, 1e-4, 1e30)
        for top_k in (0, 1, 2**31 - 1)
        for top_p in (5e-324, 1.0)
    ]
    logits = torch.randn(len(extremes), 50, generator=torch.Generator().manual_seed(0))
    positions = [2**31 - 1] * len(extremes)
    sampled = sample_rows(logits, extremes, positions)
    assert np.isfinite(sampled.logprobs).all()
    greedy = [token for token, one in zip(sampled.token_ids, extremes, strict=True) if one.temperature < 1.0]
    assert greedy == [int(row.argmax()) for row, one in zip(logits, extremes, strict=True) if one.temperature < 1.0]


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    """As what they stand for: drafters refuse messages with anything else."""
    sampling = SamplingParams(np.float32(0.5), np.int64(3), 1, np.int32(9), np.uint64(7), [1, 2])  # type: ignore[arg-type]
    assert sampling == SamplingParams(0.5, 3, 1, 9, 7, (1, 2)) and hash(sampling)
    kinds = [type(getattr(sampling, name)) for name in ("temperature", "top_k", "max_tokens", "seed", "stop_token_ids")]
    assert kinds == [float, int, int, int, tuple]
