"""The profile: measured costs and acceptance in a JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json, read_foreign
from specactor_ray.plan.costs import CostPoint, GridCost, cost_grids
from specactor_ray.plan.search import Method

KIND, SCHEMA = "specactor profile", 1

_KINDS = {"device": str, "model": dict, "hardware": dict, "versions": dict}
"""Entries that are checked besides costs and acceptance."""

_AGAIN = "Fix: measure it again: specactor profile --output NEW.json"


@dataclass(frozen=True)
class Profile:
    """Contents of a profile: the whole file, device count → V, and draft methods by name."""

    data: Mapping[str, Any]
    verify: Mapping[int, GridCost]
    methods: Mapping[str, Method]


def load_profile(path: str | Path) -> Profile:
    """Read a profile. InputError: the file does not exist, is damaged or incomplete, is no profile, or has another
    schema."""
    path = Path(path).expanduser()
    try:
        data = parse_json(read_foreign(path))
    except FileNotFoundError:
        raise InputError(f"profile: there is no file {path}. Fix: specactor profile --output {path}") from None
    except OSError as error:
        raise InputError(f"profile: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"profile: {path} is truncated or damaged: {error}. {_AGAIN}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"profile: {path} is no profile of specactor. {_AGAIN}")
    if data.get("schema") != SCHEMA:
        problem = f"has schema {data.get('schema')!r}, and this version reads schema {SCHEMA}"
        raise InputError(f"profile: {path} {problem}. {_AGAIN}")
    try:
        methods = {
            name: Method(_grids(entry["points"]), np.array([1.0, *entry["acceptance"]["survival"]]), entry["free"])
            for name, entry in data["methods"].items()
        }
        for name, kind in _KINDS.items():
            if not isinstance(data[name], kind):
                raise TypeError(f"{name} is {data[name]!r}")
        if not data["prompt_tokens"] > 0.0:
            raise ValueError(f"prompt_tokens is {data['prompt_tokens']}")
        return Profile(data, _grids(data["verify"]), methods)
    except (AttributeError, KeyError, TypeError, ValueError, InputError) as error:
        raise InputError(f"profile: {path} is not sound: {type(error).__name__}: {error}. {_AGAIN}") from None


def _grids(rows: Iterable[Mapping[str, Any]]) -> dict[int, GridCost]:
    points = [CostPoint(**{name: row[name] for name in CostPoint.__slots__}) for row in rows]
    if not all(0.0 < point.seconds < math.inf for point in points):
        raise ValueError("a step took no time, or without end")
    return cost_grids(points)
