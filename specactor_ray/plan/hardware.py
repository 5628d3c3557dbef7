"""Hardware by name or file: seconds of a model's step, and size of the cache.

It is a roofline (figures of a data sheet, such as conf/simulation/hardware/h100.yaml) or measured: the `costs` of a
run's summary.json.

The roofline (Williams, Waterman, Patterson, CACM 2009) is one per group of kernels, from bandwidth and peak times the
share that kernels reach; groups, all-reduces, kernels and positions add up. For n positions on t GPUs:

    linears     sqrt(read² + compute²): weights / t, and 2·n·weights / t flops with n in whole tiles; attention,
                feed-forward and language-model head apart
    cache       the keys and values attended to, read once per row whatever its number of positions
    all-reduce  2 per layer: latency + 2·(t-1)/t · n · hidden · 2 bytes / link bandwidth (ring)
    kernels     per step and per layer, however small the model: most of the time of a small model's draft token
    positions   norms, activations, sampling and the host's bookkeeping

In verifying, attention is memory-bound up to about `ridge · kv_heads / heads` positions per row (20 on an H100 with 8
queries per key); the flops of attention are counted for prompts only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import yaml

from specactor_ray.config.fields import at_least, not_empty, positive
from specactor_ray.config.load import SHIPPED as PACKAGE_FILES
from specactor_ray.config.load import find_file, load_as
from specactor_ray.config.schema import PacedConfig
from specactor_ray.core.errors import ConfigError, did_you_mean, keys_of
from specactor_ray.core.files import expanded
from specactor_ray.plan.costs import StepTimes, load_costs

_FOLDER = "simulation/hardware"
SHIPPED = PACKAGE_FILES / _FOLDER

ACTIVATION_BYTES = 2
"""Bytes per activation: bf16."""
_PROMPT_TOKENS = 2048
"""Largest assumed prompt length of a step, which is the number of tokens to which a prompt position attends."""
_TILE, _LARGE_TILE, _LARGE = 64, 128, 256
"""Positions of a tile of a matrix product with at most `_LARGE` positions, and with more: where the measured steps of
docs/design/cost-models.md have their stairs."""


StepSeconds = Callable[[int, int, int, int], float]
"""Seconds of one forward step, by its decoded requests; verified positions over all rows (rows + draft tokens); cached
tokens attended to, summed over all rows; and prompt positions in the same step."""


@dataclass
class DeviceSpec:
    """One GPU, and its links to the other GPUs of its node: a hardware file."""

    peak_tflops: float = positive(0.0)
    """Dense bf16 TFLOP/s of the data sheet."""
    memory_bandwidth_tb_s: float = positive(0.0)
    """TB/s of the data sheet."""
    memory_gb: float = positive(0.0)
    compute_share: float = positive(0.0, up_to=1.0)
    """Share of `peak_tflops` that linears of full tiles reach."""
    bandwidth_share: float = positive(0.0, up_to=1.0)
    """Share of `memory_bandwidth_tb_s` that linears of few positions reach."""
    step_overhead_us: float = positive(0.0)
    """Time of a step beside its layers: graph launch, copies of tokens."""
    layer_overhead_us: float = positive(0.0)
    """Least time of the kernels of a layer, and the gaps between them."""
    position_us: float = positive(0.0)
    """Time of a decoded position beside linears and cache: activations, samplers, the host."""
    link_bandwidth_gb_s: float = positive(0.0)
    """All-reduce bus bandwidth of large messages within a node."""
    link_latency_us: float = positive(0.0)
    """Time of an all-reduce of a small message."""
    price: float | None = positive(None)
    """Dollars per GPU-hour; a list price for scenarios whose `machines.N.price` is null."""

    def cost(self, model: str, devices: int = 1) -> RooflineCost:
        """Seconds of a model's step on this many GPUs of a node. Raises ConfigError for an unknown model, or if the
        GPUs cannot share it."""
        spec = find_model(model)
        if devices < 1 or spec.heads % devices:
            problem = f"{model} has {spec.heads} attention heads, which {devices} GPUs cannot share."
            raise ConfigError("gpus", problem, f"use a divisor of {spec.heads}.")
        return RooflineCost(self, spec, devices)


@dataclass
class ModelSpec:
    """Shape of a decoder-only transformer with gated feed-forward layers, or of an EAGLE-3 head of one layer."""

    layers: int = at_least(1, 0)
    hidden: int = at_least(1, 0)
    heads: int = at_least(1, 0)
    kv_heads: int = at_least(1, 0)
    head_dim: int = at_least(1, 0)
    ffn: int = at_least(0, -1)
    """Width of the feed-forward layers."""
    vocabulary: int = at_least(1, 0)
    """Rows of the language-model head; an EAGLE head's draft vocabulary."""
    source: str = not_empty("")
    """Origin of the shape."""
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
        """Number of feed-forward weights of all layers."""
        return self.layers * 3 * self.hidden * self.ffn

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
        return self.attention_weights + self.dense_weights + embeddings + self.hidden + self.fusion_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ACTIVATION_BYTES


class RooflineCost:
    """Costs of a model on GPUs of one node, of which `tensor_parallel` share every layer."""

    def __init__(self, device: DeviceSpec, model: ModelSpec, tensor_parallel: int = 1) -> None:
        self.device, self.model, self.tensor_parallel = device, model, tensor_parallel
        gpus, per_weight = tensor_parallel, model.weight_bytes
        bandwidth = device.bandwidth_share * (device.memory_bandwidth_tb_s * 1e12)
        peak = device.compute_share * (device.peak_tflops * 1e12)
        self._attention = _linear(model.attention_weights, per_weight, gpus, bandwidth, peak)
        self._dense = _linear(model.dense_weights, per_weight, gpus, bandwidth, peak)
        self._head = _linear(model.head_weights, per_weight, gpus, bandwidth, peak)
        self._fusion = _linear(model.fusion_weights, per_weight, gpus, bandwidth, peak)
        kv_heads = -(-model.kv_heads // gpus)  # beyond kv_heads GPUs each has a copy of one
        self.kv_bytes_per_token = model.kv_bytes_per_token * kv_heads / model.kv_heads
        self._cache_s = self.kv_bytes_per_token / bandwidth
        self._position_s, self._reduced_s = device.position_us * 1e-6, 0.0
        self._fixed_s = device.step_overhead_us * 1e-6
        self._fixed_s += model.layers * (device.layer_overhead_us * 1e-6)
        if gpus > 1:
            reduced = 2 * (gpus - 1) / gpus * model.hidden * ACTIVATION_BYTES
            self._fixed_s += 2 * model.layers * (device.link_latency_us * 1e-6)
            self._reduced_s = 2 * model.layers * reduced / (device.link_bandwidth_gb_s * 1e9)
        attended = 4 * model.layers * model.heads * model.head_dim / gpus  # flops per query and key
        self._prompt_s = attended / 2 / peak

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """See `StepSeconds`."""
        n = positions + prefill_tokens
        if n <= 0:
            return 0.0
        sampled = positions if positions > 0 else 1
        tiles, total = _padded(n), _linears(self._head, _padded(sampled))
        total += _linears(self._attention, tiles) + _linears(self._dense, tiles)
        total += self._cache_s * context_tokens + self._reduced_s * n + self._position_s * sampled
        if prefill_tokens:
            total += self._prompt_s * prefill_tokens * min(prefill_tokens, _PROMPT_TOKENS)
        return total + self._fixed_s

    def fusion_seconds(self, positions: int) -> float:
        """Seconds in which an EAGLE-3 head fuses the target's hidden states of `positions`."""
        return _linears(self._fusion, _padded(positions)) if positions else 0.0

    def cache_tokens(self, memory_share: float, other_weights_bytes: float = 0.0) -> int:
        """Tokens of keys and values that fit into this share of the memory beside the weights and `other_weights_bytes`
        on each GPU; 0 if the weights alone do not fit."""
        weights = self.model.parameters * self.model.weight_bytes / self.tensor_parallel
        free = self.device.memory_gb * 1e9 * memory_share - weights - other_weights_bytes
        return max(0, int(free / self.kv_bytes_per_token))


MERGE_LAYER_S = 14e-6
"""Additional seconds of a layer if the rows of a request read their common pages once: 5 kernels of 2 us, which gather
and merge, with gaps of 0.8 us."""


@dataclass(frozen=True)
class DraftTime:
    """Durations of a draft method."""

    forward: StepSeconds
    """Seconds of one forward, which drafts one token for each of its rows; for a lookup, which drafts whole tails, the
    seconds of `positions` found tokens."""
    is_lookup: bool = False
    fusion: Callable[[int], float] | None = None
    """EAGLE heads: number of committed positions → seconds to fuse their hidden states."""
    merge_s: float = math.inf
    """Additional seconds of a forward if the rows of each request read their common pages once; infinity: each row
    reads all of its pages."""

    def seconds(self, rows: int, context: int, shared: int, prefill: int) -> float:
        """Duration of a forward with the faster way of attention. `context`: tokens of all chains; `shared`: the same
        with common pages counted once; `prefill`: prompt tokens in the same forward."""
        seconds = self.forward(rows, rows, context, prefill)
        if shared < context:
            seconds = min(seconds, self.forward(rows, rows, shared, prefill) + self.merge_s)
        return seconds


_PAGE = 256
"""Tokens per page of a GPU's cache."""


def shared_tokens(ends: np.ndarray, known: np.ndarray, rows: np.ndarray) -> int:
    """Tokens of chains with `ends` tokens each, `(n,)`, if those of a row, `(n,)`, read their common whole pages once:
    each branch begins past the `known` tokens of its row, `(rows,)`."""
    common = known // _PAGE * _PAGE
    return int((ends - common[rows]).sum() + common[np.unique(rows)].sum())


def _linear(weights: float, weight_bytes: float, gpus: int, bandwidth: float, peak: float) -> tuple[float, float]:
    """Seconds to read the weights, and to multiply one position with them, on each of `gpus`."""
    return weights * weight_bytes / gpus / bandwidth, 2.0 * weights / gpus / peak


def _padded(positions: float) -> int:
    """Positions of whole tiles."""
    tile = _TILE if positions <= _LARGE else _LARGE_TILE
    return math.ceil(positions / tile) * tile


def _linears(seconds: tuple[float, float], positions: int) -> float:
    """Seconds of a group of matrix products, in which reading and multiplying overlap in part."""
    read, compute = seconds
    return math.hypot(read, compute * positions)


# ---- files ----


@dataclass(frozen=True)
class MeasuredHardware:
    """Steps of a run. Its cache has no limit."""

    name: str
    steps: Mapping[tuple[str, int], StepTimes]
    """(model or draft method, devices) → seconds of its steps, by the number of positions alone, prompts included."""

    def cost(self, name: str, devices: int = 1) -> StepSeconds:
        """Seconds of a step of a model or draft method. Raises ConfigError if it was not measured on this many
        devices."""
        times = self.steps.get((name.lower(), devices))
        if times is None:
            known = ", ".join(f"{one} on {count} device(s)" for one, count in self.steps)
            hint = did_you_mean(name.lower(), sorted({one for one, _ in self.steps}))
            problem = f"{name} on {devices} device(s) was not measured there.{hint}"
            raise ConfigError(f"hardware {self.name}", problem, f"use one of: {known}; or a roofline, such as h200.")
        return lambda rows, positions, context_tokens, prefill_tokens: times.seconds(positions + prefill_tokens)


def shipped_hardware() -> list[str]:
    """Names that `load_hardware` finds."""
    return sorted(path.stem for path in SHIPPED.glob("*.[yj]*") if path.stem != "models")


def load_hardware(name_or_path: str) -> DeviceSpec | MeasuredHardware:
    """A roofline by a shipped name (`h100`) or from a YAML file, or the costs of a run (`.json`). ConfigError: there is
    no such hardware, or the file is invalid; the message names file, key and fix."""
    name, names = name_or_path.lower(), shipped_hardware()
    path = SHIPPED / f"{name}.json" if name in names else expanded(name_or_path)
    if path.suffix == ".json" and path.is_file():
        costs = load_costs(path, f"hardware {name_or_path}")
        measured = {str(costs.target["model"]): costs.verify}
        measured |= {method: found.kinds.get(costs.kind, {}) for method, found in costs.drafters.items()}
        steps = {(one.lower(), n): times for one, found in measured.items() for n, times in found.items()}
        return MeasuredHardware(path.stem, steps)
    path = find_file(name if name in names else path, _FOLDER)
    if not path.is_file():
        problem = f"there is no such file, and none of this name is shipped.{did_you_mean(name, names)}"
        raise ConfigError(f"hardware {name_or_path}", problem, f"use one of {', '.join(names)}, or the path of a file.")
    try:
        return load_as(DeviceSpec, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.key}", error.problem, error.fix) from None


def paced_costs(paced: PacedConfig) -> tuple[RooflineCost, RooflineCost]:
    """Costs of the emulated target and drafter, not stretched. ConfigError: there is no such GPU, or no such model that
    drafts or decodes alone."""
    with keys_of("paced.device"):
        device = load_hardware(paced.device or "")
    if not isinstance(device, DeviceSpec):
        raise ConfigError("paced.device", f"{paced.device} has the steps of a run.", "name a GPU, such as h100.")
    for key, model in (("paced.target", paced.target), ("paced.drafter", paced.drafter)):
        with keys_of(key):
            shape = find_model(model)
        if shape.features:
            problem = f"{model} reads hidden states of a target, which paced devices do not emulate."
            raise ConfigError(key, problem, "name a model that decodes alone, such as qwen2.5-0.5b.")
    with keys_of("paced.target_gpus"):
        target = device.cost(paced.target, paced.target_gpus)
    with keys_of("paced.drafter_gpus"):
        return target, device.cost(paced.drafter, paced.drafter_gpus)


@functools.cache
def load_models() -> Mapping[str, ModelSpec]:
    """Shipped models: name → shape."""
    models = yaml.safe_load((SHIPPED / "models.yaml").read_text(encoding="utf-8"))
    return {name: load_as(ModelSpec, shape) for name, shape in models["models"].items()}


def find_model(name: str) -> ModelSpec:
    """A shipped model shape; the case of the name is ignored. Raises ConfigError if there is none."""
    models = load_models()
    if name.lower() not in models:
        problem = f"the shape of this model is not known.{did_you_mean(name.lower(), list(models))}"
        raise ConfigError(f"model {name}", problem, f"use one of {', '.join(models)}, or add it to models.yaml.")
    return models[name.lower()]
