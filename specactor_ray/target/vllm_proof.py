"""Proof at the start that vLLM computes what transformers computes with a checkpoint, and that it takes new weights."""

from __future__ import annotations

import logging
from typing import Any

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ModelLoadError, WeightsError
from specactor_ray.core.machine import available_bytes
from specactor_ray.core.types import Probe
from specactor_ray.models.loading import load_model, load_model_config, wrong_value_errors
from specactor_ray.models.probe import LONGEST_WINDOW, probe_model, windows_of
from specactor_ray.models.shapes import GIB, ITEM_BYTES, context_of, count_parameters
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.proof import prove

logger = logging.getLogger(__name__)
_SHARE_OF_MEMORY = 0.8
"""Largest share of the free memory for the models of transformers of all verifiers, before their engines are loaded."""
_CHANGING = ("quantization", "quantization_config", "kv_cache_dtype", "hf_overrides", "load_format")
"""Arguments of vLLM's engine with which it computes something else on purpose."""


class LoadProof:
    """What transformers computes with a checkpoint, to be compared with an engine that has loaded it. It is computed
    before the engine exists: vLLM replaces parts of transformers' classes, and two models would share no memory.

    Raises:
        ModelLoadError: `target.updates` is set, and transformers cannot load the model, or its weights are quantized.
    """

    def __init__(self, config: TargetConfig) -> None:
        self._config = config
        self._probe: Probe | None = None
        self._weights: dict[str, Any] = {}
        """Those of the checkpoint, for an update; as far as they have its data type they are its files in memory."""
        model = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
        self._text, packed = model.get_text_config(), getattr(model, "quantization_config", None)
        if packed is not None and config.updates:
            raise ModelLoadError(
                f"{config.model} has quantized weights ({_kind_of(packed)}), and new weights come in {config.dtype}. "
                "Fix: name a checkpoint that is not quantized"
            )
        reason = self._reason_against(packed)
        try:
            if not reason:
                self._compute()
        except wrong_value_errors() as error:
            if config.updates:
                raise
            reason = f"transformers cannot run it ({' '.join(str(error).split())[:300]})"
        if reason:
            logger.warning("%s is not compared with transformers: %s", config.model, reason)

    def _reason_against(self, packed: Any) -> str:
        """Why the model is not compared; empty if it is."""
        config = self._config
        if packed is not None:
            return f"its weights are quantized ({_kind_of(packed)})"
        if changing := sorted(set(_CHANGING) & config.engine_arguments.keys()):
            return f"target.engine_arguments.{changing[0]} changes what vLLM computes"
        needed = count_parameters(config.model, config.trust_remote_code)[0] * ITEM_BYTES[config.dtype]
        room = _SHARE_OF_MEMORY * available_bytes() / config.replicas
        if needed > room:
            return (
                f"it takes {needed / GIB:.1f} GiB, and a verifier may use {room / GIB:.1f} GiB of this machine's memory"
            )
        return ""

    def _compute(self) -> None:
        config = self._config
        trust, longest = config.trust_remote_code, config.max_model_len
        model = load_model(config.model, dtype=config.dtype, trust_remote_code=trust, max_model_len=longest)
        self._probe = probe_model(model)
        if config.updates:
            self._weights = dict(model.state_dict())
        beyond = [one for one in windows_of(self._text) if LONGEST_WINDOW < one < (longest or context_of(self._text))]
        if beyond:
            logger.info("%s is compared with transformers within its window of %d tokens", config.model, beyond[0])

    def require(self, engine: TargetEngine) -> None:
        """Refuse an engine that computes something else than transformers, or cannot take new weights, with a
        ModelLoadError; the weights that were kept are dropped."""
        config, weights = self._config, self._weights
        self._weights = {}
        windows = windows_of(self._text)
        note = f" (its attention has a window of {windows[0]} tokens)" if windows else ""
        try:
            prove(engine, self._probe, f"vllm does not compute {config.model}{note} as transformers does")
        except WeightsError as error:
            raise ModelLoadError(str(error)) from error
        except wrong_value_errors() as error:  # those of a model class in a forward
            raise ModelLoadError(f"vllm cannot run {config.model}: {type(error).__name__}: {error}") from error
        if not weights:
            return
        failures: tuple[type[Exception], ...] = (WeightsError, *wrong_value_errors())
        try:
            engine.load_weights(0, weights)
            prove(engine, self._probe, "its own weights did not arrive when they were sent as an update", weights)
        except failures as error:
            reason = str(error) or type(error).__name__
            raise ModelLoadError(f"vllm cannot take new weights of {config.model}: {reason}") from error


def _kind_of(packed: Any) -> str:
    facts = packed if isinstance(packed, dict) else vars(packed)
    return str(facts.get("quant_method", "of an unknown kind"))
