"""Classes and functions of the user's own, which a key names as `package.module:name`."""

from __future__ import annotations

import importlib
import re
from typing import Any

from specactor_ray.errors import ConfigError, clipped, clipped_text

_PROPOSER = ("open", "commit_batch", "extend", "tails", "close")


def is_named(name: str) -> bool:
    """Whether it is of the form `package.module:name`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def import_named(name: str, key: str) -> Any:
    """What `package.module:name` names.

    Raises:
        ConfigError: It cannot be imported, whatever the module raises.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        problem = f"{clipped_text(name)} cannot be imported ({type(error).__name__}: {clipped_text(str(error))})."
        raise ConfigError(key, problem, "check the name, and that the module is on PYTHONPATH and imports.") from error


def require_proposer(name: str, key: str) -> Any:
    """The class of a proposer of the user's own.

    Raises:
        ConfigError: It cannot be imported, or is no proposer.
    """
    found = import_named(name, key)
    missing = [method for method in _PROPOSER if not hasattr(found, method)]
    if missing or not isinstance(found, type):
        lacks = f"it lacks {', '.join(missing)}" if missing else f"{clipped(found)} is not a class"
        fix = "derive it from specactor_ray.drafters.base.RowProposer."
        raise ConfigError(key, f"{clipped_text(name)} is no proposer: {lacks}.", fix)
    return found
