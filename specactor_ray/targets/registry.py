"""Target backends by name; each is imported only when it is asked for."""

from __future__ import annotations

from specactor_ray.config.schema import TargetConfig
from specactor_ray.errors import ConfigError
from specactor_ray.targets.base import TargetEngine

BACKENDS = ("hf",)


def build_engine(config: TargetConfig, device: str) -> TargetEngine:
    """Load the configured target onto `device` (`cpu` or `cuda`).

    Raises:
        ConfigError: The backend is unknown.
        ModelLoadError: The model cannot be loaded or served.
    """
    if config.backend == "hf":
        from specactor_ray.targets.hf import HfEngine

        return HfEngine.from_config(config, device)
    raise ConfigError("target.backend", f"unknown backend {config.backend!r}; known: {', '.join(BACKENDS)}.")
