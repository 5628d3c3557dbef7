"""Descriptions of the configuration keys, read from `schema.py` itself: types, defaults and attribute docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from specactor_ray.config.schema import Config
from specactor_ray.core.errors import InputError


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


def describe(config_class: type = Config, prefix: str = "") -> Iterator[KeyDoc]:
    """All keys of a section and of its subsections, in the order of the schema (sections themselves left out)."""
    hints, docs = field_types(config_class), attribute_docstrings(config_class)
    for field in fields(config_class):
        key, annotation = prefix + field.name, hints[field.name]
        if is_dataclass(annotation):
            yield from describe(_section_class(annotation), f"{key}.")
            continue
        yield KeyDoc(key, type_in_words(annotation), default_of(field), docs.get(field.name, ""))
        element = list_element(annotation)
        if is_dataclass(element):
            yield from describe(_section_class(element), f"{key}.N.")


def matching_keys(words: Sequence[str]) -> list[KeyDoc]:
    """Keys that contain one of the words, ignoring case, or all keys if there are no words; if no key matches, those
    whose meaning contains one.

    Raises:
        InputError: No key and no meaning matches.
    """
    keys, wanted = list(describe()), [word.lower() for word in words]
    if not wanted:
        return keys
    found = [one for one in keys if any(word in one.key.lower() for word in wanted)]
    found = found or [one for one in keys if any(word in one.doc.lower() for word in wanted)]
    if not found:
        raise InputError(f"--help-keys: no key and no meaning of one contains {', '.join(words)[:80]!r}; try one word")
    return found


def _section_class(annotation: Any) -> type:
    return typing.cast(type, annotation)


@functools.cache
def field_types(config_class: type) -> Mapping[str, Any]:
    """Field name → resolved annotation."""
    return typing.get_type_hints(config_class)


def default_of(field: Field[Any]) -> Any:
    """The default of a dataclass field, from its factory if it has one; None without a default."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else list(field.default) if field.default == () else field.default


def list_element(annotation: Any) -> Any:
    """Element type of `list[...]` and `tuple[..., ...]`; None for any other annotation."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) in (list, tuple) else None


def without_none(annotation: Any) -> tuple[Any, bool]:
    """`(int, True)` for `int | None`, `(int, False)` for `int`."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    rest = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    return rest[0], True


def type_in_words(annotation: Any) -> str:
    """Values that an annotation allows, in words for messages and help."""
    inner, optional = without_none(annotation)
    null = ", auto or null" if inner in (int, float) else ", or null"
    suffix = null if optional else ""
    if list_element(inner) is not None:
        return f"a list ({type_in_words(list_element(inner))} each){suffix}"
    if is_dataclass(inner):
        return f"a section with the keys {', '.join(field.name for field in fields(_section_class(inner)))}{suffix}"
    if isinstance(inner, type) and issubclass(inner, Enum):
        return f"one of {', '.join(inner.__members__)}{suffix}"
    if typing.get_origin(inner) is dict:
        return f"a section with keys of your own{suffix}"
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return words.get(inner, getattr(inner, "__name__", str(inner))) + suffix


@functools.cache
def attribute_docstrings(config_class: type) -> dict[str, str]:
    """Field name → the string literal that follows the field in the source, white space collapsed."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(definition.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
