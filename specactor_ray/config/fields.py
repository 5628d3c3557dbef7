"""Fields of configuration sections: their allowed values, and their description for messages and help."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

from specactor_ray.core.errors import ConfigError, InputError, clipped, did_you_mean

_CHECK, _NO_AUTO = "check", "no auto"

# ---- allowed values ----


def limited(allows: Callable[[Any], bool], fix: str, default: Any, auto: bool = True) -> Any:
    """A field of values that `allows` accepts, and null if its type has it. `auto`: see `takes_auto`."""

    def check(key: str, value: Any) -> None:
        if not allows(value):
            raise ConfigError(key, f"{clipped(value)} is out of range.", fix)

    return field(default=default, metadata={_CHECK: check, _NO_AUTO: not auto})


def at_least(smallest: int, default: Any, auto: bool = True) -> Any:
    """A number of `smallest` or more, below 2**31: larger ones overflow arrays, timers or Ray's resources."""
    return limited(lambda value: smallest <= value < 2**31, f"use {smallest} or more, below 2**31.", default, auto)


def takes_auto(one: Field[Any]) -> bool:
    """Whether the word auto stands for null. It does not where null means none or no limit."""
    return not one.metadata.get(_NO_AUTO)


def positive(default: Any, up_to: float = 1e9) -> Any:
    """A number above 0 and at most `up_to`."""
    return limited(lambda value: 0.0 < value <= up_to, f"use a number above 0 and at most {up_to:g}.", default)


def checked(check: Callable[[str, Any], None], default: Any = None) -> Any:
    """A field whose values, but for null, `check(key, value)` accepts, or else raises ConfigError."""
    return field(default=default, metadata={_CHECK: check})


def one_of(allowed: Collection[str], default: str) -> Any:
    """A text from a list."""
    return field(default=default, metadata={_CHECK: partial(reject_unlisted, allowed=allowed)})


def reject_unlisted(key: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        problem = f"{clipped(value)} is not known.{did_you_mean(value, allowed)}"
        raise ConfigError(key, problem, f"use one of {', '.join(allowed)}.")


def not_empty(default: str | None = None, factory: Callable[[], str] | None = None) -> Any:
    """A path or an address."""
    checked = {_CHECK: _reject_empty}
    return field(default_factory=factory, metadata=checked) if factory else field(default=default, metadata=checked)


def _reject_empty(key: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(key, "is empty.", "name it, or leave the key out for its default.")


def reject_values_not_allowed(section: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first value in a section or its subsections that its field does not allow. Keys begin
    with `prefix`."""
    for one in fields(section):
        key, value, check = prefix + one.name, getattr(section, one.name), one.metadata.get(_CHECK)
        sections = enumerate(value) if isinstance(value, list) else ()
        for place, element in (("", value), *((f".{index}", element) for index, element in sections)):
            if is_dataclass(element):
                reject_values_not_allowed(element, f"{key}{place}.")
        if check is not None and value is not None:
            check(key, value)


# ---- description ----


@dataclass(frozen=True)
class KeyDoc:
    """Type, default and meaning of one key."""

    key: str
    """Dotted key; an element of a list of sections is written `drafters.N`."""
    type: str
    """Allowed values in words, for example `an integer, or null`."""
    default: Any
    doc: str
    """The attribute docstring on one line."""


def describe(section: Any, prefix: str = "") -> Iterator[KeyDoc]:
    """All keys of a section and of its subsections, in the order of the schema (sections themselves left out)."""
    hints, docs = field_types(section), attribute_docstrings(section)
    for one in fields(section):
        key, annotation = prefix + one.name, hints[one.name]
        if is_dataclass(annotation):
            yield from describe(annotation, f"{key}.")
            continue
        yield KeyDoc(key, type_in_words(annotation, takes_auto(one)), default_of(one), docs.get(one.name, ""))
        element = list_element(annotation)
        if is_dataclass(element):
            yield from describe(element, f"{key}.N.")


def matching_keys(section: type, words: Sequence[str]) -> list[KeyDoc]:
    """Keys that contain one of the words, ignoring case, or all keys if there are no words; if no key matches, those
    with one in their meaning. InputError: no key and no meaning matches."""
    keys, wanted = list(describe(section)), [word.lower() for word in words]
    if not wanted:
        return keys
    found = [one for one in keys if any(word in one.key.lower() for word in wanted)]
    found = found or [one for one in keys if any(word in one.doc.lower() for word in wanted)]
    if not found:
        raise InputError(f"--help-keys: no key and no meaning of one contains {', '.join(words)[:80]!r}; try one word")
    return found


@functools.cache
def field_types(section: Any) -> Mapping[str, Any]:
    """Field name → resolved annotation."""
    return typing.get_type_hints(section)


def default_of(one: Field[Any]) -> Any:
    """The default of a dataclass field, from its factory if it has one; None without a default."""
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else list(one.default) if one.default == () else one.default


def list_element(annotation: Any) -> Any:
    """Element type of `list[...]` and `tuple[..., ...]`; None for any other annotation."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) in (list, tuple) else None


def without_none(annotation: Any) -> tuple[Any, bool]:
    """`(int, True)` for `int | None`, `(int, False)` for `int`."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    rest = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    return rest[0], True


def choices(annotation: Any) -> list[str]:
    """Names of an enum's members; empty for any other annotation."""
    kind, _ = without_none(annotation)
    return list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []


def type_in_words(annotation: Any, auto: bool = True) -> str:
    """Values that an annotation allows, in words for messages and help. `auto`: see `takes_auto`."""
    inner, optional = without_none(annotation)
    null = ", auto or null" if auto and inner in (int, float) else ", or null"
    suffix = null if optional else ""
    if list_element(inner) is not None:
        return f"a list ({type_in_words(list_element(inner))} each){suffix}"
    if is_dataclass(inner):
        return f"a section with the keys {', '.join(one.name for one in fields(inner))}{suffix}"
    if names := choices(inner):
        return f"one of {', '.join(names)}{suffix}"
    if typing.get_origin(inner) is dict:
        return f"a section with keys of your own{suffix}"
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return words.get(inner, str(inner)) + suffix


@functools.cache
def attribute_docstrings(section: Any) -> dict[str, str]:
    """Field name → the string literal that follows the field in the source, white space collapsed."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(definition.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
