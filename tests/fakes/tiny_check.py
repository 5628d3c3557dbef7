"""Settings of the GPU check with which a stage takes a second, on a CPU or a GPU."""

from __future__ import annotations

from specactor_ray.bench.gpu_check.stage import ModelShape, Settings

TINY = ModelShape("tiny", 2, 64, 2, 1, 96, 512)
TINY_CHECK = Settings(
    device="cpu",
    dtype="float32",
    copy_bytes=1 << 20,
    matmul_size=64,
    sampler_rows=(1, 8),
    sampler_vocabs=(300, TINY.vocab_size),
    shapes=(TINY,),
    attention_cells=((1, 1, 20), (1, 3, 20), (4, 1, 20), (4, 3, 20)),
    forward_rows=(1, 4),
    forward_positions=(1, 3),
    forward_contexts=(16, 8),
    drafting_rows=(1, 4),
    drafting_prompt=8,
)
