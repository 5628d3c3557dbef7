"""Configuration: typed sections, strict loading (defaults < YAML file < dotlist overrides)."""

from specactor_ray.config.load import load_config, to_yaml
from specactor_ray.config.schema import Config

__all__ = ["Config", "load_config", "to_yaml"]
