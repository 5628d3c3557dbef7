"""Transformers models of given sizes with random weights, made on the device, for the product's own engine."""

from __future__ import annotations

from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.settings import ROPE_BASE, ModelShape
from specactor_ray.benchmarks.gpu_check.spreading import spread_head
from specactor_ray.benchmarks.gpu_check.timing import synchronize
from specactor_ray.models.ragged_model import RaggedModel, RaggedOutput
from specactor_ray.signals import signals_deferred


def random_model(shape: ModelShape, dtype: str, device: str, seed: int = 0) -> Any:
    """A `Qwen2ForCausalLM` with transformers' initial weights, its logits spread like those of a trained model."""
    with signals_deferred():
        from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    try:
        torch.set_default_dtype(getattr(torch, dtype))
        with torch.device(device):
            model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        tokens = torch.randint(shape.vocab, (4, 16), device=device)
        logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    spread_head(model.lm_head.weight, logits)
    return model


class SynchronizedModel(RaggedModel):
    """Waits for the device at the end of a forward, so that its time is not counted as the sampler's."""

    def forward(self, *args: Any) -> RaggedOutput:
        output = super().forward(*args)
        synchronize(self.device)
        return output
