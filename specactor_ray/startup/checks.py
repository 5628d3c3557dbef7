"""Checks of a settled configuration against its models. They read configurations, no weights, and import no backend."""

from __future__ import annotations

import math
from typing import Any

from specactor_ray.config.methods import Checkpoint
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.core.errors import ConfigError, ModelLoadError
from specactor_ray.core.identity import TokenIdentity, is_mixture, token_identity, uncovered
from specactor_ray.models.loading import load_model_config
from specactor_ray.models.shapes import GIB, ITEM_BYTES, ROW_BYTES, context_of, token_bytes
from specactor_ray.startup.memory import placed_drafters
from specactor_ray.target.sizes import BLOCK_TOKENS
from specactor_ray.target.vllm_settings import require_whole_heads


def load_config_of(key: str, name: str, trust_remote_code: bool) -> Any:
    """A model's configuration of transformers; a ModelLoadError has the key."""
    try:
        return load_model_config(name, trust_remote_code=trust_remote_code)
    except ModelLoadError as error:
        raise ModelLoadError(f"{key}: {error}") from error


def identity_of(target: TargetConfig, model: Any) -> TokenIdentity:
    """Whether a run's tokens are those of plain decoding one by one."""
    mixture = is_mixture(model.to_dict())
    return token_identity(
        "cuda" if target.gpus else "cpu", target.dtype, mixture, target.batch_invariant, target.backend
    )


def check_target(config: Config, model: Any) -> int:
    """Refuse a model that the backend cannot hold or split, with a ConfigError. Returns the most tokens of prompt and
    output together: `target.max_model_len`, or fewer if the model was made for fewer."""
    target, name = config.target, config.target.model
    if getattr(model, "is_encoder_decoder", False):
        kind = getattr(model, "model_type", "of an unknown type")
        problem = f"{name} is an encoder-decoder model ({kind}); the target must only decode."
        raise ConfigError("target.model", problem, "choose a decoder-only model.")
    text = model.get_text_config()
    layers, last = target.hidden_layers, int(text.num_hidden_layers) - 1
    if max(layers, default=0) > last:
        problem = f"{max(layers)} is no layer of {name}, which has layers 0 to {last}."
        raise ConfigError("target.hidden_layers", problem, f"use layers up to {last}.")
    if (stop := max(config.sampling.stop_token_ids, default=0)) >= text.vocab_size:
        problem = f"{stop} is no token of {name}; its largest id is {text.vocab_size - 1}."
        raise ConfigError("sampling.stop_token_ids", problem, "remove it, or end outputs by sampling.stop.")
    if target.backend == "vllm":
        require_whole_heads(target, text)
    _reject_kernels_that_depend_on_the_batch(target, model)
    return _checked_context(target, text)


def _reject_kernels_that_depend_on_the_batch(target: TargetConfig, model: Any) -> None:
    """Check `target.batch_invariant` by the model's configuration; engines check the GPU and the layers."""
    if not target.batch_invariant:
        return
    identity, facts = identity_of(target, model), model.to_dict()
    if method := target.engine_arguments.get("quantization"):
        facts["quantization_config"] = {"quant_method": method}
    problem = f"{identity.reason}." if not identity.holds else uncovered(target.backend, facts)
    if problem:
        raise ConfigError("target.batch_invariant", problem, "set target.batch_invariant=false.")


def _checked_context(target: TargetConfig, text: Any) -> int:
    """The context. vLLM scales the positions of some models (not `longrope` and `dynamic`: their context includes it or
    has no angles beyond); `hf` is limited to the context of the model."""
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") not in ("default", "longrope", "dynamic")
    longest, wanted = context_of(text), target.max_model_len
    if wanted and longest and wanted > longest and (target.backend != "vllm" or not scaled):
        problem = f"{wanted}, but {target.model} was made for {longest} tokens."
        raise ConfigError("target.max_model_len", problem, f"use {longest} or less.")
    return min(wanted or 1 << 30, longest or wanted or 1 << 30)


def export_what_drafters_read(config: Config) -> None:
    """Set `target.hidden_layers` to the layers that the EAGLE head reads, if there is one.

    Raises:
        ConfigError: The key is set to other layers, or not set for a user's own reader of features.
        ModelLoadError: The head cannot be found, or was made for another target.
    """
    target = config.target
    readers = [one for one in placed_drafters(config) if one.spec.traits.reads_features]
    heads = [one for one in readers if one.spec.traits.checkpoint is Checkpoint.HEAD and one.spec.model]
    if readers and not heads and not target.hidden_layers:
        problem = f"{readers[0].key} reads the target's hidden states, and none are exported."
        raise ConfigError("target.hidden_layers", problem, "list the decoder layers it reads, such as [2, 15, 28].")
    if not heads:
        return
    from specactor_ray.draft.eagle.checkpoint import read_head_config

    head = str(heads[0].spec.model)
    try:
        read = read_head_config(head, target.model, trust_remote_code=target.trust_remote_code)
    except ModelLoadError as error:
        raise ModelLoadError(f"{heads[0].key}.model: {error}") from error
    layers = list(read.exported_layers)
    if target.hidden_layers not in ([], layers):
        problem = f"{target.hidden_layers} is set, but the EAGLE head {head} reads {layers}."
        raise ConfigError("target.hidden_layers", problem, "leave it out.")
    target.hidden_layers = layers


def check_draft_models(config: Config, vocabulary: int) -> None:
    """Refuse draft models with another vocabulary than the target's, or a cache below a page, with a ConfigError."""
    for key, spec, _, on_gpu in placed_drafters(config):
        if spec.model is None or spec.traits.checkpoint is Checkpoint.HEAD:  # heads are checked elsewhere
            continue
        draft = load_config_of(f"{key}.model", spec.model, spec.trust_remote_code)
        row, tokens = 1 if on_gpu else ROW_BYTES, BLOCK_TOKENS["hf"]["gpu" if on_gpu else "cpu"]
        page = tokens * token_bytes(draft.get_text_config(), ITEM_BYTES[spec.dtype], row=row)
        if spec.kv_cache_gb is not None and spec.kv_cache_gb * GIB < page:
            problem = f"{spec.kv_cache_gb:g} holds no page of {spec.model}."
            least = math.ceil(page / GIB * 1e6) / 1e6
            raise ConfigError(f"{key}.kv_cache_gb", problem, f"use {least:g} or more, or leave it out.")
        if draft.vocab_size != vocabulary:
            problem = f"{spec.model} has a vocabulary of {draft.vocab_size} tokens, "
            problem += f"the target {config.target.model} one of {vocabulary}."
            raise ConfigError(f"{key}.model", problem, "use a draft model that was trained with the target's tokenizer")
