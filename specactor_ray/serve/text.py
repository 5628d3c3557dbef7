"""Text of growing outputs, and of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

_PARTIAL = "\ufffd"
"""Decoded form of an incomplete character's bytes."""
_MOST_PARTIAL = 64
"""Most tokens that are held back for an incomplete character at the end; more are not text."""
_CACHED = 1 << 17
"""Number of tokens whose text is cached."""


class Detokenizer:
    """Decodes an output as its tokens arrive; a character is returned when all its bytes are there.

    Each text is decoded twice, from a token boundary behind which it is known to be complete, since tokenizers decode a
    token depending on the tokens before it (spaces, bytes of one character).

    Args:
        tokenizer: A transformers tokenizer.
        hold: Texts that may end the output; a possible beginning of one is held back.
    """

    def __init__(self, tokenizer: Any, hold: Sequence[str] = ()) -> None:
        self._decode_ids, self._hold = decoder_of(tokenizer), hold
        self._longest = max(map(len, hold), default=1) - 1
        self._ids: list[int] = []
        self._begin = self._read = 0
        """Tokens before `_begin` are no longer decoded; the text of tokens before `_read` was returned."""
        self._held = ""
        self.given = ""
        """Text returned so far."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._ids += token_ids
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        is_partial = len(after) <= len(before) or after.endswith(_PARTIAL)
        if is_partial and len(self._ids) - self._read < _MOST_PARTIAL:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        text = self._held + after[len(before) :]
        keep = self._beginning_of_a_held(text)
        self._held = text[len(text) - keep :]
        text = text[: len(text) - keep]
        self.given += text
        return text

    def rest(self, whole: str) -> str:
        """Rest of the whole text at the end of the output."""
        rest = whole[len(self.given) :]
        self.given += rest
        return rest

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decode_ids(token_ids) if token_ids else ""

    def _beginning_of_a_held(self, text: str) -> int:
        """Number of characters at the end of a text that may begin a held text, or that start with a whole one."""
        for held in self._hold:
            if (at := text.find(held)) >= 0:
                return len(text) - at
        for length in range(min(self._longest, len(text)), 0, -1):
            end = text[-length:]
            if any(held.startswith(end) for held in self._hold):
                return length
        return 0


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Function that decodes without special tokens like `tokenizer.decode`; the inner tokenizer is ten times faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return partial(tokenizer.decode, skip_special_tokens=True)
    return partial(backend.decode, skip_special_tokens=True)


class TokenText(NamedTuple):
    """Text and bytes of one token."""

    text: str
    utf8: list[int]
    """Bytes, also of an incomplete character."""


class TokenTexts:
    """Cache of the texts of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._known = tokenizer, dict[int, TokenText]()

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            if len(self._known) >= _CACHED:
                self._known.clear()
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> TokenText:
        text = self._tokenizer.decode([token_id])
        if _PARTIAL in text and (utf8 := self._bytes_of(token_id)) is not None:
            return TokenText(text, utf8)
        return TokenText(text, list(text.encode()))

    def _bytes_of(self, token_id: int) -> list[int] | None:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x"):
            return [int(piece[3:5], 16)]
        if isinstance(piece, str) and all(one in _BYTE_OF for one in piece):
            return [_BYTE_OF[one] for one in piece]
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte, as byte-level tokenizers write bytes: printable Latin-1 characters stand for their own byte,
    those from 256 on for the other bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [one for one in range(256) if one not in set(plain)]
    return {chr(one): one for one in plain} | {chr(256 + number): one for number, one in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
