"""What the check measures: model shapes and grids, for a GPU and for a dry run. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Qwen2 decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sampled_layers: tuple[int, int] | None = None
    """For a model too large to measure whole: layer counts that are measured. Their difference is the cost of a layer,
    from which that of all `layers` follows; embedding and head are measured at full size."""

    def __str__(self) -> str:
        return self.name

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def built_layers(self) -> int:
        """Layers whose weights are made."""
        return max(self.sampled_layers or (self.layers,))

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values of `tokens` tokens in the layers that are built."""
        return 2 * self.built_layers * self.kv_heads * self.head_dim * itemsize * tokens


@dataclass(frozen=True, slots=True)
class ForwardGrid:
    """Forwards of `rows` x `positions` new tokens after `contexts` tokens of each row."""

    shapes: tuple[ModelShape, ...]
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    contexts: tuple[int, ...]
    """In this order: a run that is cut has whole grids of the first ones."""


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    """Attention of `queries` new tokens of each row over `lengths` lengths, from `tokens` keys on."""

    shape: ModelShape
    rows: tuple[int, ...]
    queries: tuple[int, ...]
    tokens: int
    lengths: int


@dataclass(frozen=True, slots=True)
class FlipGrid:
    """Tokens sampled from the same contexts under forwards of different shape."""

    shape: ModelShape
    rows: int
    """Rows whose tokens are compared; a larger batch has others beside them."""
    context: int
    tokens: int
    """Compared positions of each row; a multiple of all `lengths`."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Positions of a row in one forward."""


@dataclass(frozen=True, slots=True)
class RolloutGrid:
    """Batches of requests that an engine decodes, each in several ways (`rollouts.Batch`)."""

    cells: tuple[tuple[ModelShape, str, int], ...]
    """Shape, dtype, requests."""
    ways: tuple[str, ...]
    """`plain` first: its tokens are what the oracle of the others drafts."""
    accuracy: float
    """Chance that a draft token of the oracle is right."""
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
    sampler_rows: tuple[int, ...]
    sampler_vocab: int
    compared_vocabs: tuple[int, ...]
    attention: AttentionGrid
    forwards: ForwardGrid
    flips: FlipGrid
    engine: RolloutGrid
    vllm: RolloutGrid


QWEN_0_5B = ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936)
QWEN_7B = ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064)
QWEN_32B = ModelShape("qwen2.5-32b", 64, 5120, 40, 8, 27_648, 152_064, sampled_layers=(2, 6))
_WAYS = ("plain", "k=3", "k=8", "auto")

ON_GPU = Settings(
    device="cuda",
    dtype="bfloat16",
    copy_bytes=4 << 30,
    matmul_size=8192,
    sampler_rows=(1, 128, 512, 1152, 2304),
    sampler_vocab=QWEN_0_5B.vocab,
    compared_vocabs=(6016, 50_257, QWEN_0_5B.vocab),
    attention=AttentionGrid(QWEN_7B, (1, 128), (1, 4), 1000, 8),
    forwards=ForwardGrid((QWEN_7B, QWEN_0_5B, QWEN_32B), (1, 8, 32, 64, 128, 256), (1, 2, 4, 9), (2048, 8192)),
    flips=FlipGrid(QWEN_0_5B, 32, 512, 36, (1, 16, 128), (1, 4, 9)),
    engine=RolloutGrid(
        ((QWEN_7B, "bfloat16", 128), (QWEN_7B, "bfloat16", 16), (QWEN_0_5B, "bfloat16", 64), (QWEN_0_5B, "float32", 16)),
        (*_WAYS, "decoupled"), 0.7, 128, 48,
    ),
    vllm=RolloutGrid(((QWEN_7B, "bfloat16", 128), (QWEN_7B, "bfloat16", 1)), _WAYS, 0.7, 128, 64),
)  # fmt: skip

TINY = ModelShape("dry-run", 2, 64, 2, 1, 96, 512)
TINY_SAMPLED = ModelShape("dry-run-sampled", 6, 64, 2, 1, 96, 512, sampled_layers=(1, 2))

DRY_RUN = Settings(
    device="cpu",
    dtype="float32",
    copy_bytes=1 << 20,
    matmul_size=64,
    sampler_rows=(1, 8),
    sampler_vocab=TINY.vocab,
    compared_vocabs=(300, TINY.vocab),
    attention=AttentionGrid(TINY, (1, 4), (1, 3), 20, 3),
    forwards=ForwardGrid((TINY, TINY_SAMPLED), (1, 4), (1, 3), (16, 8)),
    flips=FlipGrid(TINY, 4, 16, 4, (1, 2, 8), (1, 2, 4)),
    engine=RolloutGrid(
        ((TINY, "float32", 4), (TINY, "bfloat16", 2)), ("plain", "k=2", "auto", "decoupled"), 0.7, 8, 24
    ),
    vllm=RolloutGrid(((TINY, "float32", 4),), ("plain", "k=2", "auto"), 0.7, 8, 24),
)
"""Every stage with tiny shapes on the CPU: a mistake shows here, before it costs time on a GPU."""


def dry_run_on(device: str) -> Settings:
    """`DRY_RUN` on `cpu` or `cuda`; there in bf16, as in earnest."""
    return DRY_RUN if device == "cpu" else replace(DRY_RUN, device=device, dtype="bfloat16")
