"""Types that all parts share: modes and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

import numpy as np

from specactor_ray.core.errors import RangeError, clipped


class Mode(StrEnum):
    """Way of drafting for a request."""

    PLAIN = "plain"
    """No drafts: ordinary decoding."""
    COUPLED = "coupled"
    """The verifier hosts its drafters and runs them between two steps, as far as that pays."""
    DECOUPLED = "decoupled"
    """The verifier uses the present tail; draft actors run ahead up to their windows. Lookups are hosted."""


MAX_TEMPERATURE = 1.0e30
"""Largest temperature, far above the one at which all tokens of any model are equally likely."""

_MOST_STOPS = 65_536
_MOST_STOP_TEXTS, _LONGEST_STOP_TEXT = 64, 256

_NUMBERS: Mapping[str, tuple[type, type, Callable[[Any], bool], str]] = {
    "temperature": (Real, float, lambda value: 0.0 <= value <= MAX_TEMPERATURE, "a number from 0 to 1e30"),
    "top_k": (Integral, int, lambda value: 0 <= value < 2**31, "a whole number from 0 (off) to 2**31 - 1"),
    "top_p": (Real, float, lambda value: 0.0 < value <= 1.0, "a number above 0 and at most 1"),
    "max_tokens": (Integral, int, lambda value: 1 <= value < 2**31, "a whole number from 1 to 2**31 - 1"),
    "seed": (Integral, int, lambda value: 0 <= value < 2**64, "a whole number from 0 to 2**64 - 1"),
    "first_position": (Integral, int, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2**31 - 1"),
    "logprobs": (Integral, int, lambda value: 0 <= value <= 20, "a whole number from 0 to 20"),
}
"""Field of `SamplingParams` → its required type, the type it is converted to, its range, and both in words."""


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
    """Key of the noise, an unsigned 64-bit number; the same seed gives the same tokens. In a configuration: seed of the
    run; the seed of every sample is derived from it, its prompt and its number."""
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
        if type(self.stop_token_ids) is not tuple or self.stop_token_ids:
            self._check_stop_token_ids()
        if type(self.stop) is not tuple or self.stop:
            self._check_stop()
        for name in ("ignore_eos", "include_stop_str_in_output", "prompt_logprobs"):
            if type(getattr(self, name)) is not bool:
                raise RangeError(f"sampling.{name}", clipped(getattr(self, name)), "be true or false")

    def _check_stop_token_ids(self) -> None:
        stops = self.stop_token_ids
        if (
            not isinstance(stops, list | tuple)
            or len(stops) > _MOST_STOPS
            or not all(type(one) is int and 0 <= one < 2**31 for one in stops)
        ):
            allowed = f"hold at most {_MOST_STOPS} token ids, each from 0 to 2**31 - 1"
            raise RangeError("sampling.stop_token_ids", clipped(stops), allowed)
        object.__setattr__(self, "stop_token_ids", tuple(stops))

    def _check_stop(self) -> None:
        texts = self.stop
        if (
            not isinstance(texts, list | tuple)
            or len(texts) > _MOST_STOP_TEXTS
            or not all(type(one) is str and 0 < len(one) <= _LONGEST_STOP_TEXT for one in texts)
        ):
            allowed = f"hold at most {_MOST_STOP_TEXTS} texts, each of 1 to {_LONGEST_STOP_TEXT} characters"
            raise RangeError("sampling.stop", clipped(texts), allowed)
        object.__setattr__(self, "stop", tuple(texts))


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most probable tokens at the committed positions of `n` requests."""

    counts: np.ndarray
    """int32 `(n,)`: number of tokens per position; 0 for a request without `logprobs`."""
    tokens: np.ndarray
    """int32, tokens of all positions one after the other, the most probable first; `logprobs` (float32) likewise."""
    logprobs: np.ndarray
