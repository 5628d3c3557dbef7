"""Text of output tokens: as a whole, as they arrive, and up to a stop text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams

PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of an incomplete character's bytes."""
_MOST_PARTIAL = 64
"""Most tokens that are held back for an incomplete character at the end; more are not text."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Detokenizer:
    """Decodes an output as its tokens arrive; a character is returned when all its bytes are there.

    Each text is decoded twice, from a token boundary behind which it is known to be complete, since tokenizers decode a
    token depending on the tokens before it (spaces, bytes of one character). `special`: with special tokens.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._decode, self._is_byte = _decoder_of(tokenizer, special), _bytes_of(tokenizer)
        self._ids: list[int] = []
        """The tokens that were returned last, and those after them."""
        self._returned, self._before = 0, ""
        """Number of the former, and their text."""
        self.pending = ""
        """Text that is held back: its last character may be incomplete, or later bytes may change it."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._ids += token_ids
        after = self._decode(self._ids)
        text, count = after[len(self._before) :], len(self._ids) - self._returned
        open_end = not text or after.endswith(PARTIAL) or self._is_byte(self._ids[-1])
        if open_end and count < _MOST_PARTIAL:
            self.pending = text
            return ""
        del self._ids[: self._returned]
        self._returned, self._before, self.pending = count, self._decode(self._ids), ""
        return text


def decoded(tokenizer: Any, token_ids: Sequence[int], special: bool = False) -> str:
    """The text of output tokens, without special tokens unless `special` is set."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


def _decoder_of(tokenizer: Any, special: bool) -> Callable[[Sequence[int]], str]:
    """`decoded` with this tokenizer, by its inner one if it has one: that is ten times faster."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return partial(decoded, tokenizer, special=special)
    return partial(backend.decode, skip_special_tokens=not special)


def _bytes_of(tokenizer: Any) -> Callable[[int], bool]:
    """Whether a token id is one byte of a tokenizer that decodes each run of bytes as a whole: if the run is not valid
    UTF-8, none of its bytes is text, not even a complete character in front."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
        return lambda token_id: False
    names = tokenizer.backend_tokenizer
    return lambda token_id: _BYTE.fullmatch(names.id_to_token(token_id) or "") is not None


class Stop(NamedTuple):
    """End of an output by a stop text."""

    num_tokens: int
    """Number of output tokens up to the one that completes it."""
    text: str
    """The stop text."""
    cut: int
    """Number of characters to remove from the end of the decoded output."""


class StopFinder:
    """Finds the stop texts of one request in its output; InputError if there is no tokenizer for them.

    An output ends at the first token that contains the end of a stop text. That is a function of the output's tokens
    alone, so it does not depend on how many of them arrive together.
    """

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
