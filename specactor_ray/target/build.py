"""The configured target engine. That of vLLM is proved at its start: it computes what transformers computes with the
checkpoint, and takes new weights."""

from __future__ import annotations

import logging
from typing import Any

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ModelLoadError, WeightsError
from specactor_ray.core.machine import available_bytes
from specactor_ray.core.types import Probe
from specactor_ray.models.loading import load_model, load_model_config, wrong_value_errors
from specactor_ray.models.probe import probe_model
from specactor_ray.models.shapes import GIB, ITEM_BYTES, count_parameters
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.proof import prove

logger = logging.getLogger(__name__)
_SHARE_OF_MEMORY = 0.8
"""Largest share of the free memory for the models of transformers of all verifiers, before their engines are loaded."""
_CHANGING = ("quantization", "quantization_config", "kv_cache_dtype", "hf_overrides", "load_format")
"""Arguments of vLLM's engine with which it computes something else on purpose."""


def build_engine(config: TargetConfig, device: str, max_drafts: int) -> TargetEngine:
    """Load the target of a settled section. ModelLoadError: its model cannot be loaded or served. ConfigError: of
    `require_vllm`.

    `device`: `cpu` or `cuda`; vLLM uses the device of its build. `max_drafts`: most draft tokens of a request in one
    step, 0 if none are ever verified.
    """
    if config.backend == "hf":
        from specactor_ray.target.hf import HfEngine

        return HfEngine.from_config(config, device)
    from specactor_ray.target.vllm import VllmEngine
    from specactor_ray.target.vllm_cpu import use_interpreter

    use_interpreter()  # transformers imports Triton, too
    probe, weights = reference_of(config)
    engine = VllmEngine(config, max_drafts)
    try:
        require_equal(engine, config, probe, weights)
    except BaseException:
        engine.close()
        raise
    return engine


def reference_of(config: TargetConfig) -> tuple[Probe | None, dict[str, Any]]:
    """What transformers computes with the checkpoint, and with `target.updates` its weights; None where nothing is
    compared, for a reason that is logged. It is computed before the engine exists: vLLM replaces parts of transformers'
    classes, and two models would share no memory.

    Raises:
        ModelLoadError: `target.updates` is set, and transformers cannot load the model, or its weights are quantized.
    """
    trust = config.trust_remote_code
    packed = getattr(load_model_config(config.model, trust_remote_code=trust), "quantization_config", None)
    if packed is not None and config.updates:
        raise ModelLoadError(
            f"{config.model} has quantized weights ({_kind_of(packed)}), and new weights come in {config.dtype}. "
            "Fix: name a checkpoint that is not quantized"
        )
    if not (reason := _reason_against(config, packed)):
        try:
            longest = config.max_model_len
            model = load_model(config.model, dtype=config.dtype, trust_remote_code=trust, max_model_len=longest)
            return probe_model(model), dict(model.state_dict()) if config.updates else {}
        except wrong_value_errors() as error:
            if config.updates:
                raise
            reason = f"transformers cannot run it ({' '.join(str(error).split())[:300]})"
    logger.warning("%s is not compared with transformers: %s", config.model, reason)
    return None, {}


def _reason_against(config: TargetConfig, packed: Any) -> str:
    """Why the model is not compared; empty if it is."""
    if packed is not None:
        return f"its weights are quantized ({_kind_of(packed)})"
    if changing := sorted(set(_CHANGING) & config.engine_arguments.keys()):
        return f"target.engine_arguments.{changing[0]} changes what vLLM computes"
    needed = count_parameters(config.model, config.trust_remote_code)[0] * ITEM_BYTES[config.dtype]
    room = _SHARE_OF_MEMORY * available_bytes() / config.replicas
    if needed > room:
        return f"it takes {needed / GIB:.1f} GiB, and a verifier may use {room / GIB:.1f} GiB of this machine's memory"
    return ""


def require_equal(engine: TargetEngine, config: TargetConfig, probe: Probe | None, weights: dict[str, Any]) -> None:
    """Refuse an engine that computes something else than transformers, or cannot take these weights as an update, with
    a ModelLoadError."""
    try:
        prove(engine, probe, f"vllm does not compute {config.model} as transformers does")
    except WeightsError as error:
        raise ModelLoadError(str(error)) from error
    except wrong_value_errors() as error:  # those of a model class in a forward
        raise ModelLoadError(f"vllm cannot run {config.model}: {type(error).__name__}: {error}") from error
    if not weights:
        return
    failures: tuple[type[Exception], ...] = (WeightsError, *wrong_value_errors())
    try:
        engine.load_weights(0, weights)
        prove(engine, probe, "its own weights did not arrive when they were sent as an update")
    except failures as error:
        reason = str(error) or type(error).__name__
        raise ModelLoadError(f"vllm cannot take new weights of {config.model}: {reason}") from error


def _kind_of(packed: Any) -> str:
    facts = packed if isinstance(packed, dict) else vars(packed)
    return str(facts.get("quant_method", "of an unknown kind"))
