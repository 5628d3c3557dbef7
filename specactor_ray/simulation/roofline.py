"""Seconds of a transformer's forward step on GPUs, by a roofline (Williams, Waterman, Patterson, CACM 2009) per group
of kernels.

A group takes `max(bytes / bandwidth, flops / peak)`, bandwidth and peak times the share that kernels reach; groups,
all-reduces and launches add up. For n positions on t GPUs:

    linears     weights / t and 2·n·weights / t flops: attention, feed-forward and language-model head apart
    experts     E·(1 - (1 - k/E)^n) of E experts are read where each position takes k of them at random
    cache       the keys and values attended to, read once per row whatever its number of positions
    traffic     norms, residuals, activations and logits, read and written
    all-reduce  2 per layer: latency + 2·(t-1)/t · n · hidden · 2 bytes / link bandwidth (ring)
    launches    per step and per layer

In verifying, attention is memory-bound up to about `ridge · kv_heads / heads` positions per row (20 on an H100 with 8
queries per key); the flops of attention are counted for prompts only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from specactor_ray.config.fields import at_least, limited, not_empty

ACTIVATION_BYTES = 2
"""Bytes per activation: bf16."""
_TOUCHES = 12
"""Reads and writes of a hidden state per layer outside of the linears: norms, residual sums, rotary embedding."""
_LOGIT_PASSES = 4
"""Reads and writes of the float32 logits by a sampler: gather, temperature, log-softmax, choice."""
_PROMPT_TOKENS = 2048
"""Largest assumed prompt length of a step, which is the number of tokens to which a prompt position attends."""


class ForwardCost(Protocol):
    """Seconds of one forward step."""

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """Duration of a step.

        Args:
            rows: Decoded requests.
            positions: Verified positions over all rows: rows + draft tokens.
            context_tokens: Cached tokens attended to, summed over all rows.
            prefill_tokens: Prompt positions in the same step.
        """
        ...


@dataclass
class Figure:
    """One number of a data sheet or a measurement."""

    value: float = limited(
        lambda value: 0.0 < value < math.inf, "correct the figure; YAML reads 1e12 as text, write 1.0e+12.", default=0.0
    )
    source: str = not_empty("")
    """Origin of the number."""


@dataclass
class DeviceSpec:
    """One GPU, and its links to the other GPUs of its node: section `roofline` of a hardware file."""

    peak_tflops: Figure = field(default_factory=Figure)
    """Dense bf16 TFLOP/s of the data sheet."""
    memory_bandwidth_tb_s: Figure = field(default_factory=Figure)
    """TB/s of the data sheet."""
    memory_gb: Figure = field(default_factory=Figure)
    compute_share: Figure = field(default_factory=Figure)
    """Share of `peak_tflops` that linears of hundreds of positions reach."""
    bandwidth_share: Figure = field(default_factory=Figure)
    """Share of `memory_bandwidth_tb_s` that linears of few positions reach."""
    step_overhead_us: Figure = field(default_factory=Figure)
    """Time of a step beside its layers: graph launch, sampling kernels, copies of tokens."""
    layer_overhead_us: Figure = field(default_factory=Figure)
    """Time of the gaps between the kernels of a layer in a CUDA graph."""
    eager_layer_us: Figure = field(default_factory=Figure)
    """Time of the CPU to launch a layer's kernels without a graph."""
    link_bandwidth_gb_s: Figure = field(default_factory=Figure)
    """All-reduce bus bandwidth of large messages within a node."""
    link_latency_us: Figure = field(default_factory=Figure)
    """Time of an all-reduce of a small message."""


@dataclass
class ModelSpec:
    """Shape of a decoder-only transformer with gated feed-forward layers, or of an EAGLE-3 head of one layer."""

    layers: int = at_least(1, 0)
    hidden: int = at_least(1, 0)
    heads: int = at_least(1, 0)
    kv_heads: int = at_least(1, 0)
    head_dim: int = at_least(1, 0)
    ffn: int = at_least(0, -1)
    """Width of the feed-forward layers; 0 if all are experts."""
    vocabulary: int = at_least(1, 0)
    """Rows of the language-model head; an EAGLE head's draft vocabulary."""
    source: str = not_empty("")
    """Origin of the shape."""
    experts: int = at_least(0, 0)
    experts_per_token: int = at_least(0, 0)
    expert_ffn: int = at_least(0, 0)
    shared_expert_ffn: int = at_least(0, 0)
    """Width of the experts that every position uses."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    weight_bytes: int = at_least(1, 2)
    """Bytes per weight."""
    features: int = at_least(0, 0)
    """EAGLE-3: number of fused hidden states of the target. The head's layer reads embedding and hidden state side by
    side and shares the target's embedding. 0 for other models."""

    @property
    def attention_weights(self) -> int:
        """Number of attention weights of all layers, biases and norms included."""
        inputs = self.hidden * (2 if self.features else 1)
        qkv = self.heads + 2 * self.kv_heads
        weights = inputs * qkv * self.head_dim + self.heads * self.head_dim * self.hidden
        weights += qkv * self.head_dim * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        return self.layers * (weights + self.hidden * (3 if self.features else 2))

    @property
    def dense_weights(self) -> int:
        """Number of feed-forward weights that every position uses, routers included."""
        wide = self.ffn if not self.experts else self.shared_expert_ffn
        return self.layers * (3 * self.hidden * wide + self.hidden * self.experts)

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert in every layer."""
        return self.layers * 3 * self.hidden * self.expert_ffn

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def fusion_weights(self) -> int:
        return self.features * self.hidden * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters as published: every weight once, norms and biases included."""
        embeddings = self.head_weights * (1 if self.tied_embeddings or self.features else 2)
        layers = self.attention_weights + self.dense_weights + self.experts * self.expert_weights
        return layers + embeddings + self.hidden + self.fusion_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ACTIVATION_BYTES


class RooflineCost:
    """A `ForwardCost` of a model on GPUs of one node.

    Args:
        device: The GPU.
        model: The model on it.
        tensor_parallel: GPUs that share every layer.
        graph: Whether kernels are launched as one CUDA graph; else the CPU launches each, which bounds a step from
            below.
        host_s: Seconds per step of the engine's own code that do not overlap with the GPU.
    """

    def __init__(
        self, device: DeviceSpec, model: ModelSpec, tensor_parallel: int = 1, graph: bool = True, host_s: float = 0.0
    ) -> None:
        self.device, self.model, self.tensor_parallel = device, model, tensor_parallel
        gpus, per_weight = tensor_parallel, model.weight_bytes
        bandwidth = device.bandwidth_share.value * (device.memory_bandwidth_tb_s.value * 1e12)
        peak = device.compute_share.value * (device.peak_tflops.value * 1e12)
        self._attention = _linear(model.attention_weights, per_weight, gpus, bandwidth, peak)
        self._dense = _linear(model.dense_weights, per_weight, gpus, bandwidth, peak)
        self._head = _linear(model.head_weights, per_weight, gpus, bandwidth, peak)
        self._fusion = _linear(model.fusion_weights, per_weight, gpus, bandwidth, peak)
        self._experts = model.experts
        if model.experts:
            read, compute = _linear(model.expert_weights, per_weight, gpus, bandwidth, peak)
            self._experts_s = model.experts * read
            self._expert_compute_s = model.experts_per_token * compute
            self._untouched = 1.0 - model.experts_per_token / model.experts
        kv_heads = -(-model.kv_heads // gpus)  # beyond kv_heads GPUs each has a copy of one
        self.kv_bytes_per_token = model.kv_bytes_per_token * kv_heads / model.kv_heads
        self._cache_s = self.kv_bytes_per_token / bandwidth
        widths = 3 * (model.ffn + model.shared_expert_ffn + model.experts_per_token * model.expert_ffn) / gpus
        touched = model.layers * (_TOUCHES * model.hidden + widths) * ACTIVATION_BYTES
        self._traffic_s = touched / bandwidth
        self._logits_s = _LOGIT_PASSES * 4 * model.vocabulary / bandwidth
        self._launch_s = 0.0 if graph else model.layers * (device.eager_layer_us.value * 1e-6)
        self._fixed_s = device.step_overhead_us.value * 1e-6 + host_s
        self._fixed_s += model.layers * (device.layer_overhead_us.value * 1e-6) if graph else 0.0
        if gpus > 1:
            reduced = 2 * (gpus - 1) / gpus * model.hidden * ACTIVATION_BYTES
            self._fixed_s += 2 * model.layers * (device.link_latency_us.value * 1e-6)
            self._traffic_s += 2 * model.layers * reduced / (device.link_bandwidth_gb_s.value * 1e9)
        attended = 4 * model.layers * model.heads * model.head_dim / gpus  # flops per query and key
        self._prompt_s = attended / 2 / peak

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on each GPU."""
        return self.model.parameters * self.model.weight_bytes / self.tensor_parallel

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        n = positions + prefill_tokens
        if n <= 0:
            return 0.0
        sampled = positions if positions > 0 else 1
        read, compute = self._attention
        total = max(read, compute * n)
        read, compute = self._dense
        total += max(read, compute * n)
        read, compute = self._head
        total += max(read, compute * sampled)
        if self._experts:
            total += max(self._experts_s * (1.0 - self._untouched**n), self._expert_compute_s * n)
        total += self._cache_s * context_tokens + self._traffic_s * n + self._logits_s * sampled
        if prefill_tokens:
            total += self._prompt_s * prefill_tokens * min(prefill_tokens, _PROMPT_TOKENS)
        return max(total, self._launch_s) + self._fixed_s

    def fusion_seconds(self, positions: int) -> float:
        """Seconds in which an EAGLE-3 head fuses the target's hidden states of `positions`."""
        read, compute = self._fusion
        return max(read, compute * positions) if positions else 0.0

    def cache_tokens(self, memory_share: float, other_weights_bytes: float = 0.0) -> int:
        """Tokens of keys and values that fit beside the weights; 0 if the weights alone do not fit.

        Args:
            memory_share: Share of the GPU's memory for weights and cache.
            other_weights_bytes: Bytes of other weights on each GPU, such as those of an EAGLE head.
        """
        free = self.device.memory_gb.value * 1e9 * memory_share - self.weight_bytes - other_weights_bytes
        return max(0, int(free / self.kv_bytes_per_token))


def _linear(weights: float, weight_bytes: float, gpus: int, bandwidth: float, peak: float) -> tuple[float, float]:
    """Seconds to read the weights, and to multiply one position with them, on each of `gpus`."""
    return weights * weight_bytes / gpus / bandwidth, 2.0 * weights / gpus / peak
