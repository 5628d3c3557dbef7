"""Memory of a verifier, and the default size of its cache. All sizes are in bytes.

The figures of GPUs are conservative estimates: none has been measured.
"""

from __future__ import annotations

import math
from typing import Any

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.models.loading import load_model_config
from specactor_ray.models.shapes import (
    GIB,
    ITEM_BYTES,
    ROW_BYTES,
    context_of,
    count_parameters,
    head_dim,
    step_sizes,
    token_bytes,
)
from specactor_ray.target.base import STATES_UNDER_WAY

BLOCK_TOKENS = {"hf": {"cpu": 16, "gpu": 256}, "vllm": {"cpu": 128, "gpu": 16}}
"""Engine → device → tokens of a block of its cache; attention kernels of vLLM may choose other sizes."""
_BLOCK = 256
"""Tokens of the largest block of any engine's cache."""
_SHARE_OF_GPU = 0.92
"""Usable share of a GPU's memory, as in vLLM: the rest is for the driver and other processes."""
_GPU_FIXED = 2 * GIB
"""Bytes of context, kernels and the workspaces of attention and collectives."""
_KERNELS, _KERNEL_BYTES = 40, 4096
"""Kernels of a layer in a captured step of `hf` or a drafter, and bytes of one on the GPU."""
_SPLITS = 32
"""Parts into which FlashAttention 3 splits the keys of a captured position in vLLM; each has a float32 result."""
_VLLM_GRAPHS = 160 * 2**20
"""Bytes of vLLM's graphs: at most 80 sizes, each in one graph and in those of its layers, at its own least figure."""
_MOST_ON_CPU = 1 * GIB
UNKNOWN_CONTEXT = 4096


def cached_token_bytes(target: TargetConfig, text: Any) -> int:
    """Bytes of one token of a target in the cache of one rank, which in `hf` also keeps the exported hidden states."""
    keeps_states = target.backend == "hf"
    row = ROW_BYTES if keeps_states and not target.gpus else 1
    keys_and_values = token_bytes(text, ITEM_BYTES[target.dtype], target.tensor_parallel, row)
    return keys_and_values + keeps_states * _state_bytes(target, text)


def states_beside_the_cache(target: TargetConfig, cache: float) -> float:
    """Bytes of the exported hidden states of all tokens in a cache, which `vllm` does not keep there."""
    if target.backend == "hf" or not target.hidden_layers:
        return 0.0
    _, text = count_parameters(target.model, target.trust_remote_code)
    return cache / cached_token_bytes(target, text) * _state_bytes(target, text)


def _state_bytes(target: TargetConfig, text: Any) -> int:
    return len(target.hidden_layers) * int(text.hidden_size) * ITEM_BYTES[target.dtype]


def cache_bytes(target: TargetConfig, room: float) -> float:
    """Cache of one rank: `target.kv_cache_gb`, or the size for `max_batch` requests of full length, within `room` (see
    `room_on_cpu` and `room_on_gpu`)."""
    if target.kv_cache_gb is not None:
        return target.kv_cache_gb * GIB
    text = load_model_config(target.model, trust_remote_code=target.trust_remote_code).get_text_config()
    length = target.max_model_len or context_of(text) or UNKNOWN_CONTEXT
    per_token = cached_token_bytes(target, text)
    one, all_of_them = (in_blocks(length, rows) * per_token for rows in (1, target.max_batch))
    most = room if target.gpus else max(_MOST_ON_CPU, one)
    return float(min(all_of_them, most, room))


def reject_cache_below_one_request(target: TargetConfig, max_tokens: int, text: Any) -> None:
    """Check that the cache holds a request: vLLM does not start if a request of `max_model_len` could not be finished
    in it; `hf` accepts shorter prompts, but a prompt of one token must have room for its output."""
    on_vllm, length = target.backend == "vllm", target.max_model_len or context_of(text)
    if not on_vllm:
        length = min(length or 1 << 30, 1 + max_tokens)
    plain = not getattr(text, "sliding_window", None) and not getattr(text, "kv_lora_rank", None)
    plain = plain and not set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if target.kv_cache_gb is None or not length or not plain:
        return  # other layers keep less, by an amount that only the engine has
    per_token = cached_token_bytes(target, text)
    block = BLOCK_TOKENS[target.backend]["gpu" if target.gpus else "cpu"]
    blocks = int(target.kv_cache_gb * GIB / per_token) // block - on_vllm  # vLLM keeps one empty
    if blocks * block < length:
        needed = (-(-length // block) + on_vllm) * block * per_token / GIB
        problem = f"{target.kv_cache_gb:g} holds {max(blocks, 0) * block} tokens of {target.model} in blocks of {block}"
        fix = f"use {math.ceil(needed * 1000) / 1000:g} or more, or a smaller target.max_model_len."
        raise ConfigError("target.kv_cache_gb", f"{problem}, and a request may have {length}.", fix)


def room_on_cpu(target: TargetConfig, free: float) -> float:
    """A quarter of the `free` memory, divided among verifiers and their ranks."""
    return free / 4 / target.replicas / target.tensor_parallel


def room_on_gpu(target: TargetConfig, total: float, hosted: float = 0.0) -> float:
    """Bytes left for the cache on a GPU of `total` bytes beside `hosted` bytes of drafters; below 0 if the model does
    not fit."""
    left = usable_bytes(total) - hosted - (beside_the_cache(target) - _GPU_FIXED)
    return left / (1 + states_beside_the_cache(target, 1.0))


def require_room_on_gpu(target: TargetConfig, total: float, hosted: float) -> float:
    """`room_on_gpu`, checked against the configured cache."""
    room, own = room_on_gpu(target, total, hosted), (target.kv_cache_gb or 0.0) * GIB
    if room > own:
        return room
    cache = f" beside a cache of {gib(own)}" if own else ""
    problem = (
        f"{target.model} in {target.dtype} with activations, graphs and hosted drafters takes "
        f"{gib(beside_the_cache(target) + hosted)} of each GPU{cache}, and a GPU has {gib(total)}."
    )
    if room > 0:
        raise ConfigError("target.kv_cache_gb", problem, f"use {room / GIB:.3g} or less.")
    smaller = "a smaller target.max_step_tokens, or target.backend=vllm with " if target.backend == "hf" else ""
    more = ", or a smaller kv_cache_gb or max_batch of hosted drafters" if hosted else ""
    raise ConfigError("target.gpus", problem, f"use {smaller}a larger target.tensor_parallel (and gpus){more}.")


def usable_bytes(total: float) -> float:
    """Bytes of a GPU of `total` bytes for weights, caches and steps of a process that has it alone."""
    return _SHARE_OF_GPU * total - _GPU_FIXED


def beside_the_cache(target: TargetConfig) -> float:
    """Bytes of a rank on a GPU beside its cache: weights, logits (as computed and in float32) and activations of the
    largest step, captured steps, tables of vLLM, hidden states that drafters read on their way, and a part that does
    not depend on the model."""
    (size, text), tokens = count_parameters(target.model, target.trust_remote_code), target.max_step_tokens
    itemsize, states = ITEM_BYTES[target.dtype], (tokens + 2 * STATES_UNDER_WAY) * _state_bytes(target, text)
    of_hf = text, itemsize, target.max_batch, tokens, tokens
    own = captured_bytes(*of_hf) if target.backend == "hf" else _runner_of_vllm(target, text, itemsize)
    step = _step_bytes(text, itemsize, tokens, tokens)
    return size * itemsize / target.tensor_parallel + step + own + states + _GPU_FIXED


def asleep_bytes(target: TargetConfig) -> float:
    """Bytes of a rank on a GPU, beside those that `usable_bytes` leaves out, while it sleeps: all but the weights and
    the cache; `hf` drops steps and graphs, too."""
    if target.backend == "hf":
        return 0.0
    size, _ = count_parameters(target.model, target.trust_remote_code)
    return beside_the_cache(target) - _GPU_FIXED - size * ITEM_BYTES[target.dtype] / target.tensor_parallel


def captured_bytes(text: Any, itemsize: int, rows: int, tokens: int, logits: int) -> float:
    """Bytes of the captured steps of a model on a GPU (`models/captured.py`) with up to `rows` rows and `tokens`
    tokens: the kernels of each, and activations and up to `logits` logits of the largest, in memory of all."""
    steps = step_sizes(rows, max(rows, tokens))
    kernels = len(steps) * int(text.num_hidden_layers) * _KERNELS * _KERNEL_BYTES
    positions = max(tokens for _, tokens in steps)
    return kernels + _step_bytes(text, itemsize, positions, min(positions, logits))


def _step_bytes(text: Any, itemsize: int, positions: int, logits: int) -> int:
    """Bytes of activations of these positions, and of the logits of some, as computed and in float32."""
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    return logits * int(text.vocab_size) * (itemsize + 4) + positions * (8 * hidden + 2 * inner) * itemsize


def _runner_of_vllm(target: TargetConfig, text: Any, itemsize: int) -> float:
    """Bytes of the tables of vLLM's model runner: counts of each request's output tokens, a bit for each token of its
    prompt, and its tokens; and of graphs: activations and partial results of FlashAttention 3, of at most the positions
    of a step."""
    vocab, length = int(text.vocab_size), target.max_model_len or context_of(text) or UNKNOWN_CONTEXT
    tables, positions = target.max_batch * (4 * vocab + 4 * -(-vocab // 32) + 4 * length), target.max_step_tokens
    if not target.compiled:
        return tables
    heads, splits = -(-int(text.num_attention_heads) // target.tensor_parallel), _SPLITS * (not target.batch_invariant)
    parts = splits * heads * (head_dim(text) + 1) * 4
    return tables + _step_bytes(text, itemsize, positions, 0) + positions * parts + _VLLM_GRAPHS


def in_blocks(length: int, rows: int) -> int:
    """Tokens of a cache for this many rows; one block stays empty in vLLM."""
    return (rows * -(-length // _BLOCK) + 1) * _BLOCK


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
