"""Private parts of another package that this one uses, looked up in the imported package."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any


def lacking(parts: Mapping[str, Sequence[str]]) -> list[str]:
    """Parts that do not exist: path of a module or class → names in it; a function that gets arguments has their names,
    as in `step(batch)`."""
    return [f"{owner}.{name}" for owner, names in parts.items() for name in names if not _has(f"{owner}.{name}")]


def _has(part: str) -> bool:
    path, _, parameters = part.rstrip(")").partition("(")
    path, _, name = path.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    if parameters:
        found = getattr(owner, name, None)
        return callable(found) and set(parameters.split(", ")) <= set(inspect.signature(found).parameters)
    return hasattr(owner, name) or (inspect.isclass(owner) and any(_sets(one, name) for one in owner.__mro__))


def _sets(one: type[Any], name: str) -> bool:
    """Whether a class annotates a field, or its methods set the attribute."""
    if name in inspect.get_annotations(one):
        return True
    own = one.__module__ != "builtins" and re.search(rf"\bself\.{name}\b(: .+)? = ", _source(one))
    return bool(own)


def _source(one: type[Any]) -> str:
    try:
        return inspect.getsource(one)
    except (OSError, TypeError):  # a class without a file
        return ""
