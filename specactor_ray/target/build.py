"""The configured target engine."""

from __future__ import annotations

from dataclasses import replace

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.machine import fitting_dtype
from specactor_ray.target.base import TargetEngine


def build_engine(config: TargetConfig, device: str, max_drafts: int, hosted: float = 0.0) -> TargetEngine:
    """Load the configured target. ModelLoadError: its model cannot be loaded or served. ConfigError: of `require_vllm`.

    `device`: `cpu` or `cuda`; vLLM uses the device of its build. `max_drafts`: most draft tokens of a request in one
    step, 0 if none are ever verified. `hosted`: bytes of the GPU for drafters beside the engine.
    """
    from specactor_ray.models.cache_size import GIB, cache_bytes, room_here

    config = replace(config, dtype=fitting_dtype(config.dtype, device != "cpu", config.backend))
    if config.kv_cache_gb is None:
        config = replace(config, kv_cache_gb=cache_bytes(config, room_here(config, hosted)) / GIB)
    if config.backend == "vllm":
        from specactor_ray.target.vllm import VllmEngine
        from specactor_ray.target.vllm_cpu import use_interpreter
        from specactor_ray.target.vllm_proof import LoadProof

        use_interpreter()  # transformers imports Triton, too
        proof = LoadProof(config)
        engine = VllmEngine(config, max_drafts)
        try:
            proof.require(engine)
        except BaseException:
            engine.close()
            raise
        return engine
    from specactor_ray.target.hf import HfEngine

    return HfEngine.from_config(config, device)
