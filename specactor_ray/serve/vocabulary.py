"""Names and bytes of single tokens, from the vocabulary's own encoding.

`decode` of one id loses them: bytes of a part of a character become U+FFFD, and tokenizers of SentencePiece drop the
space before a word.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

_CACHED = 1 << 17
"""Number of tokens with cached bytes."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD = re.compile("\u2581[a-zA-Z]")
_ANCHOR = "a"
"""Text before a token of unknown encoding."""


class Vocabulary:
    """The tokens of a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
        kinds = set(_kinds(decoder))
        self._has_units = "ByteLevel" in kinds or hasattr(tokenizer, "byte_decoder")
        self._has_bytes = "ByteFallback" in kinds
        self._special = frozenset(
            {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
            | set(tokenizer.all_special_ids)
        )
        self.utf8 = functools.lru_cache(_CACHED)(self._utf8)
        """Bytes of a token id; none for an id without a token."""
        self.name = functools.lru_cache(_CACHED)(self._name)
        """Text of a token id; `bytes:\\xf0\\x9f` for a part of a character."""

    def answer_bytes(self, token_id: int, special: bool, is_first: bool) -> bytes:
        """What a token contributes to the text of an output; `special`: it has special tokens, `is_first`: no token
        before contributes anything."""
        if not special and token_id in self._special:
            return b""
        utf8: bytes = self.utf8(token_id)
        return utf8[1:] if is_first and self._strips_first and utf8.startswith(b" ") else utf8

    @functools.cached_property
    def _strips_first(self) -> bool:
        """Whether a text lacks the space in front of its first word."""
        words = (number for token, number in self._tokenizer.get_vocab().items() if _WORD.match(token))
        spaced = (word for word in words if self.utf8(word).startswith(b" "))
        return any(not self._tokenizer.decode([word]).startswith(" ") for word in itertools.islice(spaced, 1))

    def _utf8(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None or isinstance(token, bytes):
            return token or b""
        if self._has_units:
            units = _units()
            return bytes(map(units.__getitem__, token)) if units.keys() >= set(token) else token.encode()
        if self._has_bytes and (byte := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        # What it adds to the text of another token.
        anchor = self._tokenizer.encode(_ANCHOR, add_special_tokens=False)
        before, whole = (str(self._tokenizer.decode(ids)) for ids in (anchor, [*anchor, token_id]))
        return whole.removeprefix(before).encode()

    def _name(self, token_id: int) -> str:
        utf8: bytes = self.utf8(token_id)
        try:
            return utf8.decode() if utf8 else f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _kinds(decoder: Any) -> Iterator[str]:
    """Kinds of a decoder of the package tokenizers and of its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)


@functools.cache
def _units() -> dict[str, int]:
    """Character of byte-level vocabularies → byte: printable characters of Latin-1 stand for themselves, and those from
    U+0100 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
