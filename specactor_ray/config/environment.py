"""Values that a configuration took from the environment, so that none of them is written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

Path = tuple[str | int, ...]


def from_environment(tree: Any, config: Any) -> dict[Path, tuple[str, Any]]:
    """Path of a key → (its `${...}` text, its value), for all that come from the environment, directly or not.

    Args:
        tree: What the user wrote, as dicts and lists, with its references.
        config: The configuration that was made of it.
    """
    references = {path: text for path, text in _texts(tree, ()) if "${" in text}
    found: set[Path] = {path for path, text in references.items() if "oc.env" in text}
    while True:
        names = [str(path[-1]) for path in found]
        more = {path for path, text in references.items() if any(name in text for name in names)} - found
        if not more:
            return {path: (references[path], value_at(config, path)) for path in found}
        found |= more


def value_at(node: Any, path: Path) -> Any:
    """What stands at a path of keys and indices in sections, dicts and lists, OmegaConf's or plain."""
    for part in path:
        node = getattr(node, str(part)) if is_dataclass(node) else node[part]
    return node


def _texts(node: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(value, (*path, key))
