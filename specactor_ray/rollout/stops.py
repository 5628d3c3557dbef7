"""Texts that end outputs: the token that completes one, and the cut of the text.

An output ends at its first token whose characters contain the end of a stop text. That is a function of the output's
tokens alone, so it does not depend on how many of them arrive together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams

_MARGIN = 8
"""Additional characters before the longest stop text in a decoded part: its first ones may differ from those of the
whole text, if a character or a space begins in the token before."""
_PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of an incomplete character."""
_BYTES = 4
"""Most bytes of a character."""
_REMEMBERED = 256
"""Most stop texts with a remembered finder."""


class Stop(NamedTuple):
    """End of an output by a stop text."""

    num_tokens: int
    """Number of output tokens up to the one that completes it."""
    text: str
    """The stop text."""
    cut: int
    """Number of characters to remove from the end of the decoded output."""


class StopFinder:
    """Finds the stop texts of a request in its output. `completing`: all tokens whose characters may contain the last
    character of a stop text."""

    def __init__(self, tokenizer: Any, sampling: SamplingParams, completing: frozenset[int]) -> None:
        self._tokenizer, self._texts, self._completing = tokenizer, sampling.stop, completing
        self._included = sampling.include_stop_str_in_output
        self._longest = max(map(len, sampling.stop)) + _MARGIN

    def find(self, tokens: np.ndarray, begin: int) -> Stop | None:
        """The first stop text that one of the tokens from number `begin` on completes; `tokens` is the whole output."""
        fresh = tokens[begin:].tolist()
        if self._completing.isdisjoint(fresh):
            return None
        for at, token in enumerate(fresh, begin):
            if token in self._completing and (stop := self._completed_by(tokens, at)) is not None:
                return stop
        return None

    def _completed_by(self, tokens: np.ndarray, at: int) -> Stop | None:
        text, before = self._tail(tokens, at)
        found: list[tuple[int, int, str]] = []
        for number, stop in enumerate(self._texts):
            begin = text.find(stop, max(0, before - len(stop) + 1))
            if begin >= 0:
                found.append((begin, number, stop))
        if not found:
            return None
        begin, _, stop = min(found)
        return Stop(at + 1, stop, len(text) - begin - (len(stop) if self._included else 0))

    def _tail(self, tokens: np.ndarray, at: int) -> tuple[str, int]:
        """The end of the text up to token `at`, and the number of its characters complete before that token."""
        width, shifts = self._longest, _BYTES - 1
        while True:
            part = tokens[max(0, at + 1 - width) : at + 1].tolist()
            text = decoded(self._tokenizer, part)
            if len(text) < self._longest and width <= at:
                width *= 2
            elif text.startswith(_PARTIAL) and width <= at and shifts:
                width, shifts = width + 1, shifts - 1  # some tokenizers decode all bytes of a row or none
            else:
                before = len(decoded(self._tokenizer, part[:-1]).rstrip(_PARTIAL))
                return text, min(before, len(text) - 1)


class StopTexts:
    """Makes a `StopFinder` for each request that has stop texts. For one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pieces: list[str] | None = None
        """Token → text of two of them, so that one is not at the beginning."""
        self._finders: dict[tuple[tuple[str, ...], bool], StopFinder] = {}

    def finder(self, sampling: SamplingParams) -> StopFinder | None:
        """The finder for the stop texts; None if there are none. InputError if there is no tokenizer for them."""
        if not sampling.stop:
            return None
        if self.tokenizer is None:
            raise InputError("sampling.stop: the model has no tokenizer; end outputs by sampling.stop_token_ids")
        key = (sampling.stop, sampling.include_stop_str_in_output)
        if key not in self._finders:
            if len(self._finders) >= _REMEMBERED:
                self._finders.clear()
            self._finders[key] = StopFinder(self.tokenizer, sampling, self._completing(sampling.stop))
        return self._finders[key]

    def _completing(self, stops: tuple[str, ...]) -> frozenset[int]:
        if self._pieces is None:
            twice = [[token, token] for token in range(len(self.tokenizer))]
            self._pieces = self.tokenizer.batch_decode(twice, skip_special_tokens=True)
        last = {stop[-1] for stop in stops}
        if not all(map(str.isascii, last)):
            last.add(_PARTIAL)
        return frozenset(token for token, text in enumerate(self._pieces) if not last.isdisjoint(text))


def decoded(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of output tokens, without special tokens."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text
