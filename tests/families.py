"""Tiny random models of many families: those that the `hf` engine serves, those that it refuses, and variants for
tests of weight updates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specactor_ray.models.builtin import quiet_transformers

VOCAB_SIZE = 96
_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_SOME = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_SCANNED = {"mamba_chunk_size": 16}  # else seconds of padding
PROVED: dict[str, dict[str, Any]] = {
    "afmoe": {}, "apertus": {}, "arcee": {}, "bitnet": {}, "cohere": {}, "cohere2": _WINDOW, "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT, "ernie4_5": {}, "ernie4_5_moe": {}, "exaone4": _WINDOW, "flex_olmo": {}, "gemma": {},
    "gemma2": _WINDOW, "gemma3_text": _WINDOW, "glm": {}, "glm4": {}, "glm4_moe": {}, "gpt2": {}, "gpt_bigcode": {},
    "gpt_neox": {}, "gpt_oss": _WINDOW, "granite": {}, "granitemoe": {}, "granitemoeshared": {}, "helium": {},
    "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {}, "jetmoe": {}, "llama": {}, "mimo_v2_flash": _WINDOW,
    "minicpm3": _LATENT, "minimax_m2": {}, "ministral": _WINDOW, "ministral3": {}, "mistral": _WINDOW, "mixtral": {},
    "nanochat": {}, "olmo": {"clip_qkv": 0.5}, "olmo2": {}, "olmo3": _WINDOW, "olmoe": {}, "opt": {}, "persimmon": {},
    "phi": {}, "phi3": _WINDOW, "phimoe": _WINDOW, "qwen2": _SOME, "qwen2_moe": _SOME, "qwen3": _SOME, "qwen3_moe": {},
    "seed_oss": {}, "smollm3": {}, "starcoder2": _WINDOW, "vaultgemma": _WINDOW,
}  # fmt: skip
"""`model_type` → settings beside those that all share."""
REFUSED = {
    "bamba": _SCANNED, "bert": {}, "bloom": {}, "cpmant": {}, "deepseek_v32": _LATENT, "deepseek_v4": {},
    "diffllama": {}, "doge": {}, "electra": {}, "falcon_h1": _SCANNED, "falcon_mamba": {}, "glm_moe_dsa": _LATENT,
    "gptj": {"rotary_dim": 8}, "granitemoehybrid": _SCANNED, "jamba": {},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "llama4_text": {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}, "mamba": {}, "minimax": {},
    "minimax_m3_vl_text": {}, "mpt": {}, "nemotron": {}, "qwen3_next": {},
    "recurrent_gemma": {}, "roberta": {}, "rwkv": {}, "stablelm": {}, "xlm-roberta": {}, "youtu": _LATENT,
}  # fmt: skip
"""The same for models that must be refused by name."""
_BIASES = {"attention_bias": True, "mlp_bias": True}
_TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "llama-tied": ("llama", _TIED), "llama-biases": ("llama", _BIASES), "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", _TIED), "gemma3-tied": ("gemma3_text", {}), "gpt2-tied": ("gpt2", {}),
    "mixtral": ("mixtral", {}), "qwen3-moe": ("qwen3_moe", {}), "glm4-moe": ("glm4_moe", {"first_k_dense_replace": 1}),
    "qwen2-moe": ("qwen2_moe", {}), "ernie-moe": ("ernie4_5_moe", {}), "granite-moe-tied": ("granitemoe", _TIED),
    "deepseek-v3": ("deepseek_v3", {}),
}  # fmt: skip
"""Name → `model_type`, and settings beside those above: dense models, experts, biases, ties and buffers."""
_TURNED = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
_YARN = {**_TURNED, "rope_type": "yarn", "factor": 4.0}
_LONG = {**_TURNED, "rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [3.0] * 8}
_GROUPS = {"num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
_MIXED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-decoder": ("bert", {"is_decoder": True}),
    "deepseek-groups": ("deepseek_v3", {**_GROUPS, "norm_topk_prob": False, "v_head_dim": 24}),
    "deepseek-yarn": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0, "sliding_window": 1}),
    "gemma3-scales": ("gemma3_text", {**_MIXED, "rope_parameters": {
        "full_attention": _YARN, "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}),
    "gpt2-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt-neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}}),
    "llama-heads": ("llama", {"head_dim": 10, "num_key_value_heads": 1, "attention_dropout": 0.5}),
    "llama-scaled": ("llama", {"rope_parameters": {
        **_TURNED, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {**_YARN, "attention_factor": 0.7}}),
    "ministral3-scales": ("ministral3", {"rope_parameters": {  # by the position, up to the original length
        **_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5, "mscale": 1.0,
        "mscale_all_dim": 1.0}}),
    "modernbert-decoder": ("modernbert-decoder", {**_MIXED, "local_attention": 8}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False, "pad_token_id": 1}),
    "phi3-long": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 32}),
    "qwen3-partial": ("qwen3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
}  # fmt: skip
"""The same for settings that only the `hf` engine is compared with."""


def make_model(name: str, seed: int = 0, sizes: Mapping[str, int] = MappingProxyType({}), **settings: Any) -> Any:
    """A model of any table, in evaluation mode. Weights are large enough that errors of attention show; norms, biases
    and buffers are random, too. `sizes`: in place of those that all share, as far as the model has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, own = {**FAMILIES, **VARIANTS}.get(name, (name, {}))
    settings = {**PROVED.get(kind, REFUSED.get(kind, {})), **own, **settings}
    known = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in {**_SIZES, **sizes}.items() if hasattr(known, name)}
    try:
        config = AutoConfig.for_model(kind, **{**sizes, **settings})
    except (AttributeError, TypeError):  # a property in some classes
        config = AutoConfig.for_model(kind, **{**{k: v for k, v in sizes.items() if k != "head_dim"}, **settings})
    torch.manual_seed(seed)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_floating_point():
                continue
            if tensor.dim() == 1 or tensor.min() == tensor.max():
                tensor += 0.2 * torch.randn(tensor.shape)
            else:
                tensor.normal_(0.0, 0.2)
    return model


def one_of_each(names: Iterable[str]) -> list[str]:
    """Of names that differ in the numbers of layers and experts alone, the last one."""
    return list({re.sub(r"\.\d+\.", ".N.", name): name for name in names}.values())


def save_model(name: str, folder: Path, seed: int = 0) -> str:
    """Write the model in the format of transformers; returns the folder's name."""
    with quiet_transformers():
        make_model(name, seed).save_pretrained(folder)
    return str(folder)
