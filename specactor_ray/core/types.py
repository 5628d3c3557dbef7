"""Types that all parts share: sampling parameters and the most probable tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.errors import RangeError, clipped

MAX_TEMPERATURE = 1.0e30
"""Largest temperature, far above the one at which all tokens of any model are equally likely."""
MOST_LOGPROBS = 20
"""Most reported alternatives of a token."""


_NUMBERS: Mapping[str, tuple[type, type, Callable[[Any], bool], str]] = {
    "temperature": (Real, float, lambda value: 0.0 <= value <= MAX_TEMPERATURE, "a number from 0 to 1e30"),
    "top_k": (Integral, int, lambda value: 0 <= value < 2**31, "a whole number from 0 (off) to 2**31 - 1"),
    "top_p": (Real, float, lambda value: 0.0 < value <= 1.0, "a number above 0 and at most 1"),
    "max_tokens": (Integral, int, lambda value: 1 <= value < 2**31, "a whole number from 1 to 2**31 - 1"),
    "seed": (Integral, int, lambda value: 0 <= value < 2**64, "a whole number from 0 to 2**64 - 1"),
    "first_position": (Integral, int, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2**31 - 1"),
    "logprobs": (Integral, int, lambda value: 0 <= value <= MOST_LOGPROBS, f"a whole number from 0 to {MOST_LOGPROBS}"),
}
"""Field of `SamplingParams` → its required type, the type it is converted to, its range, and both in words."""
_SEQUENCES: Mapping[str, tuple[int, Callable[[Any], bool], str]] = {
    "stop_token_ids": (
        65_536,
        lambda one: type(one) is int and 0 <= one < 2**31,
        "token ids, each from 0 to 2**31 - 1",
    ),
    "stop": (64, lambda one: type(one) is str and 0 < len(one) <= 256, "texts, each of 1 to 256 characters"),
}
"""Field of `SamplingParams` → its greatest length, the allowed elements, and these in words."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the tokens of a request (`specactor_ray.sampling.keyed` has the exact rule).

    The configuration, the API and messages share this class and its bounds.

    Raises:
        RangeError: A value is of the wrong type or out of range.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 selects the argmax."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all."""
    max_tokens: int = 128
    """Most output tokens of a request, at least 1."""
    seed: int = 0
    """Key of the noise, an unsigned 64-bit number; the same seed gives the same tokens on CPUs and wherever kernels are
    batch-invariant (docs/design/keyed-sampling.md). In a configuration: seed of the run; the seed of every sample is
    derived from it, its prompt and its number."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an output (and stay in it), besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Continue past the model's own end-of-sequence ids (for benchmarks)."""
    first_position: int = 0
    """Position in the noise of the first output token. A request whose prompt ends with n tokens of an earlier output
    with the same seed sets it to n and gets the tokens that would have followed."""
    stop: tuple[str, ...] = ()
    """Texts that end an output: at the first token with which its text contains one. The token stays, the text is cut
    before the stop text."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop text."""
    logprobs: int = 0
    """Number of most probable tokens at each output position whose log-probabilities are kept, at most 20."""
    prompt_logprobs: bool = False
    """Compute the log-probabilities of the prompt's tokens, under softmax(logits) at any temperature."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise RangeError if a value is out of bounds. Unpickled values are not checked before.

        Numbers of numpy become Python's, a list becomes a tuple.
        """
        for name, (kind, plain, is_in_range, allowed) in _NUMBERS.items():
            value = getattr(self, name)
            if type(value) is plain and is_in_range(value):
                continue
            try:
                fits = type(value) is plain or (isinstance(value, kind) and not isinstance(value, bool))
                number = plain(value) if fits else None
            except OverflowError:  # a whole number that no float can represent
                number = None
            if number is None or not is_in_range(number):
                raise RangeError(f"sampling.{name}", clipped(value), f"be {allowed}")
            object.__setattr__(self, name, number)
        for name, (most, is_allowed, allowed) in _SEQUENCES.items():
            values = getattr(self, name)
            if type(values) is tuple and not values:
                continue
            if not isinstance(values, list | tuple) or len(values) > most or not all(map(is_allowed, values)):
                raise RangeError(f"sampling.{name}", clipped(values), f"hold at most {most} {allowed}")
            object.__setattr__(self, name, tuple(values))
        for name in ("ignore_eos", "include_stop_str_in_output", "prompt_logprobs"):
            if type(getattr(self, name)) is not bool:
                raise RangeError(f"sampling.{name}", clipped(getattr(self, name)), "be true or false")


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most probable tokens at the committed positions of `n` requests."""

    counts: np.ndarray
    """int32 `(n,)`: number of tokens per position; 0 for a request without `logprobs`."""
    tokens: np.ndarray
    """int32: tokens of all positions one after the other, the most probable first."""
    logprobs: np.ndarray
    """float32, as `tokens`."""


_PART = 48
"""About as many tokens of a probe are judged together."""


class Probe(NamedTuple):
    """What a model with certain weights computes, for comparisons."""

    token_ids: np.ndarray
    """int32 `(n,)`."""
    logprobs: np.ndarray
    """float32 `(n - 1,)`: log-probabilities of `token_ids[1:]`, each after all tokens before it, in nats."""
    tolerance: float
    """Largest `gap`, in nats, that is rounding."""

    def gap(self, logprobs: np.ndarray) -> float:
        """Average difference from these log-probabilities of the same tokens, or of the first ones, without the largest
        quarter: an expert that rounding chooses differently moves a few positions far. Of the part of the tokens where
        it is largest: a window of attention shows behind it. NaN if one of them is."""
        differences = np.abs(logprobs - self.logprobs[: len(logprobs)])
        if not np.isfinite(differences).all():
            return math.nan
        parts = np.array_split(differences, max(1, round(len(differences) / _PART)))
        return max(float(np.sort(part)[: math.ceil(0.75 * len(part))].mean()) for part in parts)
