"""Text of outputs while they grow, and of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

_PARTIAL = "\ufffd"
"""What the bytes of an incomplete character decode to."""
_MOST_PARTIAL = 64
"""Tokens without a complete character at their end that are kept back; more are no text."""
_CACHED = 1 << 17
"""Tokens whose text is kept."""


class Detokenizer:
    """Decodes an output as its tokens come; characters are given out when all their bytes are there.

    A text is decoded twice behind a token boundary from which on all is known to be complete, since tokenizers decode a
    token by what is before it (spaces, bytes of one character).

    Args:
        tokenizer: A transformers tokenizer.
        hold: Texts of which the output may end with one; what may be the beginning of one is held back.
    """

    def __init__(self, tokenizer: Any, hold: Sequence[str] = ()) -> None:
        self._decode_ids, self._hold = decoder_of(tokenizer), hold
        self._longest = max(map(len, hold), default=1) - 1
        self._ids: list[int] = []
        self._begin = self._read = 0
        """Tokens before `begin` are not decoded any more, those before `read` have been given out."""
        self._held = ""
        self.given = ""
        """Text that was given out."""

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
        """What is left of the whole text at the end of the output."""
        rest = whole[len(self.given) :]
        self.given += rest
        return rest

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decode_ids(token_ids) if token_ids else ""

    def _beginning_of_a_held(self, text: str) -> int:
        """Characters at the end of a text that one of the held texts begins with; all that follow a whole one."""
        for held in self._hold:
            if (at := text.find(held)) >= 0:
                return len(text) - at
        for length in range(min(self._longest, len(text)), 0, -1):
            end = text[-length:]
            if any(held.startswith(end) for held in self._hold):
                return length
        return 0


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Decodes without special tokens as `tokenizer.decode` does, a tenth of whose time the tokenizer itself takes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return partial(tokenizer.decode, skip_special_tokens=True)
    return partial(backend.decode, skip_special_tokens=True)


class TokenText(NamedTuple):
    """A token by itself."""

    text: str
    utf8: list[int]
    """Bytes; those of a part of a character as they are."""


class TokenTexts:
    """Texts of single tokens, kept once they were asked for."""

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
    """Character → byte, as byte-level tokenizers write bytes: printable Latin-1 characters as they are, the others from
    256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [one for one in range(256) if one not in set(plain)]
    return {chr(one): one for one in plain} | {chr(256 + number): one for number, one in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
