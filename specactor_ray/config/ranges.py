"""Fields of configuration sections that declare their allowed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import field, fields, is_dataclass
from functools import partial
from typing import Any

from specactor_ray.core.errors import ConfigError, clipped, did_you_mean

_CHECK = "check"


def limited(allows: Callable[[Any], bool], problem: str, fix: str, default: Any) -> Any:
    """A field of values that `allows` accepts, and null; `problem` follows the value in the error."""

    def check(key: str, value: Any) -> None:
        if not allows(value):
            raise ConfigError(key, f"{clipped(value)} {problem}", fix)

    return field(default=default, metadata={_CHECK: check})


def at_least(smallest: int, default: Any) -> Any:
    """A count."""
    return limited(lambda value: value >= smallest, "is too small.", f"use {smallest} or more.", default)


def positive(default: Any, fix: str = "use a number above 0.") -> Any:
    """A finite number above 0."""
    return limited(lambda value: 0.0 < value < math.inf, "is not a finite number above 0.", fix, default)


def above_zero(default: Any, up_to: float = math.inf) -> Any:
    """A finite number above 0 and at most `up_to`."""
    limit = "" if up_to == math.inf else f" and at most {up_to:g}"
    fix = f"use a number above 0{limit}."
    return limited(lambda value: 0.0 < value <= up_to and value < math.inf, "is out of range.", fix, default)


def not_negative(default: Any) -> Any:
    """A finite number of 0 or more."""
    return limited(lambda value: 0.0 <= value < math.inf, "is out of range.", "use 0 or more.", default)


def below_one(default: Any) -> Any:
    """A number from 0 to below 1."""
    return limited(lambda value: 0.0 <= value < 1.0, "is out of range.", "use 0 to below 1.", default)


def one_of(allowed: Collection[str], default: str) -> Any:
    """A text from a list."""
    return field(default=default, metadata={_CHECK: partial(reject_unlisted, allowed=allowed)})


def reject_unlisted(key: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        problem = f"{clipped(value)} is not known.{did_you_mean(value, allowed)}"
        raise ConfigError(key, problem, f"use one of {', '.join(allowed)}.")


def not_empty(default: str | None = None) -> Any:
    """A path or an address."""
    return field(default=default, metadata={_CHECK: _reject_empty})


def _reject_empty(key: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(key, "is empty.", "name it, or leave the key out for its default.")


def reject_values_not_allowed(section: Any, prefix: str, left_out: Collection[str] = ()) -> None:
    """Raises ConfigError for the first value in a section or its subsections (not in lists) that its field does not
    allow. Keys begin with `prefix`; fields in `left_out` are not checked."""
    for one in fields(section):
        key, value, check = prefix + one.name, getattr(section, one.name), one.metadata.get(_CHECK)
        if one.name in left_out or value is None:
            continue
        if is_dataclass(value):
            reject_values_not_allowed(value, f"{key}.")
        elif check is not None:
            check(key, value)
