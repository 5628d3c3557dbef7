"""Configuration: typed sections, strict loading (defaults < YAML file < dotlist overrides).

OmegaConf is imported with the first use of a name of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specactor_ray.config.load import load_config, to_yaml
    from specactor_ray.config.schema import Config

__all__ = ["Config", "load_config", "to_yaml"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specactor_ray.config' has no attribute {name!r}")
    from specactor_ray.config import load

    return getattr(load, name)
