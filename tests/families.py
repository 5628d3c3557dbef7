"""Tiny models of many families with random weights, as directories, for tests of weights and their way."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from specactor_ray.models.builtin import quiet_transformers

VOCAB_SIZE = 96
_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_BIASED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _BASE),
    "llama-tied": ("Llama", {**_BASE, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {**_BASE, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", _BASE),
    "qwen3-tied": ("Qwen3", {**_BASE, "tie_word_embeddings": True}),
    "gemma3-tied": ("Gemma3Text", {**_BASE, "tie_word_embeddings": True, "sliding_window": 16}),
    "gpt2-tied": ("GPT2", {**_GPT2, "initializer_range": 0.3}),
    "mixtral": ("Mixtral", {**_BASE, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", {**_BASE, **_EXPERTS}),
    "glm4-moe": ("Glm4Moe", {**_BASE, **_BIASED}),
    "qwen2-moe": ("Qwen2Moe", {**_BASE, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "ernie-moe": ("Ernie4_5_Moe", {**_BASE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "granite-moe-tied": ("GraniteMoe", {**_BASE, "num_local_experts": 4, "tie_word_embeddings": True}),
    "deepseek-v3": ("DeepseekV3", {**_BASE, **_BIASED, **_LATENT, "num_key_value_heads": 4}),
}
"""Name → transformers' class of the configuration, and its settings."""


@functools.lru_cache
def make_model(name: str, seed: int = 0) -> Any:
    """A model of a family: random parameters (norms and biases, too) and buffers. Not to be changed."""
    import transformers

    kind, settings = FAMILIES[name]
    torch.manual_seed(seed)
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1 or tensor.min() == tensor.max():
                tensor += 0.2 * torch.randn(tensor.shape)
    return model.eval()


def save_model(name: str, folder: Path, seed: int = 0) -> str:
    """Write the model in the format of transformers; returns the folder's name."""
    with quiet_transformers():
        make_model(name, seed).save_pretrained(folder)
    return str(folder)
