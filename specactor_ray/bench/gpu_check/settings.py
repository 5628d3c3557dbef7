"""Settings of the check: stages, model shapes and grids, for a GPU and for a dry run. Imports nothing heavy."""

from __future__ import annotations

from typing import NamedTuple

STAGES = {
    "hardware": "copies, a matrix product, launches, versions",
    "triton": "the keyed sampler: tokens of its Triton kernels beside the CPU's, then time",
    "attention": "a layer of the hf engine's attention: its kernels, calls at new lengths, and batch invariance",
    "forwards": "ms of a forward by new positions of a row, as a CUDA graph where one was captured, else eager",
    "drafting": "ms of a draft model's token, as a CUDA graph and eager, one at a time and in bursts",
    "flips": "sampled tokens per 1,000 that change with the batch and the positions of a forward",
    "engine": "batches on the hf engine, plain and with an oracle's drafts",
    "vllm": "batches on the vllm engine, plain and with an oracle's drafts, and on vllm.LLM",
}


class ModelShape(NamedTuple):
    """Shape of a Qwen2 decoder, with transformers' names."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    def __str__(self) -> str:
        return self.name

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values of `tokens` tokens."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize * tokens


class Cell(NamedTuple):
    """A batch of `rows` requests."""

    shape: ModelShape
    dtype: str
    rows: int

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    @property
    def columns(self) -> dict[str, str | int]:
        return {**self._asdict(), "shape": self.shape.name}


class Settings(NamedTuple):
    """Grids and limits of a run."""

    device: str
    dtype: str
    copy_bytes: int
    matmul_size: int
    limit_s: float
    """Longest step in seconds: a measurement with a longer one is abandoned."""
    sampler_rows: tuple[int, ...]
    sampler_vocabs: tuple[int, ...]
    """Vocabulary sizes: tokens are compared in all of them; the last one is timed."""
    shapes: tuple[ModelShape, ...]
    """Model shapes of `forwards`; the first is also that of `attention`, the last that of `flips`."""
    attention_cells: tuple[tuple[int, int, int], ...]
    """Rows, new tokens of each row, and tokens before them."""
    attention_lengths: int
    """Number of new lengths that are tried in each cell."""
    forward_rows: tuple[int, ...]
    forward_positions: tuple[int, ...]
    forward_contexts: tuple[int, ...]
    drafting_shapes: tuple[ModelShape, ...]
    drafting_rows: tuple[int, ...]
    flip_rows: int
    """Number of compared rows; larger batches have other rows beside them."""
    flip_context: int
    flip_tokens: int
    """Compared positions of a row, a multiple of all `flip_lengths`."""
    flip_batches: tuple[int, ...]
    flip_lengths: tuple[int, ...]
    engine_cells: tuple[Cell, ...]
    vllm_cells: tuple[Cell, ...]
    ways: tuple[str, ...]
    """Ways of `Batch.run`, `plain` first."""
    accuracy: float
    """Chance that a draft token of the oracle is right."""
    prompt: int
    """Tokens of each prompt in `engine` and `vllm`."""
    tokens: int
    """Tokens of each output in `engine` and `vllm`."""


SMALL = ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936)
LARGE = ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064)
TINY = ModelShape("dry-run", 2, 64, 2, 1, 96, 512)

ON_GPU = Settings(
    device="cuda", dtype="bfloat16", copy_bytes=4 << 30, matmul_size=8192, limit_s=2.0,
    sampler_rows=(1, 128, 512, 1152, 2304), sampler_vocabs=(6016, 50_257, SMALL.vocab_size),
    shapes=(LARGE, SMALL),
    attention_cells=((1, 1, 1000), (1, 4, 1000), (128, 1, 1000), (128, 4, 1000), (256, 1, 1000), (1, 1, 8192)),
    attention_lengths=8,
    forward_rows=(1, 8, 32, 128), forward_positions=(1, 2, 4, 9), forward_contexts=(2048, 512, 8192),
    drafting_shapes=(SMALL,), drafting_rows=(1, 8, 64, 256),
    flip_rows=12, flip_context=512, flip_tokens=36, flip_batches=(1, 16, 128), flip_lengths=(1, 4, 9),
    engine_cells=(Cell(LARGE, "bfloat16", 128), Cell(SMALL, "bfloat16", 64), Cell(SMALL, "float32", 16)),
    vllm_cells=(Cell(LARGE, "bfloat16", 128), Cell(LARGE, "bfloat16", 1)),
    ways=("plain", "k=3", "k=8", "auto"), accuracy=0.7, prompt=128, tokens=64,
)  # fmt: skip
DRY_RUN = Settings(
    device="cpu", dtype="float32", copy_bytes=1 << 20, matmul_size=64, limit_s=60.0,
    sampler_rows=(1, 8), sampler_vocabs=(300, TINY.vocab_size),
    shapes=(TINY,),
    attention_cells=((1, 1, 20), (1, 3, 20), (4, 1, 20), (4, 3, 20)), attention_lengths=3,
    forward_rows=(1, 4), forward_positions=(1, 3), forward_contexts=(16, 8),
    drafting_shapes=(TINY,), drafting_rows=(1, 4),
    flip_rows=4, flip_context=16, flip_tokens=4, flip_batches=(1, 2, 8), flip_lengths=(1, 2, 4),
    engine_cells=(Cell(TINY, "float32", 4), Cell(TINY, "bfloat16", 2)),
    vllm_cells=(Cell(TINY, "float32", 4),),
    ways=("plain", "k=2", "auto"), accuracy=0.7, prompt=8, tokens=24,
)  # fmt: skip
"""Every stage with tiny shapes on the CPU: a mistake shows here, before it costs time on a GPU."""
DRY_RUN_ON_GPU = DRY_RUN._replace(device="cuda", dtype="bfloat16")
