"""Settings of the GPU check with which a stage takes a second, on a CPU or a GPU."""

from __future__ import annotations

from gpu_check.stage import Settings

SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 512,
}
TINY_CHECK = Settings(
    rows=(1, 4),
    drafts=(0, 2),
    accept=(0.5,),
    device="cpu",
    dtype="float32",
    copy_bytes=1 << 20,
    matmul_size=64,
    target=SHAPE,
    target_prompt=20,
    target_tokens=16,
    rounds=1,
    drafter=SHAPE,
    drafting_prompt=8,
)
