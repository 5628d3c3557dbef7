"""What the check measures: model shapes and grids, for a GPU and for a dry run. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace

ROPE_BASE = 1e6
"""Of the rotary positions of Qwen2.5."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Qwen2-like decoder: grouped-query attention with biases on query, key and value, gated FFN."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sampled_layers: tuple[int, int] | None = None
    """A model too large to measure whole: layer counts that are measured. Their difference is the cost of a layer,
    from which that of all `layers` follows; embedding and head are measured at full size."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def built_layers(self) -> int:
        """Layers whose weights are made."""
        return max(self.sampled_layers) if self.sampled_layers else self.layers

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values of `tokens` tokens in the layers that are built."""
        return 2 * self.built_layers * self.kv_heads * self.head_dim * itemsize * tokens


@dataclass(frozen=True, slots=True)
class ForwardGrid:
    """V: forwards of `rows` x `positions` new tokens, each row with `context` tokens in its cache."""

    shapes: tuple[ModelShape, ...]
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    contexts: tuple[int, ...]
    """In this order, so that a run that is cut short has whole grids of the first ones."""


@dataclass(frozen=True, slots=True)
class FlipGrid:
    """Tokens sampled from the same contexts under forwards of different shape."""

    shape: ModelShape
    rows: int
    """Rows whose tokens are compared; a larger batch has others beside them."""
    context: int
    """Tokens of every row in the cache before the first compared position."""
    tokens: int
    """Compared positions of each row; a multiple of all `lengths`."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Positions of a row in one forward."""


@dataclass(frozen=True, slots=True)
class EngineGrid:
    """Steps of the `hf` engine."""

    shapes: tuple[ModelShape, ...]
    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    prompt: int
    steps: int
    """Timed steps of each figure."""


@dataclass(frozen=True, slots=True)
class EndToEndGrid:
    """Whole rollouts of a batch, plain and with an oracle drafter."""

    shape: ModelShape
    cells: tuple[tuple[str, int], ...]
    """(dtype, requests)."""
    accuracies: tuple[float, ...]
    window: int
    prompt: int
    tokens: int
    """Output tokens of each request."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a run measures."""

    device: str
    dtype: str
    copy_bytes: int
    matmul_size: int
    forwards: ForwardGrid
    sampler_rows: tuple[int, ...]
    sampler_vocab: int
    flips: FlipGrid
    engine: EngineGrid
    end_to_end: EndToEndGrid


QWEN_0_5B = ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936)
QWEN_7B = ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064)
QWEN_32B = ModelShape("qwen2.5-32b", 64, 5120, 40, 8, 27_648, 152_064, sampled_layers=(2, 6))

ON_GPU = Settings(
    device="cuda",
    dtype="bfloat16",
    copy_bytes=4 << 30,
    matmul_size=8192,
    forwards=ForwardGrid(
        (QWEN_7B, QWEN_0_5B, QWEN_32B), (1, 4, 16, 32, 64, 128, 256), (1, 2, 3, 5, 9), (2048, 512, 8192)
    ),
    sampler_rows=(1, 128, 512, 1152, 2304),
    sampler_vocab=QWEN_0_5B.vocab,
    flips=FlipGrid(QWEN_0_5B, 64, 512, 36, (1, 16, 128), (1, 2, 4, 9)),
    engine=EngineGrid((QWEN_0_5B, QWEN_7B), (1, 16, 128), (0, 4), 256, 12),
    end_to_end=EndToEndGrid(
        QWEN_0_5B, (("float32", 16), ("bfloat16", 16), ("bfloat16", 64)), (0.3, 0.5, 0.7, 0.9), 4, 64, 128
    ),
)

TINY = ModelShape("dry-run", 2, 64, 4, 2, 96, 512)
TINY_SAMPLED = ModelShape("dry-run-sampled", 6, 64, 4, 2, 96, 512, sampled_layers=(1, 2))

DRY_RUN = Settings(
    device="cpu",
    dtype="float32",
    copy_bytes=1 << 20,
    matmul_size=64,
    forwards=ForwardGrid((TINY, TINY_SAMPLED), (1, 4), (1, 3), (16, 8)),
    sampler_rows=(1, 8),
    sampler_vocab=TINY.vocab,
    flips=FlipGrid(TINY, 4, 16, 4, (1, 2, 8), (1, 2, 4)),
    engine=EngineGrid((TINY,), (1, 4), (0, 2), 8, 4),
    end_to_end=EndToEndGrid(TINY, (("float32", 4), ("bfloat16", 2)), (0.3, 0.9), 4, 8, 32),
)
"""Every stage with tiny shapes on the CPU: a mistake shows here, before it costs time on a GPU."""


def dry_run_on(device: str) -> Settings:
    """`DRY_RUN` on `cpu` or `cuda`; there in bf16, as in earnest."""
    return DRY_RUN if device == "cpu" else replace(DRY_RUN, device=device, dtype="bfloat16")
