"""Transformers models of given sizes with random weights, made on the device."""

from __future__ import annotations

from typing import Any

import torch

from specactor_ray.bench.gpu_check.settings import ModelShape
from specactor_ray.bench.gpu_check.stages import synchronize
from specactor_ray.core.signals import signals_deferred
from specactor_ray.models.ragged_model import RaggedModel, RaggedOutput


def qwen_config(shape: ModelShape) -> Any:
    """The transformers configuration of a shape."""
    with signals_deferred():
        from transformers import Qwen2Config

    sizes = {name: value for name, value in shape._asdict().items() if name != "name"}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen2Config(**sizes, rope_parameters=rope, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"])


def random_model(shape: ModelShape, dtype: str, device: str) -> Any:
    """A `Qwen2ForCausalLM` with transformers' initial weights, its logits spread like those of a trained model."""
    with signals_deferred():
        from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(qwen_config(shape), dtype=getattr(torch, dtype))
    model.eval().requires_grad_(False)
    with torch.inference_mode():
        tokens = torch.randint(shape.vocab_size, (4, 16), device=device)
        spread_head(model.lm_head.weight, model(input_ids=tokens, use_cache=False).logits)
    return model


@torch.inference_mode()
def spread_head(weight: torch.Tensor, logits: torch.Tensor) -> None:
    """Scale an output layer (V, H) in place, by logits (..., V) that it gives for a few contexts: ordinary tokens get a
    standard deviation of 3, some hundred candidates one of 9, and few of these nearly all of the mass (an entropy of
    about 1 nat). Gaussian logits alike would need top logits of 45 for that, and rounding errors grow with them."""
    weight.mul_(3.0 / float(logits.float().std()))
    weight[:: max(len(weight) // 512, 8)] *= 3.0


class SynchronizedModel(RaggedModel):
    """Waits for the device after a forward; else the forward's time would count as the sampler's."""

    def forward(self, *args: Any) -> RaggedOutput:
        output = super().forward(*args)
        synchronize(self.device.type)
        return output


def ragged_model(shape: ModelShape, dtype: str, device: str, tokens: int) -> SynchronizedModel:
    """A random model as the `hf` engine runs it, with a cache of `tokens` tokens."""
    cache_bytes = shape.cache_bytes(tokens, getattr(torch, dtype).itemsize)
    return SynchronizedModel(random_model(shape, dtype, device), cache_bytes)
