"""Resolution of `${...}`, and a record of values from the environment, so that none is written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.metadata import version
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from omegaconf.resolvers import oc

from specactor_ray.core.errors import ConfigError, clipped

KeyPath = tuple[str | int, ...]
_IS_2_3 = version("omegaconf").startswith("2.3.")
_register: Any = getattr(OmegaConf, "register_new_resolver" if _IS_2_3 else "register_resolver")
"""OmegaConf 2.3 has another function under the name of 2.4."""
_FIX = "mend it, or what it refers to."


def texts(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield path and value of every text in dicts and lists."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from texts(value, (*path, key))


def references(tree: Any) -> list[tuple[KeyPath, str]]:
    """Path and text of every value with a `${...}`."""
    return [(path, text) for path, text in texts(tree) if "${" in text]


def resolve(tree: Any, node: Any) -> dict[KeyPath, str]:
    """Resolve the references of `tree`, as written by the user, in `node`, the OmegaConf configuration made of it.
    Returns path → text of those that read the environment, directly or through others.

    Raises:
        ConfigError: A reference cannot be resolved, or stands for a value of the wrong type.
    """
    reads: list[str] = []

    def read(name: str, *default: Any) -> Any:
        reads.append(name)
        return oc.env(name, *default)

    _register("oc.env", read, replace=True)
    found = {}
    try:
        for path, text in references(tree):
            reads.clear()
            _resolve_one(node, path, text)
            if reads:
                found[path] = text
    finally:
        _register("oc.env", oc.env, replace=True)
    return found


def _resolve_one(node: Any, path: KeyPath, text: str) -> None:
    """Resolve one reference. The errors of OmegaConf quote values resolved so far, which may be secrets."""
    try:
        value = value_at(node, path)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except ValidationError:
        raise ConfigError(dotted(path), f"{clipped(text)} stands for a value of the wrong type.", _FIX) from None
    except (OmegaConfBaseException, ArithmeticError, RecursionError, TypeError, ValueError):
        raise ConfigError(dotted(path), f"{clipped(text)} cannot be resolved.", _FIX) from None


def without_values(error: ConfigError, tree: Any) -> ConfigError:
    """The error with the text of a reference in place of its value."""
    key = f"{error.key}."
    for path, text in references(tree):
        other = f"{dotted(path)}."
        if key.startswith(other) or other.startswith(key):
            return ConfigError(error.key, f"{clipped(text)} stands for a value that is not allowed.", error.fix)
    return error


def dotted(path: KeyPath) -> str:
    """The path as a key."""
    return ".".join(map(str, path))


def value_at(node: Any, path: KeyPath) -> Any:
    """Value at a path of keys and indices in sections, dicts and lists, OmegaConf's or plain."""
    for part in path:
        node = getattr(node, str(part)) if is_dataclass(node) else node[part]
    return node
