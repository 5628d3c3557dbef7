"""The configured target engine."""

from __future__ import annotations

from specactor_ray.config.schema import AUTO, TargetConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.target.base import TargetEngine


def build_engine(config: TargetConfig, device: str, max_drafts: int) -> TargetEngine:
    """Load the target of a settled section. ModelLoadError: its model cannot be loaded or served. ConfigError: of
    `require_vllm`, or a value is still `auto`.

    `device`: `cpu` or `cuda`; vLLM uses the device of its build. `max_drafts`: most draft tokens of a request in one
    step, 0 if none are ever verified.
    """
    for name in ("dtype", "kv_cache_gb"):
        if getattr(config, name) in (AUTO, None):
            raise ConfigError(f"target.{name}", "is still auto.", "set it, or settle it by `resolve`.")
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
