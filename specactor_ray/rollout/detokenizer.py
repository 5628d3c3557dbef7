"""Text of output tokens: as a whole, and as they arrive."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
