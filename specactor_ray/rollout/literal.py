"""Text with literal parts, tokenized so that no control token is read in them."""

from __future__ import annotations

import json
import re
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specactor_ray.core.errors import InputError, clipped

_BLANK = "\ue000"
"""Stands for a sign of messages where only the template's own control tokens are looked for."""
_FILLER = "."
"""Stands for literal text where only control tokens are looked for."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    literal: tuple[tuple[int, int], ...] | None = None
    """Begin and end of parts in which no control token may be read, in order. Outside of them control tokens are read
    where they are written exactly; None: wherever the tokenizer finds some."""

    def __getitem__(self, part: slice) -> Rendered:
        begin = part.start or 0
        spans = ((max(a - begin, 0), b - begin) for a, b in self.literal or () if b > begin)
        return Rendered(self.text[begin:], tuple(spans))


class ControlTokens:
    """Control tokens of a tokenizer: special ones, except that of unknown characters, and added ones such as
    `<tool_call>` that are no words."""

    def __init__(self, tokenizer: Any) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        template = str(getattr(tokenizer, "chat_template", None))
        own = backend.get_vocab(with_added_tokens=False) if hasattr(backend, "get_vocab") else {}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        roles = dict(getattr(tokenizer, "special_tokens_map", {}))
        unknown = roles.pop("unk_token", None)  # what unknown characters become
        roles.pop("pad_token", None)
        is_marker = unknown in roles.values() or str(unknown) in template
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        self.ids = {
            str(token): number
            for number, token in added.items()
            if (is_marker or str(token) != unknown)
            and (
                token.special
                or str(token) in special
                or not (str(token).isspace() or (str(token) in own and str(token) not in template))
            )
        }
        """Text → token id."""
        names = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        signs = {sign for name in names for sign in name if not (sign.isalnum() or sign.isspace() or sign == "_")}
        self.blanks = {ord(sign): _BLANK for sign in signs}
        """Table that replaces signs of control tokens, for `str.translate`."""
        self.begins = {name[:size] for name in names for size in range(1, len(name))}
        self.ends = {name[-size:] for name in names for size in range(1, len(name))}
        self._longest = max(map(len, names), default=1)
        self._prefix = f"q{secrets.token_hex(12)}"  # unguessable, and unchanged by templates and normalizers
        self._backend, self._lock = backend, threading.Lock()
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest token, at most."""

    def forged(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of a content that are control tokens, or parts of one at its ends."""
        found = [match.span() for match in self.pattern.finditer(text)]
        first, last = (found[0][0], found[-1][1]) if found else (len(text), 0)
        sizes = range(min(len(text), self._longest - 1), 0, -1)
        begin = next((size for size in sizes if size <= first and text[:size] in self.ends), 0)
        end = next((size for size in sizes if len(text) - size >= max(last, begin) and text[-size:] in self.begins), 0)
        yield from ([(0, begin)] if begin else [])
        yield from found
        yield from ([(len(text) - end, len(text))] if end else [])

    def encode(self, tokenizer: Any, rendered: Rendered, add_special_tokens: bool) -> list[int]:
        """Token ids; between control tokens those of the tokenizer for the whole text. An InputError if literal text
        cannot be kept apart."""
        text = rendered.text
        if not rendered.literal:
            written = [self.ids[found[0]] for found in self.pattern.finditer(text)]
            if self._control(_ids(tokenizer, text, False)) == written:
                return _ids(tokenizer, text, add_special_tokens)
        if self._twin is None:
            before, behind = _added(tokenizer) if add_special_tokens else ([], [])
            return [*before, *self._encode_apart(tokenizer, rendered), *behind]
        own = self._own_spans(tokenizer, rendered)
        if self._control(_ids(tokenizer, text, False)) == [self.ids[name] for _, _, name in own]:
            return _ids(tokenizer, text, add_special_tokens)  # none is read in literal text
        ends = [0, *(end for _, end, _ in own)]
        parts = [text[a:b] for a, b in zip(ends, [*(begin for begin, _, _ in own), len(text)], strict=True)]
        names = [*(name for _, _, name in own), ""]
        whole = "".join(part + (name and self._alias(name)) for part, name in zip(parts, names, strict=True))
        ids = self._by_twin(whole, add_special_tokens)
        added = len(_ids(tokenizer, "", True)) if add_special_tokens else 0
        # Words of the model, or of a normalizer, may be control tokens.
        if len(self._control(ids)) - len(own) not in (0, added):
            ids = self._by_twin("", add_special_tokens)
            for part, name in zip(parts, names, strict=True):
                ids += [*self._by_twin(part, False), *([self.ids[name]] if name else [])]
            if len(self._control(ids)) - len(own) not in (0, added):
                raise InputError("the tokenizer reads control tokens in the messages; remove them from their contents")
        return ids

    def _by_twin(self, text: str, add_special_tokens: bool) -> list[int]:
        assert self._twin is not None
        twin, back = self._twin
        ids = twin.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return [back.get(one, one) for one in ids]

    def _control(self, ids: Sequence[int]) -> list[int]:
        control = set(self.ids.values())
        return [one for one in ids if one in control]

    def _own_spans(self, tokenizer: Any, rendered: Rendered) -> list[tuple[int, int, str]]:
        """Begin, end and text of each control token outside of literal text."""
        text, names = rendered.text, {number: name for name, number in self.ids.items()}
        parts, at = list[str](), 0
        for begin, end in rendered.literal or ():
            parts += [text[at:begin], _FILLER * (end - begin)]
            at = end
        text = "".join((*parts, text[at:]))
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = []
        for token, (begin, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            if token in names and (at := text.find(names[token], begin, end)) >= 0:
                spans.append((at, at + len(names[token]), names[token]))
        return spans

    def _alias(self, name: str) -> str:
        return f"{self._prefix}{self.ids[name]:08d}q"

    @property
    def _twin(self) -> tuple[Any, dict[int, int]] | None:
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> tuple[Any, dict[int, int]] | None:
        """The tokenizer with other texts for its control tokens, and its ids of added tokens → the tokenizer's."""
        try:
            state = json.loads(self._backend.to_str())
        except Exception:  # noqa: BLE001 - none, or with parts in Python
            return None
        from tokenizers import Tokenizer

        model, alias = state["model"], {name: self._alias(name) for name in self.ids}
        if "merges" in model:
            pairs = (one.split(" ") if isinstance(one, str) else one for one in model["merges"])
            model["merges"] = [pair for pair in pairs if "".join(pair) not in alias]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {alias.get(piece, piece): number for piece, number in model["vocab"].items()}
        else:
            model["vocab"] = [[alias.get(piece, piece), score] for piece, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
        before = {token["content"]: token["id"] for token in state["added_tokens"]}
        for token in state["added_tokens"]:
            token["content"] = alias.get(token["content"], token["content"])
        state["truncation"] = state["padding"] = None
        twin: Any = Tokenizer.from_str(json.dumps(state))
        return twin, {twin.token_to_id(alias.get(name, name)): number for name, number in before.items()}

    def _encode_apart(self, tokenizer: Any, rendered: Rendered) -> list[int]:
        """As `encode`, literal parts one by one: for tokenizers written in Python."""
        ids, at, control = list[int](), 0, set(self.ids.values())
        for begin, end in rendered.literal or ():
            ids += _ids(tokenizer, rendered.text[at:begin], False)
            part = _ids(tokenizer, rendered.text[begin:end], False, split_special_tokens=True)
            if not control.isdisjoint(part):
                name = clipped(rendered.text[begin:end])
                raise InputError(f"the tokenizer reads {name} as a control token; remove it from the text")
            ids, at = [*ids, *part], end
        return [*ids, *_ids(tokenizer, rendered.text[at:], False)]


_known: weakref.WeakKeyDictionary[Any, tuple[Any, ControlTokens]] = weakref.WeakKeyDictionary()
_finding = threading.Lock()
_in_python = threading.Lock()
"""Held while a tokenizer written in Python encodes; others may encode in several threads."""


def control_tokens(tokenizer: Any) -> ControlTokens:
    """The control tokens of a tokenizer, found once."""
    state = len(tokenizer), str(getattr(tokenizer, "chat_template", None))
    with _finding:
        if tokenizer not in _known or _known[tokenizer][0] != state:
            _known[tokenizer] = state, ControlTokens(tokenizer)
        return _known[tokenizer][1]


def _ids(tokenizer: Any, text: str, add_special_tokens: bool, **options: Any) -> list[int]:
    if not text and not add_special_tokens:
        return []

    def encode() -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **options)["input_ids"]
        return found

    if getattr(tokenizer, "is_fast", False):
        return encode()
    with _in_python:
        return encode()


def tokenize(
    tokenizer: Any, rendered: Rendered, *, add_special_tokens: bool = False, literal: bool = False
) -> list[int]:
    """Token ids of a text, with `add_special_tokens` also those that the tokenizer adds to plain text, unless the text
    begins with them. `literal`: read no control tokens in the whole text."""
    if not literal and rendered.literal is None:
        ids = _ids(tokenizer, rendered.text, add_special_tokens)
    else:
        tokens = control_tokens(tokenizer)
        if literal:
            rendered = Rendered(rendered.text, tuple(tokens.forged(rendered.text)))
        ids = tokens.encode(tokenizer, rendered, add_special_tokens)
    if add_special_tokens and len(ids) > 1:
        before, _ = _added(tokenizer)
        size = len(before)
        if size and ids[:size] == before == ids[size : 2 * size]:
            return ids[size:]
    return ids


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that the tokenizer adds before and behind plain text."""
    word, both = _ids(tokenizer, "a", False), _ids(tokenizer, "a", True)
    begin = next((at for at in range(len(both)) if both[at : at + len(word)] == word), 0)
    return both[:begin], both[begin + len(word) :]
