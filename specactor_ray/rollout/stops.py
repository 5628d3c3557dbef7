"""Texts that end outputs: the token that completes one, and the cut of the text.

An output ends at the first token that contains the end of a stop text. That is a function of the output's
tokens alone, so it does not depend on how many of them arrive together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.detokenizer import PARTIAL, Detokenizer


class Stop(NamedTuple):
    """End of an output by a stop text."""

    num_tokens: int
    """Number of output tokens up to the one that completes it."""
    text: str
    """The stop text."""
    cut: int
    """Number of characters to remove from the end of the decoded output."""


class StopFinder:
    """Finds the stop texts of one request in its output; InputError if there is no tokenizer for them."""

    def __init__(self, tokenizer: Any, sampling: SamplingParams) -> None:
        if tokenizer is None:
            raise InputError("sampling.stop: the model has no tokenizer; end outputs by sampling.stop_token_ids")
        self._detokenizer, self._stops = Detokenizer(tokenizer), sampling.stop
        self._included = sampling.include_stop_str_in_output
        self._most_kept = max(map(len, sampling.stop)) - 1
        self._num_tokens = 0
        """Number of tokens read so far."""
        self._kept = ""
        """End of the text that the detokenizer returned, in which a stop text may begin."""
        self._complete = 0
        """Number of complete characters from the beginning of `_kept` on, those of a pending text included."""

    def find(self, tokens: np.ndarray) -> Stop | None:
        """The first stop text that an unread token completes; `tokens` is the whole output. Reads up to that token."""
        for token in tokens[self._num_tokens :].tolist():
            if (stop := self._read(token)) is not None:
                return stop
        return None

    def _read(self, token_id: int) -> Stop | None:
        self._num_tokens += 1
        text = self._kept + self._detokenizer.add((token_id,))
        shown, dropped = text + self._detokenizer.pending, max(0, len(text) - self._most_kept)
        found = [
            (begin, number, stop)
            for number, stop in enumerate(self._stops)
            if (begin := shown.find(stop, max(0, self._complete - len(stop) + 1))) >= 0
        ]
        self._kept, self._complete = text[dropped:], len(shown.rstrip(PARTIAL)) - dropped
        if not found:
            return None
        begin, _, stop = min(found)
        return Stop(self._num_tokens, stop, len(shown) - begin - (len(stop) if self._included else 0))
