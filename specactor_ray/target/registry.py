"""Target backends by name; each is imported at its first use."""

from __future__ import annotations

from specactor_ray.config.schema import TargetConfig
from specactor_ray.errors import ConfigError
from specactor_ray.target.base import TargetEngine

BACKENDS = ("hf", "vllm")


def build_engine(config: TargetConfig, device: str, max_drafts: int) -> TargetEngine:
    """Load the configured target.

    Args:
        config: Its section.
        device: `cpu` or `cuda`; vLLM takes the one that it was built for.
        max_drafts: Most draft tokens of a request in one step; 0 where none are ever verified.

    Raises:
        ConfigError: The backend is unknown, not installed, or of an untested version.
        ModelLoadError: The model cannot be loaded or served.
    """
    if config.backend == "hf":
        from specactor_ray.target.hf import HfEngine

        return HfEngine.from_config(config, device)
    if config.backend == "vllm":
        from specactor_ray.target.vllm import VllmEngine

        return VllmEngine.from_config(config, max_drafts)
    raise ConfigError("target.backend", f"unknown backend {config.backend!r}; known: {', '.join(BACKENDS)}.")
