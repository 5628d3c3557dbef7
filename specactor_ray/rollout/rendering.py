"""Chat messages as text by the model's chat template, so that only the template writes control tokens."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from specactor_ray.core.errors import InputError, clipped
from specactor_ray.rollout.literal import ControlTokens, Rendered, control_tokens

_ROLES = {"system", "user", "assistant", "tool", "developer", "function", "ipython", "environment", "observation"}
"""Roles from which a template may compose a control token, such as `<|user|>`; any other role is literal text."""
_SEARCHES = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "count"}
_SEARCHES |= {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace"}
"""Methods and filters that search their first argument in a text and do not write it."""
_COMPARISONS = {"==", "!=", "in"}
_QUOTED = re.compile(r"'([^'\\\n]*\w[^'\\\n]*)'|\"([^\"\\\n]*\w[^\"\\\n]*)\"")
"""A text in a template's source, on which the template may depend."""


class _Marks:
    """Unguessable words in place of texts, which are found again in the rendered conversation."""

    def __init__(self) -> None:
        self._prefix = f"z{secrets.token_hex(12)}"
        self._texts: list[tuple[str, bool]] = []
        """Text, and whether it is the template's own."""

    def put(self, text: str, is_own: bool = False) -> str:
        self._texts.append((text, is_own))
        return f"{self._prefix}{len(self._texts) - 1:06d}z"

    def split(self, marked: str) -> list[str]:
        """Texts between marks, and numbers of marks, by turns."""
        return re.split(rf"{self._prefix}(\d{{6}})z", marked)

    def find(self, marked: str, text: str) -> list[tuple[int, int, bool | None]] | None:
        """Begin and end in `text` of each marked text and whether it is the template's, and of the text between them
        (None); None if the two renderings differ elsewhere."""
        spans: list[tuple[int, int, bool | None]] = []
        at = 0
        for number, part in enumerate(self.split(marked)):
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
    written = text if marked == ([*messages], template) else _written(tokenizer, *marked)
    spans = None if written is None else marks.find(written, text)
    if spans is None or written is None:
        return Rendered(text, tuple(_literal_beside_own(tokenizer, tokens, messages, template, text)))
    literal = [(begin, end) for begin, end, kind in spans if kind is False]
    blank = _blanked(tokenizer, tokens, *marked)
    if blank != marked:
        literal += _joined(tokens, marks, spans, written, _written(tokenizer, *blank) or "")
    return Rendered(text, tuple(sorted(literal)))


def _joined(
    tokens: ControlTokens, marks: _Marks, spans: Sequence[tuple[int, int, Any]], written: str, blank: str
) -> Iterator[tuple[int, int]]:
    """Control tokens that the template has put together from parts of contents: those that it does not write when
    signs of the contents are replaced."""
    parts, others = marks.split(written)[::2], marks.split(blank)[::2]
    if len(parts) != len(others):
        raise _unreadable(tokens.pattern.findall(written))
    for (begin, _, _), part, other in zip(spans[::2], parts, others, strict=True):
        if len(other) == len(part):
            found = tokens.pattern.finditer(part)
            yield from ((begin + a, begin + b) for a, b in (one.span() for one in found) if other[a:b] != part[a:b])
        elif (names := tokens.pattern.findall(part)) != tokens.pattern.findall(other):
            raise _unreadable(names)


def _blanked(
    tokenizer: Any, tokens: ControlTokens, messages: Sequence[Any], template: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Messages and arguments without the signs of control tokens, except in texts on which the template may depend."""
    source = tokenizer.get_chat_template(template.get("chat_template"), template.get("tools"))
    quoted = sorted({one or other for one, other in _QUOTED.findall(source)}, key=len, reverse=True)
    kept = re.compile("(" + "|".join(map(re.escape, quoted)) + ")" if quoted else "((?!))")

    def blanked(text: str) -> str:
        parts = kept.split(text)
        parts[::2] = [one.translate(tokens.blanks) for one in parts[::2]]
        return "".join(parts)

    return [_mapped(one, blanked) for one in messages], {name: _mapped(one, blanked) for name, one in template.items()}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value with each of its texts, names included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(one, change) for name, one in value.items()}
    return [_mapped(one, change) for one in value] if isinstance(value, list | tuple) else value


def _unreadable(names: Sequence[str]) -> InputError:
    found = clipped(", ".join(sorted(names)))
    return InputError(
        f"the model's chat template changes messages that hold control tokens ({found}), so that they cannot be read "
        "as text; remove them from the contents"
    )


def _literal_beside_own(
    tokenizer: Any, tokens: ControlTokens, messages: Sequence[Any], template: dict[str, Any], text: str
) -> Iterator[tuple[int, int]]:
    """Literal parts where the template looks for control tokens in contents: its own are marked in its source."""
    source, marks = tokenizer.get_chat_template(template.get("chat_template"), template.get("tools")), _Marks()
    marked, more = _marked(messages, template, tokens, marks, lambda name: name not in source)
    own = {name: marks.put(value, True) for name, value in tokenizer.special_tokens_map.items() if value in tokens.ids}
    changed = {**own, **more, "chat_template": _with_own_marked(source, tokens, marks)}
    written = _written(tokenizer, marked, changed)
    spans = None if written is None else marks.find(written, text)
    if spans is None:
        raise _unreadable([*{one[0] for one in map(tokens.pattern.search, texts_of(messages)) if one}])
    for begin, end, kind in spans:
        if kind is False:
            yield begin, end
        elif kind is None:
            found = tokens.pattern.finditer(text[begin:end])
            yield from ((begin + one.start(), begin + one.end()) for one in found if one[0] in source)


def _written(tokenizer: Any, messages: Any, template: dict[str, Any]) -> str | None:
    try:
        return apply_template(tokenizer, messages, template)
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

    def marked(value: str) -> str:
        parts, at = list[str](), 0
        for begin, end in tokens.forged(value):
            if which(value[begin:end]):
                parts += [value[at:begin], marks.put(value[begin:end])]
                at = end
        return "".join((*parts, value[at:]))

    def with_role(message: Mapping[str, Any], whole: Any) -> Any:
        role = message.get("role")
        if not isinstance(role, str) or role in _ROLES or not which(role):
            return whole
        return {**whole, "role": marks.put(role)}

    arguments = {name: _mapped(one, marked) for name, one in template.items()}
    return [with_role(one, _mapped(one, marked)) for one in messages], arguments


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
