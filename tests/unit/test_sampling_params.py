"""Sampling parameters say what is wrong with them when they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specactor_ray.errors import InputError
from specactor_ray.messages import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -1.0, "a finite number, 0 or more"),
        ("temperature", "1", "a number"),
        ("temperature", True, "a number"),
        ("top_k", -1, "0 (off) or more"),
        ("top_k", 2.0, "a whole number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("max_tokens", 0, "between 1 and 2**31 - 1"),
        ("max_tokens", 2**31, "between 1 and 2**31 - 1"),
        ("max_tokens", "5", "a whole number"),
        ("seed", None, "a whole number"),
        ("seed", 2**64, "between 0 and 2**64 - 1"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"sampling.{name} is {value!r}; it must be {allowed}"


@pytest.mark.parametrize("stops", [[-1], [2**31], ["a"], 5, [1.0]])
def test_stop_tokens_are_token_ids(stops: Any) -> None:
    with pytest.raises(InputError, match="it must hold token ids, 0 or more"):
        SamplingParams(stop_token_ids=stops)


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    """As what they stand for: drafters refuse messages with anything else."""
    sampling = SamplingParams(np.float32(0.5), np.int64(3), 1, np.int32(9), np.uint64(7), [1, 2])  # type: ignore[arg-type]
    assert sampling == SamplingParams(0.5, 3, 1, 9, 7, (1, 2)) and hash(sampling)
    kinds = [type(getattr(sampling, name)) for name in ("temperature", "top_k", "max_tokens", "seed", "stop_token_ids")]
    assert kinds == [float, int, int, int, tuple]
