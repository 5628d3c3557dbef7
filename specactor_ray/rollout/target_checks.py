"""What can be known to be wrong about models and backends before any actor starts. Imports no backend."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from specactor_ray.config.schema import Config, ModeName, reads_features
from specactor_ray.errors import ConfigError, ModelLoadError
from specactor_ray.modeling.loading import load_model_config, parse_dtype, require_head, require_model

_BLOCK_TOKENS = {"cpu": 128, "gpu": 16}
"""Of vLLM's cache, unless its attention kernels want others."""


def require_models(config: Config) -> None:
    """Refuse models that are not there, by their names alone: takes no second where they are paths.

    Raises:
        ModelLoadError: One cannot be found; its key is named.
    """
    named = [("target.model", config.target.model, False)]
    if config.mode is not ModeName.plain:
        named += [(f"drafters.{i}.model", d.model, reads_features(d)) for i, d in enumerate(config.drafters) if d.model]
    for key, name, is_head in named:
        try:
            if is_head:
                require_head(Path(name).expanduser())
            else:
                require_model(name)
        except ModelLoadError as error:
            raise ModelLoadError(f"{key}: {error}") from None


def check_target(config: Config) -> None:
    """Refuse models that are not there, a backend that is not installed or of an untested version, and a model that
    it cannot hold or split.

    Raises:
        ConfigError: The key and the fix are named.
        ModelLoadError: The model cannot be found; the key is named.
    """
    target = config.target
    require_models(config)
    if target.backend == "vllm":
        from specactor_ray.targets.vllm_bridge import require_vllm

        require_vllm()
    model = load_target_config(config)
    if getattr(model, "is_encoder_decoder", False):
        problem = f"{target.model} is an encoder-decoder model ({model.model_type}); the target must only decode."
        raise ConfigError("target.model", problem, "choose a decoder-only model.")
    text = model.get_text_config()
    _reject_context_beyond_the_models(config, text)
    if target.backend != "vllm":
        return
    _reject_heads_that_cannot_be_split(config, text)
    _reject_cache_below_one_request(config, text)


def load_target_config(config: Config) -> Any:
    """The target's model configuration, as transformers has it.

    Raises:
        ModelLoadError: The model cannot be found; the key is named.
    """
    try:
        return load_model_config(config.target.model, trust_remote_code=config.target.trust_remote_code)
    except ModelLoadError as error:
        raise ModelLoadError(f"target.model: {error}") from error


def max_prompt_tokens(config: Config) -> int:
    """Longest prompt that leaves room for a whole output of `sampling.max_tokens`.

    Raises:
        ConfigError: There is no room for any.
        ModelLoadError: The model cannot be found; the key is named.
    """
    wanted, longest = config.sampling.max_tokens, config.target.max_model_len
    context = longest or 1 << 30
    if wanted < context:  # else the model need not be asked
        context = min(context, context_of(load_target_config(config).get_text_config()) or context)
    if wanted >= context:
        whose = f"target.max_model_len is {longest}" if context == longest else f"{config.target.model} has {context}"
        problem = f"{wanted} leaves no room for a prompt: prompt and output share one context, and {whose}."
        fix = f"use less than {context}, or a higher target.max_model_len if the model allows it."
        raise ConfigError("sampling.max_tokens", problem, fix)
    return context - wanted


def context_of(text: Any) -> int:
    """Most tokens of a sequence that a model was made for, by its text configuration; 0 where it does not say."""
    return int(getattr(text, "max_position_embeddings", 0) or 0)


def start_note(config: Config) -> str:
    """What to say before a start that takes minutes; empty otherwise."""
    target = config.target
    if target.backend != "vllm" or not target.compiled or target.gpus:
        return ""
    return "vLLM compiles the model at every start, minutes on a CPU; target.compiled=false starts sooner, runs slower"


def _reject_heads_that_cannot_be_split(config: Config, text: Any) -> None:
    """vLLM gives every rank whole heads; key/value heads may be copied instead."""
    ranks, heads = config.target.tensor_parallel, int(text.num_attention_heads)
    key_value_heads = _key_value_heads(text)
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (key_value_heads % n == 0 or n % key_value_heads == 0)]
    if ranks not in fits:
        problem = f"{ranks} ranks cannot share {heads} attention heads and {key_value_heads} key/value heads evenly."
        raise ConfigError("target.tensor_parallel", problem, f"use one of {', '.join(map(str, fits))}.")


def _reject_context_beyond_the_models(config: Config, text: Any) -> None:
    """vLLM stretches the positions of some models; `hf` does not go beyond the context that the model names."""
    rope = getattr(text, "rope_parameters", None) or {}
    fixed = config.target.backend != "vllm" or rope.get("rope_type", "default") == "default"
    longest, wanted = context_of(text), config.target.max_model_len
    if wanted and longest and wanted > longest and fixed:
        problem = f"{wanted}, but {config.target.model} was made for {longest} tokens."
        raise ConfigError("target.max_model_len", problem, f"use {longest} or less.")


def _reject_cache_below_one_request(config: Config, text: Any) -> None:
    """vLLM does not start with a cache that a single request of `max_model_len` could not be finished in."""
    target, ranks = config.target, config.target.tensor_parallel
    length = target.max_model_len or context_of(text)
    plain = not getattr(text, "sliding_window", None) and not getattr(text, "kv_lora_rank", None)
    if not length or not plain or set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
        return  # other layers keep less; vLLM knows how much
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = max(_key_value_heads(text), ranks)
    per_token = 2 * int(text.num_hidden_layers) * heads * head_dim * parse_dtype(target.dtype).itemsize
    block = _BLOCK_TOKENS["gpu" if target.gpus else "cpu"]
    blocks = int(target.kv_cache_gb * 2**30 / per_token) // block - 1  # vLLM keeps one empty
    if blocks * block < length:
        needed = (-(-length // block) + 1) * block * per_token / 2**30
        problem = (
            f"{target.kv_cache_gb:g} holds {max(blocks, 0) * block} tokens of {target.model} in vLLM's blocks of "
            f"{block}, and a request may have {length}."
        )
        fix = f"use {math.ceil(needed * 1000) / 1000:g} or more"
        fix += f", or target.max_model_len={blocks * block}." if blocks > 0 else "."
        raise ConfigError("target.kv_cache_gb", problem, fix)


def _key_value_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
