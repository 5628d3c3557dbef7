"""Contents of chat messages as literal text: rendered by the model's chat template, tokenized so that only the template
writes control tokens."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from specactor_ray.core.errors import InputError, clipped

_ROLES = {"system", "user", "assistant", "tool", "developer", "function", "ipython", "environment", "observation"}
"""Roles from which a template may compose a control token, such as `<|user|>`; any other role is literal text."""
_SEARCHES = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "count"}
_SEARCHES |= {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace"}
"""Methods and filters whose (first) argument is searched in a text, and not written."""
_COMPARISONS = {"==", "!=", "in"}
_FILLER = "."
"""Stands for literal text where only control tokens are looked for."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    literal: tuple[tuple[int, int], ...] = ()
    """Begin and end of parts in which no control token may be read, in order."""

    def __getitem__(self, part: slice) -> Rendered:
        begin = part.start or 0
        spans = ((max(a - begin, 0), b - begin) for a, b in self.literal if b > begin)
        return Rendered(self.text[begin:], tuple(spans))


class ControlTokens:
    """Control tokens of a tokenizer: special ones, and added ones such as `<tool_call>` that are no words."""

    def __init__(self, tokenizer: Any) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        template = str(getattr(tokenizer, "chat_template", None))
        own = backend.get_vocab(with_added_tokens=False) if hasattr(backend, "get_vocab") else {}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.ids = {
            str(token): number
            for number, token in added.items()
            if token.special or not (str(token).isspace() or (str(token) in own and str(token) not in template))
        }
        """Text → token id."""
        names = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
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
        if not rendered.literal:
            return list(_ids(tokenizer, rendered.text, add_special_tokens))
        if self._twin is None:
            return self._encode_apart(tokenizer, rendered)
        text, own = rendered.text, self._own_spans(tokenizer, rendered)
        if self._control(_ids(tokenizer, text, False)) == [self.ids[name] for _, _, name in own]:
            return _ids(tokenizer, text, add_special_tokens)  # none is read in literal text
        ends = [0, *(end for _, end, _ in own)]
        parts = [text[a:b] for a, b in zip(ends, [*(begin for begin, _, _ in own), len(text)], strict=True)]
        names = [*(name for _, _, name in own), ""]
        whole = "".join(part + (name and self._alias(name)) for part, name in zip(parts, names, strict=True))
        ids = self._by_twin(whole, add_special_tokens)
        added = len(_ids(tokenizer, "", True)) if add_special_tokens else 0
        if len(self._control(ids)) - len(own) not in (
            0,
            added,
        ):  # words of the model, or of a normalizer
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
        for begin, end in rendered.literal:
            text = f"{text[:begin]}{_FILLER * (end - begin)}{text[end:]}"
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
        for begin, end in rendered.literal:
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
    """Token ids of a text. What the tokenizer adds in front, such as BOS, is not repeated if the text begins with it.

    Args:
        tokenizer: A transformers tokenizer.
        rendered: The text.
        add_special_tokens: Add those that the tokenizer adds to plain text.
        literal: Read no control tokens in the whole text.
    """
    if not (literal or rendered.literal):
        ids = _ids(tokenizer, rendered.text, add_special_tokens)
    else:
        tokens = control_tokens(tokenizer)
        if literal:
            rendered = Rendered(rendered.text, tuple(tokens.forged(rendered.text)))
        ids = tokens.encode(tokenizer, rendered, add_special_tokens)
    if add_special_tokens and len(ids) > 1:
        word, both = _ids(tokenizer, "a", False), _ids(tokenizer, "a", True)
        size = next((at for at in range(len(both)) if both[at : at + len(word)] == word), 0)
        if size and ids[:size] == both[:size] == ids[size : 2 * size]:
            return ids[size:]
    return ids


# ---- rendering ----


class _Marks:
    """Unguessable words in place of texts, which are found again in the rendered conversation."""

    def __init__(self) -> None:
        self._prefix = f"z{secrets.token_hex(12)}"
        self._texts: list[tuple[str, bool]] = []
        """Text, and whether it is the template's own."""

    def put(self, text: str, is_own: bool = False) -> str:
        self._texts.append((text, is_own))
        return f"{self._prefix}{len(self._texts) - 1:06d}z"

    def find(self, marked: str, text: str) -> list[tuple[int, int, bool | None]] | None:
        """Begin and end in `text` of each marked text and whether it is the template's, and of the text between them
        (None); None if the two renderings differ elsewhere."""
        spans: list[tuple[int, int, bool | None]] = []
        at = 0
        for number, part in enumerate(re.split(rf"{self._prefix}(\d{{6}})z", marked)):
            forms, kind = [part], None
            if number % 2:
                whole, kind = self._texts[int(part)]
                forms = [whole, json.dumps(whole)[1:-1], json.dumps(whole, ensure_ascii=False)[1:-1]]
            form = next((one for one in forms if text.startswith(one, at)), None)
            if form is None:
                return None
            spans.append((at, at + len(form), kind))
            at += len(form)
        return spans if at == len(text) else None


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any) -> Rendered:
    """Chat messages as text by the model's template, with the parts of their contents that must be read literally.

    An InputError if the template refuses the messages, or reads such a part in a way that cannot be followed.
    `template` are more arguments of `apply_chat_template`.
    """
    template = {"add_generation_prompt": True, "strftime_now": datetime.now().strftime, **template}
    text = apply_template(tokenizer, messages, template)
    tokens, marks = control_tokens(tokenizer), _Marks()
    marked = _marked(messages, template, tokens, marks, lambda _: True)
    if marked == ([*messages], template):
        return Rendered(text)
    spans = _spans(marks, tokenizer, text, *marked)
    if spans is not None:
        return Rendered(text, tuple((begin, end) for begin, end, kind in spans if kind is False))
    return Rendered(text, tuple(_literal_beside_own(tokenizer, tokens, messages, template, text)))


def _literal_beside_own(
    tokenizer: Any, tokens: ControlTokens, messages: Sequence[Any], template: dict[str, Any], text: str
) -> Iterator[tuple[int, int]]:
    """Literal parts where the template looks for control tokens in contents: its own are marked in its source."""
    source, marks = tokenizer.get_chat_template(template.get("chat_template"), template.get("tools")), _Marks()
    marked, more = _marked(messages, template, tokens, marks, lambda name: name not in source)
    own = {name: marks.put(value, True) for name, value in tokenizer.special_tokens_map.items() if value in tokens.ids}
    changed = {**own, **more, "chat_template": _with_own_marked(source, tokens, marks)}
    spans = _spans(marks, tokenizer, text, marked, changed)
    if spans is None:
        names = sorted({one[0] for one in map(tokens.pattern.search, texts_of(messages)) if one})
        raise InputError(
            f"the model's chat template changes messages that hold control tokens ({clipped(', '.join(names))}), so "
            "that they cannot be read as text; remove them from the contents"
        )
    for begin, end, kind in spans:
        if kind is False:
            yield begin, end
        elif kind is None:
            found = tokens.pattern.finditer(text[begin:end])
            yield from ((begin + one.start(), begin + one.end()) for one in found if one[0] in source)


def _spans(marks: _Marks, tokenizer: Any, text: str, messages: Any, template: dict[str, Any]) -> Any:
    try:
        return marks.find(apply_template(tokenizer, messages, template), text)
    except InputError:  # a marked text matters to the template
        return None


def _marked(
    messages: Sequence[Any],
    template: dict[str, Any],
    tokens: ControlTokens,
    marks: _Marks,
    which: Callable[[str], bool],
) -> tuple[list[Any], dict[str, Any]]:
    """Messages and arguments with marks in place of control tokens, as far as `which`, and of unusual roles."""

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            parts, at = "", 0
            for begin, end in tokens.forged(value):
                if which(value[begin:end]):
                    parts, at = f"{parts}{value[at:begin]}{marks.put(value[begin:end])}", end
            return parts + value[at:]
        if isinstance(value, Mapping):
            return {marked(name): marked(one) for name, one in value.items()}
        return [marked(one) for one in value] if isinstance(value, list | tuple) else value

    def with_role(message: Mapping[str, Any], whole: Any) -> Any:
        role = message.get("role")
        if not isinstance(role, str) or role in _ROLES or not which(role):
            return whole
        return {**whole, "role": marks.put(role)}

    return [with_role(one, marked(one)) for one in messages], {name: marked(one) for name, one in template.items()}


def _with_own_marked(source: str, tokens: ControlTokens, marks: _Marks) -> str:
    """Source of a template with marks in place of the control tokens that it writes, not of those that it looks for."""
    from jinja2 import Environment

    lexed = Environment(trim_blocks=True, lstrip_blocks=True).lex(source)
    words = [(kind, value) for _, kind, value in lexed]
    calls: list[str] = []
    parts = []
    solid = [number for number, (kind, _) in enumerate(words) if kind != "whitespace"]
    beside = {at: (before, after) for before, at, after in zip([None, *solid], solid, [*solid[1:], None], strict=False)}
    for number, (kind, value) in enumerate(words):
        before, after = beside.get(number, (None, None))
        previous, following = ("" if one is None else words[one][1] for one in (before, after))
        if kind == "operator" and value == "(":
            calls.append(previous)
        elif kind == "operator" and value == ")" and calls:
            calls.pop()
        elif kind == "operator" and value == "," and calls and calls[-1] == "replace":
            calls[-1] = ""
        is_searched = bool(calls and calls[-1] in _SEARCHES) or not _COMPARISONS.isdisjoint((previous, following))
        if kind == "data" or (kind == "string" and not is_searched and following != "not"):
            value = tokens.pattern.sub(lambda found: marks.put(found[0], True), value)
        parts.append(value)
    return "".join(parts)


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(texts_of, (*value.keys(), *value.values())))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(texts_of, value))


def apply_template(tokenizer: Any, messages: Any, template: Mapping[str, Any]) -> str:
    """The text that the template writes; InputError if it refuses the messages."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **template)
    except Exception as error:  # templates are code of the checkpoint and raise any exception
        raise InputError(f"the model's chat template refuses these messages: {error}") from error
    return text
