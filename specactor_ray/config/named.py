"""User classes and functions, which a key names as `package.module:name`."""

from __future__ import annotations

import importlib
import re
from typing import Any

from specactor_ray.core.errors import ConfigError, clipped_text


def is_named(name: str) -> bool:
    """Whether the name has the form `package.module:name`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def import_named(name: str, key: str) -> Any:
    """Import the object that `package.module:name` names.

    Raises:
        ConfigError: It cannot be imported, for any error of the module.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        problem = f"{clipped_text(name)} cannot be imported ({type(error).__name__}: {clipped_text(str(error))})."
        raise ConfigError(key, problem, "check the name, and that the module is on PYTHONPATH and imports.") from error
