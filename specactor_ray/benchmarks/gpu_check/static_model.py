"""A Qwen2-like decoder over a static key/value cache, in plain torch: what a forward costs the device.

No Python between the kernels, no bookkeeping, every shape fixed, so that a forward can be captured as a CUDA graph. All
rows of a forward have the same number of tokens in the cache. Linear layers that read the same input are one matrix, as
in serving engines; the small elementwise operations are not fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from specactor_ray.benchmarks.gpu_check.settings import ROPE_BASE, ModelShape

_EPS = 1e-6


@dataclass
class LayerWeights:
    """One decoder layer; H hidden, D head dimension, A heads, K key/value heads, F FFN."""

    input_norm: Tensor
    """(H,)"""
    qkv: Tensor
    """((A + 2K) D, H): query heads, key heads, value heads."""
    qkv_bias: Tensor
    """((A + 2K) D,)"""
    out: Tensor
    """(H, A D)"""
    ffn_norm: Tensor
    """(H,)"""
    gate_up: Tensor
    """(2F, H): gate, then up."""
    down: Tensor
    """(H, F)"""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of each layer: (rows, kv_heads, capacity, head_dim)."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def random(cls, shape: ModelShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A cache full of standard normal values, for timing."""

        def make() -> list[Tensor]:
            size = (rows, shape.kv_heads, capacity, shape.head_dim)
            return [torch.empty(size, dtype=dtype, device=device).normal_() for _ in range(shape.built_layers)]

        return cls(make(), make())

    def rows(self, begin: int, end: int) -> KVCache:
        """A view of some rows."""
        return KVCache([keys[begin:end] for keys in self.keys], [values[begin:end] for values in self.values])


class StaticModel:
    """Forwards of `rows` x `positions` new tokens.

    Args:
        shape: Sizes.
        layers: Weights of the layers, any number.
        embedding: (V, H).
        norm: (H,), before the head.
        head: (V, H).
        max_positions: Longest sequence.
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: list[LayerWeights],
        embedding: Tensor,
        norm: Tensor,
        head: Tensor,
        max_positions: int = 16_384,
    ) -> None:
        self.shape, self.layers = shape, layers
        self.embedding, self.norm, self.head = embedding, norm, head
        self.device, self.dtype = embedding.device, embedding.dtype
        inverse = ROPE_BASE ** (-torch.arange(0, shape.head_dim, 2, device=self.device) / shape.head_dim)
        angles = torch.outer(torch.arange(max_positions, device=self.device), inverse).repeat(1, 2).unsqueeze(1)
        sign = torch.ones(shape.head_dim, device=self.device)
        sign[: shape.head_dim // 2] = -1.0
        self._cos, self._sin = angles.cos().to(self.dtype), (angles.sin() * sign).to(self.dtype)

    @classmethod
    def random(cls, shape: ModelShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> StaticModel:
        """Normal weights of variance 1 / inputs, embeddings of variance 1; the same for the same seed and device."""
        generator = torch.Generator(device).manual_seed(seed)

        def matrix(outputs: int, inputs: int, scale: float | None = None) -> Tensor:
            weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
            return weight.normal_(std=inputs**-0.5 if scale is None else scale, generator=generator)

        ones = torch.ones(shape.hidden, dtype=dtype, device=device)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        layers = [
            LayerWeights(
                input_norm=ones,
                qkv=matrix(width, shape.hidden),
                qkv_bias=matrix(width, 1, 0.1)[:, 0],
                out=matrix(shape.hidden, shape.heads * shape.head_dim),
                ffn_norm=ones,
                gate_up=matrix(2 * shape.ffn, shape.hidden),
                down=matrix(shape.hidden, shape.ffn),
            )
            for _ in range(shape.built_layers)
        ]
        embedding = matrix(shape.vocab, shape.hidden, 1.0)
        return cls(shape, layers, embedding, ones, matrix(shape.vocab, shape.hidden))

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, cache: KVCache, begin: int, layers: int | None = None) -> Tensor:
        """Append tokens to the cache.

        Args:
            tokens: (rows, positions) int64.
            cache: Of as many rows; positions `[begin, begin + positions)` are written.
            begin: Tokens of each row in the cache.
            layers: Run only the first ones.

        Returns:
            (rows, positions, H) after the last norm.
        """
        x = F.embedding(tokens, self.embedding)
        for weights, keys, values in zip(self.layers[:layers], cache.keys, cache.values, strict=False):
            x = x + self._attention(weights, F.rms_norm(x, x.shape[-1:], weights.input_norm, _EPS), keys, values, begin)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], weights.ffn_norm, _EPS), weights.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, weights.down)
        return F.rms_norm(x, x.shape[-1:], self.norm, _EPS)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, positions, H) → (rows * positions, V) in the model's dtype."""
        return F.linear(hidden.flatten(0, 1), self.head)

    def _attention(self, weights: LayerWeights, x: Tensor, keys: Tensor, values: Tensor, begin: int) -> Tensor:
        shape, (rows, positions, _) = self.shape, x.shape
        heads, rotated, end = shape.heads, shape.heads + shape.kv_heads, begin + positions
        qkv = F.linear(x, weights.qkv, weights.qkv_bias).view(rows, positions, -1, shape.head_dim)
        roped = self._rotate(qkv[:, :, :rotated], begin)
        keys[:, :, begin:end] = roped[:, :, heads:].transpose(1, 2)
        values[:, :, begin:end] = qkv[:, :, rotated:].transpose(1, 2)
        attended = attend(roped[:, :, :heads].transpose(1, 2), keys[:, :, :end], values[:, :, :end])
        return F.linear(attended.transpose(1, 2).reshape(rows, positions, -1), weights.out)

    def _rotate(self, x: Tensor, begin: int) -> Tensor:
        """Rotary positions of (rows, positions, heads, D); the halves of a head are its two coordinates."""
        span = slice(begin, begin + x.shape[1])
        return torch.addcmul(x * self._cos[span], torch.roll(x, x.shape[-1] // 2, -1), self._sin[span])


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the newest positions.

    Args:
        q: (rows, heads, positions, D).
        k, v: (rows, kv_heads, tokens, D); the last `positions` of them are those of `q`.

    Returns:
        (rows, heads, positions, D).
    """
    rows, heads, positions, dim = q.shape
    if positions == 1:  # the heads that share keys become query positions: one read of the keys serves them all
        folded = q.reshape(rows, k.shape[1], heads // k.shape[1], dim)
        return F.scaled_dot_product_attention(folded, k, v).reshape(q.shape)
    mask = causal_lower_right(positions, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != k.shape[1])


def attention_kernel(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str:
    """`flash` where several positions a row run through the flash kernel, `other` where torch falls back."""
    if device.type != "cuda":
        return "other"
    q = torch.empty(1, shape.heads, 2, shape.head_dim, dtype=dtype, device=device)
    k = torch.empty(1, shape.kv_heads, 64, shape.head_dim, dtype=dtype, device=device)
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, True)
    return "flash" if torch.backends.cuda.can_use_flash_attention(params) else "other"
