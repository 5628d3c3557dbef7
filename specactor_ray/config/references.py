"""Resolution of `${...}`, and a record of values from the environment, so that none is written to a file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib.metadata import version
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from specactor_ray.core.errors import ConfigError, clipped

KeyPath = tuple[str | int, ...]
_IS_2_3 = version("omegaconf").startswith("2.3.")
_register: Any = getattr(OmegaConf, "register_new_resolver" if _IS_2_3 else "register_resolver")
"""OmegaConf 2.3 has another function under the name of 2.4."""


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


def resolved(tree: Any, whole: Callable[[], Any]) -> tuple[Any, dict[KeyPath, str]]:
    """A tree with values in place of references, and path → text of those that read the environment, directly or
    through others. `whole` makes the tree with the defaults, to which they refer. ConfigError: a reference cannot be
    resolved."""
    written = references(tree)
    if not written:
        return tree, {}
    reads: list[str] = []

    def read(name: str, *default: Any) -> Any:
        reads.append(name)
        return oc.env(name, *default)

    found, from_environment, path = copy.deepcopy(tree), {}, written[0][0]
    _register("oc.env", read, replace=True)
    try:
        for path, _ in written:
            OmegaConf.create([value_at(tree, path)])
        node = OmegaConf.create(whole(), flags={"allow_objects": True})
        for path, text in written:
            reads.clear()
            value = value_at(node, path)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            value_at(found, path[:-1])[path[-1]] = value
            if reads:
                from_environment[path] = text
    except (OmegaConfBaseException, ArithmeticError, RecursionError, TypeError, ValueError):
        # The errors of OmegaConf quote values resolved so far, which may be secrets.
        text = clipped(dict(written)[path])
        raise ConfigError(dotted(path), f"{text} cannot be resolved.", "mend it, or what it refers to.") from None
    finally:
        _register("oc.env", oc.env, replace=True)
    return found, from_environment


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
