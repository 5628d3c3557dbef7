"""Target backends by name; each is imported at its first use."""

from __future__ import annotations

from dataclasses import replace

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.environment import fitting_dtype
from specactor_ray.core.errors import ConfigError
from specactor_ray.models.cache_size import GIB, cache_bytes, room_here
from specactor_ray.target.base import TargetEngine

BACKENDS = ("hf", "vllm")


def build_engine(config: TargetConfig, device: str, max_drafts: int, hosted: float = 0.0) -> TargetEngine:
    """Load the configured target.

    Args:
        config: The target's section; default data type and cache size depend on the device.
        device: `cpu` or `cuda`; vLLM uses the device of its build.
        max_drafts: Most draft tokens of a request in one step; 0 if none are ever verified.
        hosted: Bytes of the GPU for drafters beside the engine.

    Raises:
        ConfigError: The backend is unknown, not installed, or has an untested version.
        ModelLoadError: The model cannot be loaded or served.
    """
    config = replace(config, dtype=fitting_dtype(config.dtype, device != "cpu", config.backend))
    if config.kv_cache_gb is None:
        config = replace(config, kv_cache_gb=cache_bytes(config, room_here(config, hosted)) / GIB)
    if config.backend == "hf":
        from specactor_ray.target.hf import HfEngine

        return HfEngine.from_config(config, device)
    if config.backend == "vllm":
        from specactor_ray.target.vllm import VllmEngine

        return VllmEngine(config, max_drafts)
    raise ConfigError("target.backend", f"unknown backend {config.backend!r}; known: {', '.join(BACKENDS)}.")
